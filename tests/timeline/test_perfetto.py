"""The trace file: valid, complete, without overlaps on a thread."""

import gzip
import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective
from echo_explore.testing.strategies import equal_stages_job, interference
from echo_explore.timeline import GradientBucket, StepTimeline, simulate_step, write_perfetto
from echo_explore.timeline import perfetto as module
from echo_explore.timeline.ops import Charge


def timeline(*, record_spans: bool = True) -> StepTimeline:
    bucket = GradientBucket(
        collective=Collective.ALL_REDUCE, message_bytes=1.0, time_s=0.3, sigma_log=0.1, ready_after=0
    )
    job = equal_stages_job(
        num_stages=2,
        num_micro_batches=40,
        forward=[("gemm", 1.0), ("async", 0.7), ("norm", 0.3), ("wait", 0.0), ("sync", 0.1)],
        backward=[("gemm", 1.0), ("gemm", 0.9)],
        buckets=(bucket,),
        send_s=0.1,
        host_call_s=0.9,
    )
    return simulate_step(job, interference=interference(1.2, 1.1), fidelity="kernel", record_spans=record_spans)


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_file_parses_and_covers_the_step(tmp_path: Path, name: str) -> None:
    step = timeline()
    path = write_perfetto(tmp_path / name, step, title="two stages").path
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    events = complete(trace)
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M", "s", "f", "C"}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(step.step_time_s * 1e6)
    assert {event["pid"] for event in events} == {0, 1}
    names = {event["name"] for event in events}
    assert {"forward 7", "backward 39", "send forward 3", "gradient bucket 0", "all_reduce m0"} & names
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert trace["otherData"]["step_time_s"] == step.step_time_s
    assert trace["otherData"]["title"] == "two stages"


def test_slowed_kernels_say_by_what_and_how_much() -> None:
    slowed = [event for event in complete(module.trace_object(timeline())) if "slowdown" in event["args"]]
    assert slowed
    for event in slowed:
        assert event["dur"] == pytest.approx(event["args"]["alone_us"] * event["args"]["slowdown"], rel=1e-3)
        assert 1.001 < event["args"]["slowdown"] <= 1.2
        assert event["args"]["beside"]


