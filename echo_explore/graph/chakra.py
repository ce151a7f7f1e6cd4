"""Execution graphs as MLCommons Chakra execution traces, and back.

What Chakra has no field for travels in attributes whose names begin with `echo.`; a file that has them comes back as
the same graph. Files of other programs become graphs by what every Chakra file says: kinds, names, dependences, FLOP
(`num_ops`), bytes and collectives.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from echo_explore.core import SpecError, canonical_json, write_atomic
from echo_explore.core.versions import GRAPH_SCHEMA
from echo_explore.graph.chakra_foreign import COMM_TYPES, TRANSFERS, foreign_rows, transfers_of, wrong_node
from echo_explore.graph.chakra_messages import (
    Node,
    NodeType,
    Value,
    messages,
    read_metadata,
    read_node,
    write_metadata,
    write_node,
)
from echo_explore.graph.execution_graph import COLUMNS, TEXT_COLUMNS, ExecutionGraph, OpRow, build_graph
from echo_explore.graph.kinds import NUM_DIMS, Axis, Collective, DType, OpClass, OpKind, Phase
from echo_explore.graph.proto_wire import WireError
from echo_explore.graph.rank_trace import RankTrace, facts_of, trace_of

VERSION = "0.0.4"
"""Of the schema that is written (et_def.proto at revision 21585d8, 2026-05-20)."""
_PREFIX = "echo."
_SCHEMA = f"{_PREFIX}schema"
_FACTS = f"{_PREFIX}facts"
_NOT_WRITTEN = ("name",)
"""Columns with a field of their own in every node."""


def save_chakra(path: Path, graph: ExecutionGraph | RankTrace, *, overwrite: bool = True) -> None:
    """Write a graph as one Chakra trace file; readers never see a part of it.

    A trace of a rank also says which ranks each collective joins and between which a transfer runs.

    Raises:
        FileExistsError: it is there, and `overwrite` is false.
    """
    trace = graph if isinstance(graph, RankTrace) else None
    rows = graph.graph if isinstance(graph, RankTrace) else graph
    facts = {} if trace is None else {_FACTS: canonical_json(facts_of(trace))}
    previous: dict[int, int] = {}
    parts = [write_metadata(VERSION, {_SCHEMA: GRAPH_SCHEMA, **facts})]
    for row in range(rows.num_ops):
        stream = int(rows.stream[row])
        group = -1 if trace is None else int(trace.group_of_row[row])
        ranks = () if trace is None or group < 0 else trace.groups[group]
        parts.append(write_node(_node_of(rows, row, previous.get(stream), ranks)))
        previous[stream] = row
    write_atomic(path, b"".join(parts), overwrite=overwrite)


def _node_of(graph: ExecutionGraph, row: int, previous: int | None, ranks: tuple[int, ...]) -> Node:
    kind, collective = OpKind(int(graph.kind[row])), Collective(int(graph.collective[row]))
    attrs: dict[str, Value] = {"is_cpu_op": False}
    node_type = NodeType.METADATA  # waits and host syncs: Chakra knows dependences only
    if kind is OpKind.COMPUTE:
        node_type = NodeType.COMP
        attrs["num_ops"] = round(float(graph.flop[row]))
        attrs["tensor_size"] = round(float(graph.bytes_read[row] + graph.bytes_written[row]))
    elif kind is OpKind.COLLECTIVE:
        node_type = TRANSFERS.get(collective, NodeType.COMM_COLL)
        attrs["comm_size"] = round(float(graph.message_bytes[row]))
        attrs["pg_name"] = Axis(int(graph.axis[row])).name.lower()
        if collective in COMM_TYPES:
            attrs["comm_type"] = int(COMM_TYPES[collective])
        if collective in TRANSFERS and len(ranks) == 2:
            attrs["comm_src"], attrs["comm_dst"] = ranks
    start, stop = int(graph.dep_offsets[row]), int(graph.dep_offsets[row + 1])
    dtype = DType(int(graph.dtype[row])).name.lower()
    inputs, arrow, outputs = graph.strings[graph.shapes[row]].partition("->")
    return Node(
        number=row, name=graph.strings[graph.name[row]], kind=node_type,
        ctrl_deps=() if previous is None else (previous,),
        data_deps=tuple(graph.dep_index[start:stop].tolist()),
        inputs=_info(inputs, dtype) if arrow else ("", "", ""), outputs=_info(outputs, dtype),
        attrs=attrs | _own_attrs(graph, row),
    )  # fmt: skip


def _info(shapes: str, dtype: str) -> tuple[str, str, str]:
    """Values, shapes and types of `2048x1x8,8x4` as Chakra prints them."""
    if not shapes:
        return "", "", ""
    listed = [f"[{', '.join(shape.split('x'))}]" for shape in shapes.split(",")]
    return "", f"[{', '.join(listed)}]", f"[{', '.join([dtype] * len(listed))}]"


def _own_attrs(graph: ExecutionGraph, row: int) -> dict[str, Value]:
    """Every column that differs from a row without anything, by name."""
    attrs: dict[str, Value] = {}
    for column, default in _DEFAULTS.items():
        value = getattr(graph, column)[row].item()
        if column in TEXT_COLUMNS:
            value = graph.strings[value]
        if value != default:
            attrs[_PREFIX + column] = value
    sizes = graph.dims[row].tolist()
    while sizes and sizes[-1] == 0:
        sizes.pop()
    if sizes:
        attrs[f"{_PREFIX}dims"] = tuple(sizes)
    return attrs


_EMPTY = OpRow()
_DEFAULTS: Mapping[str, Any] = {name: getattr(_EMPTY, name) for name in COLUMNS if name not in _NOT_WRITTEN}
_ENUMS: Mapping[str, Any] = {
    "kind": OpKind, "op_class": OpClass, "phase": Phase, "dtype": DType, "axis": Axis, "collective": Collective
}  # fmt: skip


def load_chakra(path: Path) -> ExecutionGraph:
    """The graph of a Chakra trace file; see `load_chakra_trace`."""
    return _read(path)[0]


def load_chakra_trace(path: Path) -> RankTrace | None:
    """The trace of a rank in a Chakra trace file; None where the file names no ranks.

    Nodes of the host (`is_cpu_op`) and of kind metadata are left out, what depends on them depends on what they depend
    on; a file of host nodes only keeps them. Collectives of other programs run beside the kernels, until a WAIT
    before the first node that depends on them; of their groups only transfers are known, by `comm_src` and `comm_dst`.

    Raises:
        SpecError: the file is missing, no Chakra trace, or breaks off; with the byte and the field.
    """
    return _read(path)[1]


def _read(path: Path) -> tuple[ExecutionGraph, RankTrace | None]:
    attrs, nodes = _messages(path)
    schema = attrs.get(_SCHEMA)
    if schema is None:
        rows, peers = foreign_rows(path, nodes)
        graph = build_graph(rows)
        return graph, transfers_of(path, graph, peers)
    if schema != GRAPH_SCHEMA:
        rule = f"holds a graph of schema {schema!r}, not {GRAPH_SCHEMA}"
        raise SpecError("file", str(path), rule, "trace again")
    graph = build_graph([_own_row(path, number, node, len(nodes)) for number, node in enumerate(nodes)])
    if _FACTS not in attrs:
        return graph, None
    try:
        return graph, trace_of(graph, json.loads(str(attrs[_FACTS])))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SpecError("file", str(path), f"has {_FACTS} that fit no graph ({error})", "trace again") from None


def _messages(path: Path) -> tuple[dict[str, Value], list[Node]]:
    """Attributes of the file, and its nodes."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise SpecError("file", str(path), "does not exist", "check the path") from None
    except OSError as error:
        raise SpecError("file", str(path), f"can't be read: {error.strerror}", "check the path") from None
    _refuse_others(path, raw)
    data = memoryview(raw)
    nodes: list[Node] = []
    attrs: dict[str, Value] | None = None
    try:
        for message in messages(data):
            if attrs is None:
                _, attrs = read_metadata(data, message)
            else:
                nodes.append(read_node(data, message))
    except WireError as error:
        what = "is no Chakra trace" if attrs is None else f"is a Chakra trace that breaks after {len(nodes)} nodes"
        raise SpecError("file", str(path), f"{what}: byte {error.at}: {error.why}", "export it anew") from None
    if not nodes or attrs is None:
        raise SpecError("file", str(path), f"is a Chakra trace without nodes ({len(raw)} bytes)", "export it anew")
    return attrs, nodes


