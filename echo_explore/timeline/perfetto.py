"""Timelines as trace files that Perfetto (https://ui.perfetto.dev) opens: Chrome trace JSON, or Perfetto's own format.

References:
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON object
    form, events of phase X, M, s, f and C, times in microseconds).
"""

import gzip
import json
from collections.abc import Sequence
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
    kept = most_important(timeline.spans, int(max_bytes / _LEAST_EVENT_BYTES))
    data = _encoded(target, trace_object(timeline, kept, title=title, saved_bytes=saved_bytes))
    while len(data) > max_bytes and kept:
        kept = most_important(kept, int(0.95 * len(kept) * max_bytes / len(data)))
        data = _encoded(target, trace_object(timeline, kept, title=title, saved_bytes=saved_bytes))
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


def _encoded(path: Path, trace: dict[str, Any]) -> bytes:
    if path.name.endswith((".json", ".json.gz")):
        return json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    return b"".join(proto_pieces(trace["traceEvents"], trace["otherData"]))


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
        "traceEvents": [
            *_names(timeline),
            *(_event(span) for span in spans),
            *flow_events(spans),
            *counter_events(spans, saved_bytes),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title,
            "step_time_s": timeline.step_time_s,
            "critical_class": timeline.critical_class,
            "num_rank_classes": timeline.num_rank_classes,
            "detail": "all forwards, backwards and transfers; kernels of the first forward and backward of every chunk "
            "and of those beside data-parallel traffic",
            "num_spans_left_out": len(timeline.spans) - len(spans),
        },
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