def test_threads_do_not_overlap_and_all_micro_batches_are_there() -> None:
    events = complete(module.trace_object(timeline()))
    for pid in (0, 1):
        for tid in {event["tid"] for event in events}:
            mine = sorted((e for e in events if (e["pid"], e["tid"]) == (pid, tid)), key=lambda e: float(e["ts"]))
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(mine))
        seen = {e["args"]["micro_batch"] for e in events if e["pid"] == pid and e["tid"] == 0 and e["args"]}
        assert seen == set(range(40))


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "num_hops"),
    [("1f1b", 1, 3), ("interleaved", 2, 7), ("zbv", 2, 6), ("dualpipev", 2, 6), ("dualpipe", 2, 3)],
)
def test_flows_join_every_send_to_the_pass_that_waits_for_it(schedule: str, num_chunks: int, num_hops: int) -> None:
    job = equal_stages_job(
        num_stages=4,
        num_micro_batches=8,
        num_chunks=num_chunks,
        weight=[("gemm", 0.5)],
        send_s=0.1,
        schedule=schedule,
    )
    step = simulate_step(job, interference=interference(), fidelity="kernel", record_spans=True)
    events = module.trace_object(step)["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    spans = complete({"traceEvents": events})
    sends = [e for e in spans if e["name"].startswith("send")]
    assert starts.keys() == ends.keys()
    assert len(starts) == len(sends) == 2 * 8 * num_hops
    for number, start in starts.items():
        send = next(e for e in sends if (e["pid"], e["tid"], e["ts"]) == (start["pid"], start["tid"], start["ts"]))
        end = ends[number]
        assert end["pid"] != start["pid"]
        assert end["ts"] >= send["ts"] + send["dur"] - 1e-3
        assert any((e["pid"], e["tid"], e["ts"]) == (end["pid"], end["tid"], end["ts"]) for e in spans)


def test_counters_of_memory_and_transfers() -> None:
    job = equal_stages_job(num_stages=4, num_micro_batches=8, send_s=0.1)
    step = simulate_step(job, interference=interference(), fidelity="kernel", record_spans=True)
    events = module.trace_object(step, saved_bytes=[[10.0]] * 4)["traceEvents"]
    counters = [e for e in events if e["ph"] == "C"]
    kept = [[e["args"]["value"] for e in counters if e["pid"] == s and "bytes" in e["name"]] for s in range(4)]
    assert [max(values) for values in kept] == [40.0, 30.0, 20.0, 10.0]  # p - s micro-batches in flight under 1F1B
    assert [values[-1] for values in kept] == [0.0] * 4
    load = [e["args"]["value"] for e in counters if e["name"] == "transfers under way"]
    assert (min(load), max(load) >= 1.0) == (0.0, True)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.pftrace"])
def test_above_the_limit_the_shortest_kernels_are_left_out_and_it_is_said(tmp_path: Path, name: str) -> None:
    step = timeline()
    whole = write_perfetto(tmp_path / f"whole-{name}", step)
    assert (whole.num_spans_left_out, whole.warnings) == (0, ())
    size = len(plain(whole.path))
    written = write_perfetto(tmp_path / name, step, max_bytes=0.9 * size)
    assert 0.8 * size < len(plain(written.path)) <= 0.9 * size
    (warning,) = written.warnings
    assert f"timeline: {written.num_spans_left_out} of {len(step.spans)} ops" in warning.replace(",", "")
    kept = module.most_important(step.spans, len(step.spans) - written.num_spans_left_out)
    lost = [span for span in step.spans if span not in set(kept)]
    assert len(lost) == written.num_spans_left_out > 0
    assert all(module._is_detail(span) for span in lost)
    assert max(s.end_s - s.start_s for s in lost) <= min(s.end_s - s.start_s for s in kept if module._is_detail(s))
    if name == "t.json":
        assert json.loads(written.path.read_bytes())["otherData"]["num_spans_left_out"] == len(lost)
    if name == "t.pftrace":
        assert annotations(parsed(written.path))["num_spans_left_out"] == len(lost)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t.json", "t.pftrace"])
def test_a_file_is_written_bit_by_bit(tmp_path: Path, name: str) -> None:
    """Memory stays near the size of the file; all events as values took six times that."""
    job = equal_stages_job(num_stages=8, num_micro_batches=800, send_s=0.1)
    step = simulate_step(job, interference=interference(), fidelity="kernel", record_spans=True)
    tracemalloc.start()
    try:
        size = len(plain(write_perfetto(tmp_path / name, step).path))
        assert tracemalloc.get_traced_memory()[1] < 3.5 * size
    finally:
        tracemalloc.stop()


def plain(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def parsed(path: Path) -> Any:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


def annotations(trace: Any) -> dict[str, Any]:
    """Of the slice on the track of the whole step."""
    (track,) = [p.track_descriptor.uuid for p in trace.packet if p.track_descriptor.name == "step"]
    (begin,) = [p.track_event for p in trace.packet if p.track_event.track_uuid == track and p.track_event.type == 1]
    return {n.name: getattr(n, n.WhichOneof("value")) for n in begin.debug_annotations}


@pytest.mark.parametrize("name", ["t.pftrace", "t.perfetto-trace"])
@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_the_protobuf_trace_parses_back(tmp_path: Path, name: str, schedule: str, num_chunks: int) -> None:
    job = equal_stages_job(num_stages=3, num_micro_batches=6, num_chunks=num_chunks, send_s=0.1, schedule=schedule)
    step = simulate_step(job, interference=interference(), fidelity="kernel", record_spans=True)
    trace = parsed(write_perfetto(tmp_path / name, step, saved_bytes=[[10.0] * num_chunks] * 3).path)
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    threads = {u for u, t in tracks.items() if t.HasField("thread")}
    processes = {u for u, t in tracks.items() if t.HasField("process")}
    assert len(processes) == 3
    assert len(threads) == len({(s.rank_class, s.stream) for s in step.spans})
    assert all(tracks[u].parent_uuid in processes for u, t in tracks.items() if u in threads or t.HasField("counter"))
    assert all(tracks[u].thread.pid == tracks[tracks[u].parent_uuid].process.pid for u in threads)
    assert len({tracks[u].thread.tid for u in threads}) == len(threads)

    slices = 0
    open_at: dict[int, int] = {}
    starts: dict[int, tuple[int, int]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event, at = packet.track_event, packet.timestamp
        assert event.track_uuid in tracks
        if event.type == event.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_at
            open_at[event.track_uuid] = at
            starts |= {flow: (event.track_uuid, at) for flow in event.flow_ids}
            ends |= {flow: (event.track_uuid, at) for flow in event.terminating_flow_ids}
        elif event.type == event.TYPE_SLICE_END:
            assert at >= open_at.pop(event.track_uuid)
            slices += event.track_uuid in threads
    assert not open_at
    assert slices == len(step.spans)
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 6 * (3 * num_chunks - 1)
    for flow, (track, at) in starts.items():
        assert tracks[track].parent_uuid != tracks[ends[flow][0]].parent_uuid
        assert ends[flow][1] >= at
    facts = annotations(trace)
    assert facts["step_time_s"] == step.step_time_s
    assert facts["num_spans_left_out"] == 0


def test_the_load_of_links_is_bytes_over_time() -> None:
    job = equal_stages_job(num_stages=3, num_micro_batches=4, forward=[("gemm", 1.0), ("sync", 0.5)], send_s=0.1)
    job = replace(job, stages=tuple(replace(stage, send_bytes=2e6) for stage in job.stages))
    step = simulate_step(job, interference=interference(), fidelity="kernel", record_spans=True)
    sends = [span for span in step.spans if span.name.startswith("send")]
    assert {span.message_bytes for span in sends} == {2e6}
    rows = [span for span in step.spans if span.charge == Charge.TENSOR]
    assert rows
    assert all(span.message_bytes > 0 for span in rows)
    assert all(span.message_bytes == 0 for span in step.spans if span.charge in (Charge.KERNEL, Charge.BODY))
    events = module.trace_object(step)["traceEvents"]
    load = [e["args"]["value"] for e in events if e["ph"] == "C" and e["name"].startswith("link load, pipeline")]
    assert 2e6 / 0.1 in load
    assert load[-1] == min(load) == 0.0
    whole = timeline()
    buckets = [span for span in whole.spans if span.name.startswith("gradient bucket")]
    assert {span.message_bytes for span in buckets} == {1.0}


def test_the_load_counts_what_a_rank_sends() -> None:
    """Of a sum over 4 ranks one and a half times the message, over 2 the message; two axes each by itself."""
    rows = [("async", 0.5), ("exchange", 0.5), ("wait", 0.0)]
    job = equal_stages_job(num_stages=1, num_micro_batches=1, forward=rows)
    job = replace(job, group_ranks={Axis.TENSOR: 4, Axis.EXPERT: 2})
    step = simulate_step(job, interference=interference(), fidelity="kernel", record_spans=True)
    for span in step.spans:
        factor = {Charge.TENSOR: 1.5, Charge.EXPERT: 1.0}.get(span.charge, 0.0)
        assert span.sent_bytes == pytest.approx(factor * span.message_bytes)
    names = {e["name"] for e in module.trace_object(step)["traceEvents"] if e["ph"] == "C"}
    assert {"link load, tensor, bytes/s sent", "link load, expert, bytes/s sent"} <= names


def test_counters_of_the_protobuf_trace(tmp_path: Path) -> None:
    job = equal_stages_job(num_stages=4, num_micro_batches=8, send_s=0.1)
    step = simulate_step(job, interference=interference(), fidelity="kernel", record_spans=True)
    trace = parsed(write_perfetto(tmp_path / "t.pftrace", step, saved_bytes=[[10.0]] * 4).path)
    counters = {
        p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.track_descriptor.HasField("counter")
    }
    values: dict[str, list[float]] = {}
    for packet in trace.packet:
        event = packet.track_event
        if event.type == event.TYPE_COUNTER:
            values.setdefault(counters[event.track_uuid].name, []).append(event.double_counter_value)
    assert values.keys() == {"activation bytes kept", "transfers under way", "link load, pipeline, bytes/s sent"}
    assert (min(values["activation bytes kept"]), max(values["activation bytes kept"])) == (0.0, 40.0)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="needs the spans"):
        write_perfetto(tmp_path / "t.json", timeline(record_spans=False))
    with pytest.raises(SpecError, match=r"must end in \.json, \.json\.gz, \.pftrace or \.perfetto-trace"):
        write_perfetto(tmp_path / "t.txt", timeline())
    with pytest.raises(SpecError, match="cannot be written"):
        write_perfetto(tmp_path / "missing" / "t.json", timeline())
