"""Templates and charges: hand-made blocks with known answers, and refusals."""

from dataclasses import replace

import numpy as np
import pytest

from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective, ExecutionGraph, OpKind, OpRow, TimedGraph, build_graph
from echo_explore.graph.coalesce import coalesce
from echo_explore.testing.strategies import Item, TableInterference, equal_stages_job, interference, timed_graph
from echo_explore.timeline import GradientBucket, ParameterGather, PipelineJob, StepTimeline, simulate_step
from echo_explore.timeline.breakdown import HOST_SIGMA_LOG, step_sigma_log
from echo_explore.timeline.charges import CLASS_SIGMA, NUM_COLUMNS, Column
from echo_explore.timeline.templates import expand


def forward_only(items: list[Item], *, host_call_s: float = 0.0, slow: float = 1.0) -> StepTimeline:
    job = equal_stages_job(
        num_stages=1, num_micro_batches=1, forward=items, backward=[("gemm", 1.0)], host_call_s=host_call_s
    )
    return simulate_step(job, interference=interference(slow, 1.0), fidelity="kernel")


def nonzero(step: StepTimeline) -> dict[str, object]:
    return {key: pytest.approx(value) for key, value in step.breakdown.items() if abs(value) > 1e-12}


def test_synchronous_collective_is_exposed() -> None:
    assert nonzero(forward_only([("gemm", 1.0), ("sync", 0.5), ("context", 0.25), ("gemm", 1.0)])) == {
        "compute_s": 3.0,
        "tensor_s": 0.5,
        "context_s": 0.25,
    }


def test_asynchronous_collective_is_hidden_up_to_its_wait() -> None:
    assert nonzero(forward_only([("gemm", 1.0), ("async", 1.5), ("gemm", 1.0), ("wait", 0.0), ("norm", 1.0)])) == {
        "compute_s": 4.0,
        "tensor_s": 0.5,
    }


def test_collective_without_wait_ends_with_its_block() -> None:
    assert forward_only([("gemm", 1.0), ("async", 2.0)]).step_time_s == pytest.approx(4.0)


def test_collectives_of_one_axis_queue() -> None:
    step = forward_only([("gemm", 1.0), ("async", 1.0), ("async", 1.0), ("wait", 0.0)])
    assert nonzero(step) == {"compute_s": 2.0, "tensor_s": 2.0}


def test_collective_after_a_synchronous_one_waits_for_it() -> None:
    step = forward_only([("gemm", 1.0), ("sync", 1.0), ("context", 1.0)])
    assert nonzero(step) == {"compute_s": 2.0, "tensor_s": 1.0, "context_s": 1.0}


def test_kernel_beside_tensor_communication_is_slowed() -> None:
    step = forward_only([("async", 5.0), ("gemm", 1.0), ("wait", 0.0)], slow=1.5)
    assert nonzero(step) == {"compute_s": 2.5, "interference_s": 0.5, "tensor_s": 3.5}
    assert step.classes[0].slowed_s == pytest.approx({"gemm": 0.5})


def test_what_is_slowed_is_told_by_class() -> None:
    step = forward_only([("async", 5.0), ("gemm", 1.0), ("norm", 0.5), ("wait", 0.0), ("norm", 1.0)], slow=1.5)
    assert list(step.classes[0].slowed_s) == ["gemm", "norm"]
    assert step.classes[0].slowed_s == pytest.approx({"gemm": 0.5, "norm": 0.25})
    assert forward_only([("gemm", 1.0)], slow=1.5).classes[0].slowed_s == {}


def test_launches_hold_a_block_up() -> None:
    step = forward_only([("gemm", 0.5), ("gemm", 0.5)], host_call_s=0.75)
    assert nonzero(step) == {"compute_s": 2.0, "host_s": 0.5}


def test_recomputation_is_part_of_compute() -> None:
    assert nonzero(forward_only([("recompute", 1.0), ("gemm", 1.0)])) == {"compute_s": 3.0, "recompute_s": 1.0}


