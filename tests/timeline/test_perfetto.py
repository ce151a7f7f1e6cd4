"""The trace file: valid, complete, without overlaps on a thread."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from echo_explore.core import SpecError
from echo_explore.graph import Collective
from echo_explore.testing.strategies import equal_stages_job, interference
from echo_explore.timeline import GradientBucket, StepTimeline, simulate_step, write_perfetto
from echo_explore.timeline import perfetto as module


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
    path = write_perfetto(tmp_path / name, step, title="two stages")
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


def test_threads_do_not_overlap_and_all_micro_batches_are_there() -> None:
    events = complete(module.trace_object(timeline()))
    for pid in (0, 1):
        for tid in {event["tid"] for event in events}:
            mine = sorted((e for e in events if (e["pid"], e["tid"]) == (pid, tid)), key=lambda e: float(e["ts"]))
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(mine))
        seen = {e["args"]["micro_batch"] for e in events if e["pid"] == pid and e["tid"] == 0 and e["args"]}
        assert seen == set(range(40))


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2)])
def test_flows_join_every_send_to_the_pass_that_waits_for_it(schedule: str, num_chunks: int) -> None:
    job = equal_stages_job(
        num_stages=3,
        num_micro_batches=6,
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
    assert len(starts) == len(sends) == 2 * 6 * (3 * num_chunks - 1 - (num_chunks == 2 and schedule != "interleaved"))
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


def test_too_many_events_leave_details_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step = timeline()
    blocks = sum(not module._is_detail(span) for span in step.spans)
    monkeypatch.setattr(module, "MAX_EVENTS", blocks)
    trace = module.trace_object(step)
    assert trace["otherData"]["num_spans_left_out"] == len(step.spans) - blocks
    assert not any(event["cat"] == "kernel" for event in complete(trace))


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="needs the spans"):
        write_perfetto(tmp_path / "t.json", timeline(record_spans=False))
    with pytest.raises(SpecError, match=r"must end in \.json or \.json\.gz"):
        write_perfetto(tmp_path / "t.txt", timeline())
    with pytest.raises(SpecError, match="cannot be written"):
        write_perfetto(tmp_path / "missing" / "t.json", timeline())