_MAGIC = {
    b"PK\x03\x04": "a zip or NumPy archive", b"\x1f\x8b": "a gzip file",
    b"\x89PNG": "a picture", b"SQLite format": "an SQLite file", b"\x7fELF": "a program",
}  # fmt: skip


def _refuse_others(path: Path, raw: bytes) -> None:
    if not raw:
        raise SpecError("file", str(path), "is empty (byte 0)", "export it anew")
    for magic, what in _MAGIC.items():
        if raw.startswith(magic):
            raise SpecError("file", str(path), f"is {what}, no Chakra trace (byte 0)", "give a .et file")
    if raw[:1] in b"{[" and raw[1:80].lstrip()[:1] in b'"{[]}':  # a message may have that length
        raise SpecError("file", str(path), "is JSON, no Chakra trace (byte 0)", "give a .et file")


def _own_row(path: Path, number: int, node: Node, num_nodes: int) -> OpRow:
    """A row as `save_chakra` wrote it."""
    row = OpRow(name=node.name, deps=node.data_deps)
    if node.number != number or any(d >= number for d in node.data_deps):
        raise wrong_node(path, node, "is out of order")
    for key, value in node.attrs.items():
        column = key.removeprefix(_PREFIX)
        if column == key:
            continue
        if not _fits(column, value, num_nodes):
            raise wrong_node(path, node, f"has {key} = {value!r}, which no column holds")
        if column == "dims" and isinstance(value, tuple):
            row.dims = tuple(int(v) for v in value)
        elif column in _DEFAULTS and type(value) is type(_plain(_DEFAULTS[column])):
            try:
                setattr(row, column, _ENUMS[column](value) if column in _ENUMS else value)
            except ValueError:
                raise wrong_node(path, node, f"has {key} = {value!r}, which is no {_ENUMS[column].__name__}") from None
        else:
            raise wrong_node(path, node, f"has {key} = {value!r}, which no column holds")
    return row


def _fits(column: str, value: Value, num_nodes: int) -> bool:
    """Whether a column can hold a number: finite and not negative, no wider than the column, no row that is not."""
    if column == "dims":
        sizes = value if isinstance(value, tuple) else (value,)
        return len(sizes) <= NUM_DIMS and all(isinstance(v, int) and 0 <= v < 2**62 for v in sizes)
    if isinstance(value, float):
        return 0 <= value < math.inf
    if column in ("awaits", "forward_op"):
        return isinstance(value, int) and -1 <= value < num_nodes
    if isinstance(value, int) and column in COLUMNS and not isinstance(value, bool):
        kind = np.dtype(COLUMNS[column])
        return kind.kind != "i" or np.iinfo(kind).min <= value <= np.iinfo(kind).max
    return True


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