def test_parameter_gather_holds_its_row() -> None:
    gather = ParameterGather(message_bytes=1.0, time_s=1.5, sigma_log=0.1, needed_before=1)
    job = equal_stages_job(num_stages=1, num_micro_batches=2, forward=[("gemm", 1.0), ("gemm", 1.0)], gathers=(gather,))
    step = simulate_step(job, interference=interference(), fidelity="kernel")
    assert nonzero(step) == {"compute_s": 8.0, "data_s": 0.5}
    without = simulate_step(replace(job, overlap_param_gather=False), interference=interference(), fidelity="kernel")
    assert nonzero(without) == {"compute_s": 8.0}


def test_buckets_run_in_order_beside_the_last_backward() -> None:
    buckets = tuple(
        GradientBucket(collective=Collective.ALL_REDUCE, message_bytes=1.0, time_s=t, sigma_log=0.1, ready_after=row)
        for t, row in ((2.5, 0), (1.0, 1))
    )
    job = equal_stages_job(num_stages=1, num_micro_batches=3, backward=[("gemm", 1.0), ("gemm", 1.0)], buckets=buckets)
    step = simulate_step(job, interference=interference(), fidelity="kernel")
    assert nonzero(step) == {"compute_s": 9.0, "data_s": 2.5}


def test_transfers_hold_the_sender_unless_overlapped() -> None:
    job = equal_stages_job(num_stages=2, num_micro_batches=1, send_s=0.5, overlap_p2p=False)
    step = simulate_step(job, interference=interference(), fidelity="kernel")
    assert nonzero(step) == {"compute_s": 3.0, "pipeline_s": 1.0, "bubble_s": 3.0}
    many = replace(job, num_micro_batches=4)
    held = simulate_step(many, interference=interference(), fidelity="kernel")
    free = simulate_step(replace(many, overlap_p2p=True), interference=interference(), fidelity="kernel")
    assert held.step_time_s > free.step_time_s


def test_sigma_of_one_class_and_of_two() -> None:
    one = forward_only([("gemm", 2.0)])
    assert one.step_sigma_log == pytest.approx(0.05)
    two = forward_only([("gemm", 2.0), ("norm", 3.0)])
    assert two.step_sigma_log == pytest.approx(0.05 * np.sqrt(2) / 2)


def test_host_time_is_unsure_and_so_are_bubbles_that_wait_for_it() -> None:
    charges = np.zeros(NUM_COLUMNS)
    charges[[Column.COMPUTE, Column.HOST]] = 1.0
    assert step_sigma_log(charges) == pytest.approx(HOST_SIGMA_LOG / 2)
    charges[Column.BUBBLE] = 2.0
    assert step_sigma_log(charges) == pytest.approx(HOST_SIGMA_LOG / 2)
    charges[CLASS_SIGMA] = 0.1  # of the second of kernels: the bubble waits for as much of it
    assert step_sigma_log(charges) == pytest.approx(np.hypot(HOST_SIGMA_LOG, 0.1) / 2)


def test_a_step_that_waits_for_its_host_is_less_sure_than_one_of_kernels() -> None:
    free = forward_only([("gemm", 2.0)])
    held = forward_only([("gemm", 2.0)], host_call_s=50.0)
    assert held.breakdown["host_s"] > held.breakdown["compute_s"]
    assert held.step_sigma_log > 2 * free.step_sigma_log


def test_epilogues_of_first_and_last_stage_meet() -> None:
    job = equal_stages_job(num_stages=3, num_micro_batches=2)
    ends = [timed_graph([("embedding", 0.25), ("model", 0.5)]), timed_graph([("model", 0.5)])]
    stages = tuple(replace(stage, epilogue=ends[s == 1]) for s, stage in enumerate(job.stages))
    step = simulate_step(replace(job, stages=stages), interference=interference(), fidelity="kernel")
    assert step.step_time_s == pytest.approx(3.0 * 4 + 0.75)
    assert step.stage_finish_s == pytest.approx((12.75,) * 3)
    assert step.critical_class == 0
    lonely = (stages[0], stages[1], replace(stages[2], epilogue=ends[1]))
    with pytest.raises(SpecError, match="collectives over EMBEDDING must be as many on each of stages"):
        simulate_step(replace(job, stages=lonely), interference=interference(), fidelity="kernel")


