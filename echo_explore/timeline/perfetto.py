"""Timelines as trace files that Perfetto (https://ui.perfetto.dev) opens: Chrome trace JSON, or Perfetto's own format.

References:
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON object
    form, events of phase X, M, s, f and C, times in microseconds).
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_explore.core import SpecError
from echo_explore.core.files import write_atomic
from echo_explore.timeline.ops import Charge, Stream
from echo_explore.timeline.perfetto_links import SavedBytes, counter_events, flow_events, microseconds
from echo_explore.timeline.perfetto_proto import proto_pieces
from echo_explore.timeline.spans import LEAST_SLOWDOWN, Span
from echo_explore.timeline.step import StepTimeline

MAX_BYTES: Final = 500_000_000
"""Above that ops are left out, shortest kernels first."""
TRACE_ENDINGS: Final = (".json", ".json.gz", ".pftrace", ".perfetto-trace")
_LEAST_EVENT_BYTES = 60
"""Less than any op takes in any format: what can't fit is not even tried."""
_SAMPLED_MICRO_BATCHES = 8
_MAY_FIT = 1.25
"""Ops to try first, over those that should fit by the size of a few: nothing is left out of a file that fits."""
_LESS = 0.95
"""Of the ops that would fit if all were as large: long ones come first, and have longer names."""

