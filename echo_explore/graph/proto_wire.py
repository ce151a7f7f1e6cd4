"""The wire format of Protocol Buffers: varints, fixed-width numbers and length-delimited fields.

References:
    protobuf.dev, "Encoding" (2025): a field is a tag (number << 3 | wire type) and a value.
"""

import struct
from collections.abc import Iterator

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class WireError(ValueError):
    """What breaks the format, and at which byte of the data."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.why, self.at = why, at


def varint(value: int) -> bytes:
    """An unsigned number, or a negative one as its 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(number: int, value: int) -> bytes:
    """A field of type uint32, uint64, int64, bool or enum; empty for the default 0, as proto3 has it."""
    return varint(number << 3 | VARINT) + varint(value) if value else b""


def signed_field(number: int, value: int) -> bytes:
    """A field of type int64, also where it is 0 (a member of a oneof)."""
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    """A field of type string, bytes or message."""
    return varint(number << 3 | LENGTH) + varint(len(value)) + value


def double_field(number: int, value: float) -> bytes:
    """A field of type double, also where it is 0 (a member of a oneof)."""
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)


def fixed64_field(number: int, value: int) -> bytes:
    """A field of type fixed64, also where it is 0."""
    return varint(number << 3 | FIXED64) + struct.pack("<Q", value)


def packed_field(number: int, values: list[int]) -> bytes:
    """A repeated field of numbers; empty for none."""
    return bytes_field(number, b"".join(map(varint, values))) if values else b""


def read_varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and where it ends.

    Raises:
        WireError: it is cut off or longer than 10 bytes.
    """
    value = 0
    for count in range(_MAX_VARINT_BYTES):
        if at + count >= end:
            raise WireError("the data ends inside a number", at)
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & ((1 << 64) - 1), at + count + 1
    raise WireError("a number is longer than 10 bytes", at)


def read_fields(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Fields of the message in [start, end): number, wire type, number value, and the extent of a bytes value.

    The value is 0 for bytes; the extent holds the raw bytes of fixed-width numbers too.

    Raises:
        WireError: the data does not follow the format.
    """
    at = start
    while at < end:
        field_at = at
        tag, at = read_varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise WireError("a field has number 0", field_at)
        if kind == VARINT:
            first = at
            value, at = read_varint(data, at, end)
            yield number, kind, value, first, at
            continue
        if kind == LENGTH:
            size, at = read_varint(data, at, end)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise WireError(f"field {number} has the unknown wire type {kind}", field_at)
        if at + size > end:
            raise WireError(f"field {number} needs {size} bytes, {end - at} are left", field_at)
        yield number, kind, 0, at, at + size
        at += size


def signed(value: int) -> int:
    """A 64-bit two's complement as a signed number (int32, int64)."""
    return value - (1 << 64) if value >> 63 else value


def unpacked(data: memoryview, start: int, end: int) -> list[int]:
    """Numbers of a packed repeated field."""
    values, at = [], start
    while at < end:
        value, at = read_varint(data, at, end)
        values.append(value)
    return values