def test_coalescing_keeps_breaks_phases_and_sums() -> None:
    timed = timed_graph(
        [("gemm", 1.0), ("norm", 3.0), ("sync", 1.0), ("gemm", 1.0), ("recompute", 2.0), ("norm", 1.0), ("norm", 1.0)]
    )
    coarse = coalesce(timed, break_after=[5])
    assert coarse.timed.time_s.tolist() == [4.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    assert coarse.row_of.tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert coarse.timed.graph.op_class.tolist()[0] == timed.graph.op_class.tolist()[1]
    assert coalesce(timed_graph([])).timed.graph.num_ops == 0


def test_coalescing_maps_waits_and_dependences() -> None:
    rows = [
        OpRow(),
        OpRow(deps=(0,)),
        OpRow(kind=OpKind.COLLECTIVE, axis=Axis.TENSOR, collective=Collective.ALL_GATHER, asynchronous=True, deps=(1,)),
        OpRow(),
        OpRow(kind=OpKind.WAIT, awaits=2),
        OpRow(deps=(2, 3)),
    ]
    timed = TimedGraph(graph=build_graph(rows), time_s=np.ones(6), sigma_log=np.zeros(6))
    graph: ExecutionGraph = coalesce(timed).timed.graph
    assert graph.awaits.tolist() == [-1, -1, -1, 1, -1]
    assert graph.dep_offsets.tolist() == [0, 0, 1, 1, 1, 3]
    assert graph.dep_index.tolist() == [0, 1, 2]


def test_refused_graphs() -> None:
    bad = timed_graph([("gemm", 1.0), ("gemm", 1.0)])
    with pytest.raises(SpecError, match=r"time_s\[1\] = nan: must be finite"):
        expand(TimedGraph(graph=bad.graph, time_s=np.array([1.0, np.nan]), sigma_log=np.zeros(2)))
    rows = [OpRow(kind=OpKind.COLLECTIVE, collective=Collective.ALL_REDUCE)]
    with pytest.raises(SpecError, match="a collective needs an axis"):
        expand(TimedGraph(graph=build_graph(rows), time_s=np.ones(1), sigma_log=np.zeros(1)))
    rows = [OpRow(kind=OpKind.WAIT, awaits=1), OpRow(kind=OpKind.COLLECTIVE, axis=Axis.DATA, asynchronous=True)]
    with pytest.raises(SpecError, match="must name an earlier collective"):
        expand(TimedGraph(graph=build_graph(rows), time_s=np.ones(2), sigma_log=np.zeros(2)))


def _job(**changes: object) -> PipelineJob:
    return replace(equal_stages_job(num_stages=2, num_micro_batches=2), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (_job(stages=()), "a job needs a stage with a chunk"),
        (_job(schedule="interleaved"), "does not fit 2 stages of 1 chunks; fix: use 1f1b"),
        (_job(host_call_s=-1.0), r"host_call_s = -1.0: must be finite"),
        (_job(num_micro_batches=0), "num_micro_batches = 0"),
    ],
)
def test_refused_jobs(job: PipelineJob, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        simulate_step(job, interference=interference(), fidelity="kernel")


def test_refused_rows_and_tables() -> None:
    gather = ParameterGather(message_bytes=1.0, time_s=1.0, sigma_log=0.1, needed_before=9)
    job = equal_stages_job(num_stages=1, num_micro_batches=1, gathers=(gather,))
    with pytest.raises(SpecError, match=r"gathers\[0\]\.needed_before = 9: must be a row of its graph of 1 rows"):
        simulate_step(job, interference=interference(), fidelity="kernel")
    with pytest.raises(SpecError, match="every factor must be 1 or more"):
        simulate_step(_job(), interference=interference(0.9), fidelity="kernel")
    small = TableInterference(compute=np.ones((2, 2)), collective=np.ones((32, 32)))
    with pytest.raises(SpecError, match="needs a factor for each pair; fix: give both tables one shape"):
        simulate_step(_job(), interference=small, fidelity="kernel")
    with pytest.raises(SpecError, match="fidelity = 'op': must be kernel or block"):
        simulate_step(_job(), interference=interference(), fidelity="op")  # type: ignore[arg-type]