_THREADS = {
    Stream.COMPUTE: "compute",
    Stream.TENSOR: "tensor comm",
    Stream.CONTEXT: "context comm",
    Stream.EXPERT: "expert comm",
    Stream.DATA: "data comm",
    Stream.SEND_FORWARD: "p2p send forward",
    Stream.SEND_BACKWARD: "p2p send backward",
    Stream.MODEL: "comm over stages",
    Stream.EXPERT_TENSOR: "expert tensor comm",
    Stream.EXPERT_MODEL: "expert tensor and expert comm",
    Stream.EXPERT_DATA: "expert data comm",
    Stream.EMBEDDING: "embedding comm",
    Stream.HOST: "host launches",
    Stream.HOST_LINK: "copies to and from the host",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A written trace.

    Attributes:
        path: absolute.
        num_spans: ops of the timeline.
        num_spans_left_out: of these, so that the file stays below its limit.
    """

    path: Path
    num_spans: int
    num_spans_left_out: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line where something was left out."""
        if not self.num_spans_left_out:
            return ()
        which = f"{self.num_spans_left_out:,} of {self.num_spans:,} ops, the shortest,"
        return (f"timeline: {which} are left out so that the file stays below {MAX_BYTES / 1e6:.0f} MB",)


def write_perfetto(
    path: str | Path,
    timeline: StepTimeline,
    *,
    title: str = "",
    saved_bytes: SavedBytes | None = None,
    max_bytes: float = MAX_BYTES,
) -> TraceFile:
    """A trace file of the spans of `timeline`, written to a temporary name and renamed.

    One process a rank class, one thread a stream. All forwards, backwards and transfers are there; the kernels inside
    only for the first forward and backward of every chunk and for those that run beside data-parallel traffic; the
    metadata says so.

    Args:
        path: ends in one of TRACE_ENDINGS.
        timeline: simulated with `record_spans`.
        title: what it shows, for the metadata.
        saved_bytes: activations that a forward keeps, by stage and chunk, for the counter of memory.
        max_bytes: of the trace before compression.

    Raises:
        SpecError: no spans, another ending, or a path that cannot be written.
    """
    target = Path(path).absolute()
    if not timeline.spans:
        raise SpecError("spans", "none", "a trace needs the spans of the timeline", "simulate with record_spans=True")
    check_ending(target)

    def encoded(spans: Sequence[Span]) -> _Encoded:
        return _encoded(_pieces(target, timeline, spans, title, saved_bytes), max_bytes)

    likely = max_bytes / _bytes_of_span(timeline.spans, encoded)
    kept = most_important(timeline.spans, int(_MAY_FIT * likely))
    while (file := encoded(kept)).num_bytes > max_bytes and kept:
        kept = most_important(kept, int(_LESS * len(kept) * max_bytes / file.num_bytes))
    data = file.data
    try:
        write_atomic(target, gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
    except OSError as error:
        raise SpecError(
            "timeline", str(target), f"cannot be written ({error.strerror})", "name a folder you may write"
        ) from error
    num_spans = len(timeline.spans)
    return TraceFile(path=target, num_spans=num_spans, num_spans_left_out=num_spans - len(kept))


def check_ending(path: Path) -> None:
    """Refuse a file whose ending names no format.

    Raises:
        SpecError: another ending.
    """
    if not path.name.endswith(TRACE_ENDINGS):
        rule = f"must end in {', '.join(TRACE_ENDINGS[:-1])} or {TRACE_ENDINGS[-1]}"
        raise SpecError("timeline", str(path), rule, f"write {path.stem}.json")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Encoded:
    """A file: how large it is, and what is in it unless that is too much."""

    num_bytes: int
    data: bytearray


def _encoded(pieces: Iterable[bytes], most_bytes: float) -> _Encoded:
    data, num_bytes = bytearray(), 0
    for piece in pieces:
        num_bytes += len(piece)
        if num_bytes <= most_bytes:
            data += piece
        else:
            data.clear()
    return _Encoded(num_bytes=num_bytes, data=data)


def _bytes_of_span(spans: Sequence[Span], encoded: Callable[[Sequence[Span]], _Encoded]) -> float:
    """About the bytes of a span with its arrows and counters: of those of a few micro-batches in the middle."""
    middle = max(span.micro_batch for span in spans) // 2
    some = [span for span in spans if middle <= span.micro_batch < middle + _SAMPLED_MICRO_BATCHES]
    return max((encoded(some).num_bytes - encoded(()).num_bytes) / max(len(some), 1), _LEAST_EVENT_BYTES)


def _pieces(
    path: Path, timeline: StepTimeline, spans: Sequence[Span], title: str, saved_bytes: SavedBytes | None
) -> Iterator[bytes]:
    """The file bit by bit: of a large one, events as values would take several times its size."""
    facts = _facts(timeline, spans, title)
    if path.name.endswith((".json", ".json.gz")):
        head = _json({"displayTimeUnit": "ms", "otherData": facts})
        yield head[:-1] + b',"traceEvents":['
        for number, event in enumerate(_events(timeline, spans, saved_bytes)):
            yield (b"," if number else b"") + _json(event)
        yield b"]}"
    else:
        yield from proto_pieces(lambda: _events(timeline, spans, saved_bytes), facts)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _events(timeline: StepTimeline, spans: Sequence[Span], saved_bytes: SavedBytes | None) -> Iterator[dict[str, Any]]:
    yield from _names(timeline)
    yield from map(_event, spans)
    yield from flow_events(spans)
    yield from counter_events(spans, saved_bytes)


def _facts(timeline: StepTimeline, spans: Sequence[Span], title: str) -> dict[str, Any]:
    return {
        "title": title,
        "step_time_s": timeline.step_time_s,
        "critical_class": timeline.critical_class,
        "num_rank_classes": timeline.num_rank_classes,
        "detail": "all forwards, backwards and transfers; kernels of the first forward and backward of every chunk "
        "and of those beside data-parallel traffic",
        "num_spans_left_out": len(timeline.spans) - len(spans),
    }


def trace_object(
    timeline: StepTimeline,
    spans: Sequence[Span] | None = None,
    *,
    title: str = "",
    saved_bytes: SavedBytes | None = None,
) -> dict[str, Any]:
    """The trace as a JSON value: `traceEvents` of `spans` (default: all), and what it leaves out in `otherData`."""
    spans = timeline.spans if spans is None else spans
    return {
        "traceEvents": list(_events(timeline, spans, saved_bytes)),
        "displayTimeUnit": "ms",
        "otherData": _facts(timeline, spans, title),
    }


def most_important(spans: Sequence[Span], limit: int) -> Sequence[Span]:
    """At most `limit` spans, in their order: passes and transfers before kernels, long before short."""
    if len(spans) <= limit:
        return spans
    ranked = sorted(range(len(spans)), key=lambda i: (_is_detail(spans[i]), spans[i].start_s - spans[i].end_s))
    return tuple(spans[i] for i in sorted(ranked[:limit]))


def _is_detail(span: Span) -> bool:
    return span.charge not in (Charge.BODY, Charge.DATA, Charge.PIPELINE)


def _names(timeline: StepTimeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for rank, times in enumerate(timeline.classes):
        label = f"{times.label} ({times.multiplicity} ranks)"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": label}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        for stream in sorted({span.stream for span in timeline.spans if span.rank_class == rank}):
            args = {"name": _THREADS[stream]}
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": int(stream), "args": args})
    return events


def _event(span: Span) -> dict[str, Any]:
    args: dict[str, Any] = {}
    start_us, end_us = microseconds(span.start_s), microseconds(span.end_s)
    if span.micro_batch >= 0:
        args = {"micro_batch": span.micro_batch, "chunk": span.chunk}
    if span.alone_s > 0 and span.end_s - span.start_s > span.alone_s * (1 + LEAST_SLOWDOWN):
        args["alone_us"] = microseconds(span.alone_s)
        args["slowdown"] = round((span.end_s - span.start_s) / span.alone_s, 3)
        args["beside"] = ", ".join(_THREADS[stream] for stream in span.beside)
    return {
        "ph": "X",
        "name": span.name if span.micro_batch < 0 or _is_detail(span) else f"{span.name} {span.micro_batch}",
        "cat": span.charge.name.lower(),
        "pid": span.rank_class,
        "tid": int(span.stream),
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": args,
    }
