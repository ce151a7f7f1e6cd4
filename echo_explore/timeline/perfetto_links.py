"""What a trace shows between spans: arrows from sends to what waits for them, and counters over time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from echo_explore.specs.schedules import PassKind
from echo_explore.timeline.ops import TRANSFERS, Stream
from echo_explore.timeline.spans import Span

_SENDS = (Stream.SEND_FORWARD, Stream.SEND_BACKWARD)
SavedBytes = Sequence[Sequence[float]]
"""Activation bytes that a forward leaves for its backward, by stage and chunk of the stage."""


def microseconds(seconds: float) -> float:
    """Whole nanoseconds, so that neighbours still touch and never overlap."""
    return round(seconds * 1e6, 3)


def flow_events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """A pair of flow events for every transfer between stages: from its start to the pass that waits for it."""
    first = _first_spans(spans)
    number = 0
    for span in spans:
        if span.stream not in _SENDS:
            continue
        forward = span.stream == Stream.SEND_FORWARD
        receiver = first.get((span.variant, forward, span.micro_batch, span.model_chunk + (1 if forward else -1)))
        if receiver is None:
            continue
        common = {"cat": "transfer", "name": span.name, "id": number}
        start = {"ph": "s", "pid": span.rank_class, "tid": int(span.stream), "ts": microseconds(span.start_s)}
        end = {"ph": "f", "bp": "e", "pid": receiver.rank_class, "tid": int(receiver.stream)}
        yield common | start
        yield common | end | {"ts": microseconds(receiver.start_s)}
        number += 1


def _first_spans(spans: Sequence[Span]) -> Mapping[tuple[int, bool, int, int], Span]:
    """First spans on the compute streams of all passes, by variant, direction, micro-batch and chunk of the model."""
    first: dict[tuple[int, bool, int, int], Span] = {}
    for span in spans:
        if span.stream != Stream.COMPUTE or span.micro_batch < 0 or span.phase == PassKind.BACKWARD_WEIGHT:
            continue
        key = (span.variant, span.phase == PassKind.FORWARD, span.micro_batch, span.model_chunk)
        if key not in first or span.start_s < first[key].start_s:
            first[key] = span
    return first


def counter_events(spans: Sequence[Span], saved_bytes: SavedBytes | None) -> Iterator[dict[str, Any]]:
    """Counters of every rank class: transfers under way, their load, activations kept (bytes if known, else passes).

    Spans of a class lie together, as `spans_of` gives them.

    The load of links, by axis, is what a rank sends in its transfers over the time that each takes, summed over those
    of the axis that are under way: those of other axes may take other links.
    """
    for _, own in groupby(spans, key=lambda span: span.rank_class):
        yield from _counters_of_class(own, saved_bytes)


def _counters_of_class(spans: Iterable[Span], saved_bytes: SavedBytes | None) -> Iterator[dict[str, Any]]:
    changes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    passes: dict[tuple[int, int, int, int], tuple[float, float]] = {}
    for span in spans:
        if span.charge in TRANSFERS:
            rate = span.sent_bytes / (span.end_s - span.start_s)
            load = f"link load, {span.charge.name.lower()}, bytes/s sent"
            for what, level in (("transfers under way", 1.0), (load, rate)):
                moves = changes.setdefault((span.rank_class, what), [])
                moves += [(microseconds(span.start_s), level), (microseconds(span.end_s), -level)]
        if span.phase >= 0 and span.stream == Stream.COMPUTE:
            key = (span.rank_class, span.phase, span.micro_batch, span.chunk)
            start, end = passes.get(key, (span.start_s, span.end_s))
            passes[key] = (min(start, span.start_s), max(end, span.end_s))
    name = "activations kept" if saved_bytes is None else "activation bytes kept"
    for (rank, phase, _, chunk), (start, end) in passes.items():
        size = 1.0 if saved_bytes is None else saved_bytes[rank][chunk]
        if phase == PassKind.FORWARD:
            changes.setdefault((rank, name), []).append((microseconds(start), size))
        elif phase in (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT):
            changes.setdefault((rank, name), []).append((microseconds(end), -size))
    for (rank, what), moves in sorted(changes.items()):
        yield from _counter(rank, what, moves)


def _counter(rank: int, name: str, moves: list[tuple[float, float]]) -> list[dict[str, Any]]:
    levels: dict[float, float] = {}
    level = 0.0
    for at, change in sorted(moves):
        level += change
        levels[at] = round(max(0.0, level), 3)  # rates of ended transfers leave a rest in the last digits
    return [{"ph": "C", "name": name, "pid": rank, "ts": at, "args": {"value": v}} for at, v in levels.items()]
