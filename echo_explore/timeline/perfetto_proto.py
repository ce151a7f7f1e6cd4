"""Trace events as a Perfetto trace in Protocol Buffers (`.pftrace`, `.perfetto-trace`).

A track a rank class (a process) and stream (a thread), a slice an op, flows from sends to what waits for them, and a
counter track a counter. What the trace leaves out is on a track of its own, `step`.

References:
    perfetto.dev, "Converting arbitrary timestamped data to Perfetto" (2025); field numbers of perfetto/trace/
    perfetto_trace.proto, v59 (2026).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from echo_explore.graph.proto_wire import bytes_field, double_field, fixed64_field, number_field, signed_field
from echo_explore.timeline.ops import NUM_STREAMS

_SEQUENCE: Final = number_field(10, 1)
"""TracePacket.trusted_packet_sequence_id: one writer."""
_BEGIN, _END, _COUNTER = 1, 2, 4
"""TrackEvent.Type."""
_STREAMS: Final = 1 << NUM_STREAMS.bit_length()
"""More than a rank class has, so that thread numbers of two classes differ."""


def proto_pieces(events: Callable[[], Iterable[Mapping[str, Any]]], facts: Mapping[str, Any]) -> Iterator[bytes]:
    """The packets of a trace; one after another they are the file.

    Args:
        events: gives, each time that it is called, those of phases M, X, s, f and C, as in Chrome trace JSON, M first;
            those of a thread in order.
        facts: of the whole step, for its track; `step_time_s` is its length.
    """
    flows = _flows(events())
    counters: dict[tuple[int, str], int] = {}
    yield from _step(facts)
    for event in events():
        if event["ph"] == "M":
            yield from _track(event)
        elif event["ph"] == "X":
            yield from _slice(event, flows.get((event["pid"], event["tid"], event["ts"]), b""))
        elif event["ph"] == "C":
            yield from _count(event, counters)


def _packet(number: int, message: bytes, at_us: float | None = None) -> bytes:
    """A TracePacket with one field, as a field of Trace; `at_us` microseconds from the start."""
    timestamp = b"" if at_us is None else number_field(8, round(at_us * 1e3))
    return bytes_field(1, timestamp + bytes_field(number, message) + _SEQUENCE)


def _text(number: int, value: str) -> bytes:
    return bytes_field(number, value.encode())


def _thread_uuid(rank: int, stream: int) -> int:
    return (rank + 1) * _STREAMS * 2 + stream + 1


def _process_uuid(rank: int) -> int:
    return (rank + 1) * _STREAMS * 2


_STEP_UUID: Final = 1
_COUNTER_UUIDS: Final = 1 << 40


def _track(event: Mapping[str, Any]) -> Iterator[bytes]:
    """Descriptor of a process or a thread: TracePacket.track_descriptor."""
    rank, name = event["pid"], event["args"].get("name", "")
    if event["name"] == "process_name":
        process = number_field(1, rank + 1) + _text(6, name)
        yield _packet(60, number_field(1, _process_uuid(rank)) + bytes_field(3, process))
    elif event["name"] == "thread_name":
        number = (rank + 1) * _STREAMS + event["tid"]
        thread = number_field(1, rank + 1) + number_field(2, number) + _text(5, name)
        parent = number_field(5, _process_uuid(rank))
        yield _packet(60, number_field(1, _thread_uuid(rank, event["tid"])) + parent + bytes_field(4, thread))


def _step(facts: Mapping[str, Any]) -> Iterator[bytes]:
    """A track with one slice as long as the step, annotated with the facts."""
    yield _packet(60, number_field(1, _STEP_UUID) + _text(2, "step"))
    notes = b"".join(bytes_field(4, _annotation(name, value)) for name, value in facts.items())
    begin = number_field(9, _BEGIN) + number_field(11, _STEP_UUID) + _text(23, facts.get("title") or "step") + notes
    yield _packet(11, begin, 0.0)
    yield _packet(11, number_field(9, _END) + number_field(11, _STEP_UUID), facts["step_time_s"] * 1e6)


def _annotation(name: str, value: Any) -> bytes:
    """A DebugAnnotation of text or a number."""
    if isinstance(value, str):
        return _text(10, name) + _text(6, value)
    return _text(10, name) + (double_field(5, value) if isinstance(value, float) else signed_field(4, value))


def _slice(event: Mapping[str, Any], flows: bytes) -> Iterator[bytes]:
    """Begin and end of an op: TracePacket.track_event."""
    track = number_field(11, _thread_uuid(event["pid"], event["tid"]))
    notes = b"".join(bytes_field(4, _annotation(name, value)) for name, value in event["args"].items())
    begin = number_field(9, _BEGIN) + track + _text(22, event["cat"]) + _text(23, event["name"]) + flows + notes
    yield _packet(11, begin, event["ts"])
    yield _packet(11, number_field(9, _END) + track, event["ts"] + event["dur"])


def _flows(events: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int, float], bytes]:
    """Fields of the slices that flows start from (flow_ids) or end at (terminating_flow_ids)."""
    found: dict[tuple[int, int, float], bytes] = {}
    for event in events:
        if event["ph"] in "sf":
            key = (event["pid"], event["tid"], event["ts"])
            number = 47 if event["ph"] == "s" else 48
            found[key] = found.get(key, b"") + fixed64_field(number, event["id"] + 1)
    return found


def _count(event: Mapping[str, Any], counters: dict[tuple[int, str], int]) -> Iterator[bytes]:
    """A value of a counter; the first one declares its track."""
    key = (event["pid"], event["name"])
    if key not in counters:
        counters[key] = _COUNTER_UUIDS + len(counters)
        per_s, size = "bytes/s" in event["name"], "bytes" in event["name"]
        unit = _text(6, "B/s") if per_s else number_field(3, 3 if size else 2)  # CounterDescriptor.unit: bytes, count
        parent = number_field(5, _process_uuid(event["pid"]))
        yield _packet(60, number_field(1, counters[key]) + parent + _text(2, event["name"]) + bytes_field(8, unit))
    track = number_field(11, counters[key])
    yield _packet(11, number_field(9, _COUNTER) + track + double_field(44, float(event["args"]["value"])), event["ts"])
