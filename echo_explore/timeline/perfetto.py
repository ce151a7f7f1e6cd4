"""Timelines as Chrome trace JSON, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

References:
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON object
    form, events of phase X, M, s, f and C, times in microseconds).
"""

import gzip
import json
from pathlib import Path
from typing import Any

from echo_explore.core import SpecError
from echo_explore.core.files import write_atomic
from echo_explore.timeline.ops import Charge, Stream
from echo_explore.timeline.perfetto_links import SavedBytes, counter_events, flow_events, microseconds
from echo_explore.timeline.spans import Span
from echo_explore.timeline.step import StepTimeline

MAX_EVENTS = 100_000
"""Above that rows of kernels are left out, shortest last: at about 170 bytes an event the file stays below 20 MB."""

_THREADS = {
    Stream.COMPUTE: "compute",
    Stream.TENSOR: "tensor comm",
    Stream.CONTEXT: "context comm",
    Stream.EXPERT: "expert comm",
    Stream.DATA: "data comm",
    Stream.SEND_FORWARD: "p2p send forward",
    Stream.SEND_BACKWARD: "p2p send backward",
    Stream.MODEL: "comm over stages",
    Stream.HOST: "host launches",
}


def write_perfetto(
    path: str | Path, timeline: StepTimeline, *, title: str = "", saved_bytes: SavedBytes | None = None
) -> Path:
    """The absolute path of a trace file of the spans of `timeline`, written to a temporary name and renamed.

    One process a rank class, one thread a stream. All forwards, backwards and transfers are there; the kernels inside
    only for the first forward and backward of every chunk and for those that run beside data-parallel traffic; the
    metadata says so.

    Args:
        path: ends in `.json` or `.json.gz`.
        timeline: simulated with `record_spans`.
        title: what it shows, for the metadata.
        saved_bytes: activations that a forward keeps, by stage and chunk, for the counter of memory.

    Raises:
        SpecError: no spans, another ending, or a path that cannot be written.
    """
    target = Path(path).absolute()
    if not timeline.spans:
        raise SpecError("spans", "none", "a trace needs the spans of the timeline", "simulate with record_spans=True")
    if not target.name.endswith((".json", ".json.gz")):
        raise SpecError("timeline", target.name, "must end in .json or .json.gz", f"write {target.stem}.json")
    trace = trace_object(timeline, title=title, saved_bytes=saved_bytes)
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    try:
        write_atomic(target, gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
    except OSError as error:
        raise SpecError(
            "timeline", str(target), f"cannot be written ({error.strerror})", "name a folder you may write"
        ) from error
    return target


def trace_object(timeline: StepTimeline, *, title: str = "", saved_bytes: SavedBytes | None = None) -> dict[str, Any]:
    """The trace as a JSON value: `traceEvents`, and what it leaves out in `otherData`."""
    spans = timeline.spans
    left_out = 0
    if len(spans) > MAX_EVENTS:
        kept = sorted(range(len(spans)), key=lambda i: (_is_detail(spans[i]), spans[i].start_s - spans[i].end_s))
        left_out = len(spans) - MAX_EVENTS
        spans = tuple(spans[i] for i in sorted(kept[:MAX_EVENTS]))
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
            "num_spans_left_out": left_out,
        },
    }


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
