"""Files of the profiler and of ExecutionTraceObserver of one run, joined.

`data/` holds both of one training step on the CPU (two linear layers, GELU, SGD; torch 2.13.0, 2026-12-01:
`torch.profiler.profile(record_shapes=True, execution_trace_observer=...)`), without names of the machine.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_explore.calibration.joined_graph import joined_graph
from echo_explore.calibration.observer_graph import read_observer_trace
from echo_explore.core import SpecError
from echo_explore.graph import OpClass, Phase
from tests.calibration.test_observer_graph import nodes
from tests.calibration.test_observer_graph import write as write_observer
from tests.calibration.test_profiler_graph import complete

DATA = Path(__file__).with_name("data")
OBSERVER, PROFILER = DATA / "observer_step.json.gz", DATA / "profiler_step.json.gz"


def profiled() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(PROFILER.read_bytes()))
    return content


def test_a_step_on_the_cpu_has_the_rows_of_one_and_the_times_of_the_other() -> None:
    joined = joined_graph(OBSERVER, PROFILER)
    alone = read_observer_trace(OBSERVER)
    graph = joined.graph
    assert graph.num_ops == alone.graph.num_ops  # type: ignore[union-attr]
    names = [graph.strings[i] for i in graph.name]
    products = [row for row, kind in enumerate(graph.op_class) if kind == OpClass.GEMM]
    # Forward of two layers, gradients of both weights and of the second layer's input.
    assert [names[row] for row in products] == ["aten::addmm"] * 2 + ["aten::mm"] * 3
    assert graph.phase[products].tolist() == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 3
    durations = sorted(
        e["dur"] * 1e-6 for e in profiled()["traceEvents"] if e.get("name") in ("aten::addmm", "aten::mm")
    )
    assert sorted(joined.time_s[products].tolist()) == pytest.approx(durations)
    assert (joined.time_s > 0).all()
    assert (np.diff(joined.start_s) >= 0).all()
    assert joined.start_s[0] >= 0


def gpu_events() -> list[dict[str, Any]]:
    """What the profiler says of the observer's nodes: two kernels of a linear layer, a gather on another stream."""

    def operator(name: str, record: int) -> dict[str, Any]:
        event = complete("cpu_op", name, 100 + record, 0.5, External_id=1000 + record)
        event["args"]["Record function id"] = record
        return event

    def kernel(name: str, ts: float, dur: float, record: int, stream: int = 7) -> dict[str, Any]:
        return complete("kernel", name, ts, dur, stream, External_id=1000 + record, stream=stream, correlation=record)

    named = {3: "c10d::_allgather_base_", 4: "aten::linear", 5: "aten::mm", 7: "aten::mm", 9: "aten::mm"}
    return [
        *[operator(name, record) for record, name in named.items()],
        operator("aten::_fused_adamw_", 11),
        kernel("all_gather", 200, 90, 3, stream=20),
        kernel("gemm", 210, 40, 5), kernel("split_k", 250, 5, 5), kernel("gemm", 290, 30, 7),
        kernel("gemm", 320, 20, 9), kernel("adam", 340, 4, 11),
    ]  # fmt: skip


def test_kernels_count_for_the_row_of_the_operator_that_launched_them(tmp_path: Path) -> None:
    observer = write_observer(tmp_path / "et.json", nodes())
    profiler = tmp_path / "trace.json"
    profiler.write_text(json.dumps({"traceEvents": gpu_events()}), encoding="utf-8")
    joined = joined_graph(observer, profiler)
    names = [joined.graph.strings[i] for i in joined.graph.name]
    assert names == ["c10d::_allgather_base_", "aten::mm", "wait", "aten::mm", "aten::mm", "aten::_fused_adamw_"]
    assert joined.time_s.tolist() == pytest.approx([90e-6, 45e-6, 0, 30e-6, 20e-6, 4e-6])
    assert joined.start_s.tolist() == pytest.approx([97e-6, 107e-6, 187e-6, 187e-6, 217e-6, 237e-6])
    assert joined.graph.stream.tolist() == [1, 0, 0, 0, 0, 0]
    alone = read_observer_trace(observer)
    assert joined.graph.dep_index.tolist() == alone.graph.dep_index.tolist()  # type: ignore[union-attr]


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"

    def refused(change: Any, message: str) -> None:
        content = profiled()
        for event in content["traceEvents"]:
            change(event)
        other.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(SpecError, match=message):
            joined_graph(OBSERVER, other)

    record = "Record function id"

    def shifted(event: dict[str, Any], by: int) -> None:
        if record in event.get("args", {}):
            event["args"][record] += by

    refused(lambda e: shifted(e, 1), r"profiler = .*operator \d+ is aten::\w+, and aten::\w+ in observer_step")
    refused(lambda e: shifted(e, 10**6), "shares no operator with observer_step.json.gz, which has")
    refused(lambda e: e.get("args", {}).pop(record, None), "has no operators with a 'Record function id'")
