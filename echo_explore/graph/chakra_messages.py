"""Messages of MLCommons Chakra's execution traces, written and read by their published field numbers.

A file holds a GlobalMetadata and then one Node an operation, each behind its length as a varint.

References:
    MLCommons Chakra, schema/protobuf/et_def.proto, package ChakraProtoMsg, revision 21585d8 (2026-05-20).
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from echo_explore.graph import proto_wire as wire

Value = bool | int | float | str | bytes | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""Of an attribute: bool, int (as int64), float (as double), text or bytes, or a list of one of the first four."""


class NodeType(IntEnum):
    """Kinds of nodes."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CommType(IntEnum):
    """Kinds of collectives, the attribute `comm_type`."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation.

    Attributes:
        number: the id, unique in a file.
        ctrl_deps: ids of nodes that must have been launched before.
        data_deps: ids of nodes whose results this one needs.
        duration_micros: whole microseconds, 0 if unknown.
        inputs: printed lists of values, shapes and types.
        outputs: the same.
        attrs: by name.
    """

    number: int
    name: str
    kind: NodeType
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    duration_micros: int = 0
    inputs: tuple[str, str, str] = ("", "", "")
    outputs: tuple[str, str, str] = ("", "", "")
    attrs: Mapping[str, Value] = field(default_factory=dict)


_SCALARS = {
    3: "double", 5: "float", 7: "int", 9: "int", 11: "uint", 13: "uint", 15: "zigzag", 17: "zigzag", 19: "fixed32",
    21: "fixed64", 23: "sfixed32", 25: "sfixed64", 27: "bool", 29: "text", 31: "bytes",
}  # fmt: skip
"""Field number of a scalar in AttributeProto; its list is the next number."""


def write_metadata(version: str, attrs: Mapping[str, Value]) -> bytes:
    """A GlobalMetadata with its length."""
    return _delimited(wire.bytes_field(1, version.encode()) + _attrs(2, attrs))


def write_node(node: Node) -> bytes:
    """A Node with its length."""
    body = [
        wire.number_field(1, node.number),
        wire.bytes_field(2, node.name.encode()),
        wire.number_field(3, node.kind),
        wire.packed_field(4, list(node.ctrl_deps)),
        wire.packed_field(5, list(node.data_deps)),
        wire.number_field(7, node.duration_micros),
    ]
    for number, info in ((8, node.inputs), (9, node.outputs)):
        if any(info):
            body.append(wire.bytes_field(number, b"".join(_text(i + 1, t) for i, t in enumerate(info))))
    body.append(_attrs(10, node.attrs))
    return _delimited(b"".join(body))


def _delimited(body: bytes) -> bytes:
    return wire.varint(len(body)) + body


def _text(number: int, text: str) -> bytes:
    return wire.bytes_field(number, text.encode()) if text else b""


_INT64 = 9
_INT_FIELDS = {"comm_src": 7, "comm_dst": 7, "comm_tag": 7, "tensor_size": 13}
"""Attributes that Chakra's feeders read from another field than int64 (src/feeder/et_feeder_node.cpp, 2024)."""


def _attrs(number: int, attrs: Mapping[str, Value]) -> bytes:
    return b"".join(
        wire.bytes_field(number, wire.bytes_field(1, name.encode()) + _value(value, _INT_FIELDS.get(name, _INT64)))
        for name, value in attrs.items()
    )


def _value(value: Value, int_field: int) -> bytes:
    if isinstance(value, bool):
        return wire.varint(27 << 3 | wire.VARINT) + wire.varint(int(value))
    if isinstance(value, int):
        return wire.varint(int_field << 3 | wire.VARINT) + wire.varint(value)
    if isinstance(value, float):
        return wire.double_field(3, value)
    if isinstance(value, str):
        return wire.bytes_field(29, value.encode())
    if isinstance(value, bytes):
        return wire.bytes_field(31, value)
    if all(isinstance(v, int) for v in value):
        return wire.bytes_field(10, wire.packed_field(1, [int(v) for v in value]))
    if all(isinstance(v, str) for v in value):
        return wire.bytes_field(30, b"".join(wire.bytes_field(1, str(v).encode()) for v in value))
    packed = struct.pack(f"<{len(value)}d", *(float(v) for v in value))
    return wire.bytes_field(4, wire.bytes_field(1, packed))


@dataclass(frozen=True, slots=True)
class Message:
    """The extent of one message of a file."""

    start: int
    stop: int


def messages(data: memoryview) -> Iterator[Message]:
    """The messages of a file, in order.

    Raises:
        WireError: the file ends inside a message.
    """
    at = 0
    while at < len(data):
        size, start = wire.read_varint(data, at, len(data))
        if start + size > len(data):
            raise wire.WireError(f"a message of {size} bytes begins, {len(data) - start} are left", at)
        yield Message(start, start + size)
        at = start + size


def read_metadata(data: memoryview, message: Message) -> tuple[str, dict[str, Value]]:
    """Version and attributes of a GlobalMetadata.

    Raises:
        WireError: it is none.
    """
    version, attrs = "", dict[str, Value]()
    for number, kind, _, start, stop in wire.read_fields(data, message.start, message.stop):
        if number not in (1, 2) or kind != wire.LENGTH:
            raise wire.WireError(f"the first message has field {number}, which GlobalMetadata has not", start)
        if number == 1:
            version = _string(data, start, stop)
        else:
            name, value = _read_attr(data, start, stop)
            attrs[name] = value
    return version, attrs


def read_node(data: memoryview, message: Message) -> Node:
    """One Node.

    Raises:
        WireError: it is none.
    """
    numbers = {1: 0, 3: 0, 7: 0}
    deps: dict[int, list[int]] = {4: [], 5: []}
    infos = {8: ("", "", ""), 9: ("", "", "")}
    name, attrs = "", dict[str, Value]()
    for number, kind, value, start, stop in wire.read_fields(data, message.start, message.stop):
        if number in deps:
            deps[number] += [value] if kind == wire.VARINT else wire.unpacked(data, start, stop)
        elif number in (1, 3, 6, 7):
            _expect(kind, wire.VARINT, "Node", number, start)
            numbers[number] = value
        elif number in (2, 8, 9, 10):
            _expect(kind, wire.LENGTH, "Node", number, start)
            if number == 2:
                name = _string(data, start, stop)
            elif number == 10:
                key, attr = _read_attr(data, start, stop)
                attrs[key] = attr
            else:
                infos[number] = _read_info(data, start, stop)
    if numbers[3] not in NodeType.__members__.values():
        raise wire.WireError(f"Node.type is {numbers[3]}, which is none", message.start)
    return Node(
        number=numbers[1], name=name, kind=NodeType(numbers[3]), ctrl_deps=tuple(deps[4]), data_deps=tuple(deps[5]),
        duration_micros=numbers[7], inputs=infos[8], outputs=infos[9], attrs=attrs,
    )  # fmt: skip


def _expect(kind: int, wanted: int, message: str, number: int, at: int) -> None:
    if kind != wanted:
        raise wire.WireError(f"{message} field {number} has wire type {kind}, not {wanted}", at)


def _string(data: memoryview, start: int, stop: int) -> str:
    try:
        return bytes(data[start:stop]).decode()
    except UnicodeDecodeError:
        raise wire.WireError("a text is not UTF-8", start) from None


def _read_info(data: memoryview, start: int, stop: int) -> tuple[str, str, str]:
    texts = ["", "", ""]
    for number, kind, _, first, last in wire.read_fields(data, start, stop):
        if number in (1, 2, 3):
            _expect(kind, wire.LENGTH, "IOInfo", number, first)
            texts[number - 1] = _string(data, first, last)
    return texts[0], texts[1], texts[2]


def _read_attr(data: memoryview, start: int, stop: int) -> tuple[str, Value]:
    name, found = "", None
    for number, kind, value, first, last in wire.read_fields(data, start, stop):
        if number in (1, 2):
            _expect(kind, wire.LENGTH, "AttributeProto", number, first)
            name = _string(data, first, last) if number == 1 else name
        elif number in _SCALARS:
            found = _scalar(data, _SCALARS[number], kind, value, first, last)
        elif number - 1 in _SCALARS:
            _expect(kind, wire.LENGTH, "AttributeProto", number, first)
            found = _list(data, _SCALARS[number - 1], first, last)
    if not name or found is None:
        raise wire.WireError("an attribute has no name or no value", start)
    return name, found


_STRUCT = {"double": "d", "float": "f", "fixed32": "I", "fixed64": "Q", "sfixed32": "i", "sfixed64": "q"}
"""Codes of the struct module of numbers of fixed width."""


def _scalar(data: memoryview, what: str, kind: int, value: int, start: int, stop: int) -> Value:
    if what in _STRUCT:
        code = f"<{_STRUCT[what]}"
        _expect(kind, wire.FIXED64 if struct.calcsize(code) == 8 else wire.FIXED32, f"{what} attribute,", 0, start)
        unpacked: float | int = struct.unpack(code, data[start:stop])[0]
        return unpacked
    if what in ("text", "bytes"):
        _expect(kind, wire.LENGTH, f"{what} attribute,", 0, start)
        return _string(data, start, stop) if what == "text" else bytes(data[start:stop])
    _expect(kind, wire.VARINT, f"{what} attribute,", 0, start)
    return _number(what, value)


def _number(what: str, value: int) -> int:
    """A varint as its type."""
    if what == "bool":
        return bool(value)
    if what == "zigzag":
        return value >> 1 ^ -(value & 1)
    return wire.signed(value) if what == "int" else value


def _list(data: memoryview, what: str, start: int, stop: int) -> Value:
    """The `values` of a list message: packed numbers, or one by one."""
    values: list[Value] = []
    for number, kind, value, first, last in wire.read_fields(data, start, stop):
        if number != 1:
            continue
        if kind != wire.LENGTH or what in ("text", "bytes"):
            values.append(_scalar(data, what, kind, value, first, last))
        elif what in _STRUCT:
            width = struct.calcsize(f"<{_STRUCT[what]}")
            if (last - first) % width:
                raise wire.WireError(f"a list of {what} has {last - first} bytes", first)
            values += struct.unpack(f"<{(last - first) // width}{_STRUCT[what]}", data[first:last])
        else:
            values += [_number(what, v) for v in wire.unpacked(data, first, last)]
    return tuple(values)  # type: ignore[return-value]
