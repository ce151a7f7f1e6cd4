"""A step: closed forms, folded against unfolded, fidelities against each other, invariants."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import EchoError, SpecError
from echo_explore.graph import Axis, Collective, OpClass, OpKind, OpRow, Phase, TimedGraph, build_graph
from echo_explore.testing.strategies import (
    Item,
    equal_stages_job,
    interference,
    pipeline_jobs,
    timed_graph,
)
from echo_explore.timeline import BREAKDOWN_KEYS, GradientBucket, PipelineJob, SharedLinks, StepTimeline, simulate_step
from echo_explore.timeline.host import LAUNCH_LATENCY_S
from tests.examples import examples

PARTS = ("recompute_s", "interference_s", "straggler_s")
NONE = interference()


def check_equal(one: StepTimeline, other: StepTimeline, *, rel: float) -> None:
    scale = max(one.step_time_s, 1e-9)
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=rel)
    assert one.critical_class == other.critical_class
    assert one.breakdown == pytest.approx(other.breakdown, rel=0, abs=rel * scale)
    assert one.step_sigma_log == pytest.approx(other.step_sigma_log, rel=1e-6, abs=1e-9)
    assert one.stage_finish_s == pytest.approx(other.stage_finish_s, rel=rel)
    for a, b in zip(one.classes, other.classes, strict=True):
        assert a.busy_s == pytest.approx(b.busy_s, rel=0, abs=rel * scale)
        assert a.exposed_s == pytest.approx(b.exposed_s, rel=0, abs=rel * scale)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8, 100])
def test_bubble_of_1f1b(num_stages: int, num_micro_batches: int) -> None:
    """(p - 1) / (m + p - 1) of the step, Narayanan et al. 2104.04473 section 2.2.1."""
    job = equal_stages_job(num_stages=num_stages, num_micro_batches=num_micro_batches)
    step = simulate_step(job, interference=NONE, fidelity="kernel")
    share = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    assert step.step_time_s == pytest.approx(3.0 * (num_micro_batches + num_stages - 1), rel=1e-9)
    assert step.breakdown["bubble_s"] / step.step_time_s == pytest.approx(share, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 5, 12])
def test_interleaving_divides_the_bubble(num_chunks: int, groups: int) -> None:
    """(p - 1) / v blocks of a stage, Narayanan et al. 2104.04473 section 2.2.2."""
    p, m = 4, 4 * groups
    job = equal_stages_job(num_stages=p, num_micro_batches=m, num_chunks=num_chunks)
    step = simulate_step(job, interference=NONE, fidelity="kernel")
    assert step.breakdown["compute_s"] == pytest.approx(3.0 * m * num_chunks, rel=1e-9)
    assert step.breakdown["bubble_s"] == pytest.approx(3.0 * (p - 1), rel=1e-9)


@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_bubble_of_gpipe(num_micro_batches: int) -> None:
    """As that of 1F1B: (p - 1) (f + b), Huang et al. 1811.06965 section 2.3."""
    job = equal_stages_job(num_stages=4, num_micro_batches=num_micro_batches, schedule="gpipe")
    step = simulate_step(job, interference=NONE, fidelity="kernel")
    assert step.step_time_s == pytest.approx(3.0 * (num_micro_batches + 3), rel=1e-9)


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 1.5, 0.75), (2.0, 2.0, 1.0)])
@pytest.mark.parametrize("num_stages", [2, 4, 7])
def test_bubble_of_zb_h1(num_stages: int, f: float, b: float, w: float) -> None:
    """(p - 1) (f + b - w), Qi et al. 2401.10241 table 1."""
    m = 3 * num_stages
    job = equal_stages_job(
        num_stages=num_stages,
        num_micro_batches=m,
        forward=[("gemm", f)],
        backward=[("gemm", b)],
        weight=[("gemm", w)],
        schedule="zb-h1",
    )
    step = simulate_step(job, interference=NONE, fidelity="kernel")
    assert step.step_time_s == pytest.approx(m * (f + b + w) + (num_stages - 1) * (f + b - w), rel=1e-9)


@pytest.mark.parametrize("num_stages", [2, 4, 5])
def test_zbv_has_no_bubble_between_its_first_and_last_pass(num_stages: int) -> None:
    """Stage s waits s forwards for its first and then never again, Qi et al. 2401.10241 section 6."""
    m = 2 * num_stages + 3
    job = equal_stages_job(
        num_stages=num_stages,
        num_micro_batches=m,
        num_chunks=2,
        backward=[("gemm", 1.0)],
        weight=[("gemm", 1.0)],
        schedule="zbv",
    )
    step = simulate_step(job, interference=NONE, fidelity="kernel")
    assert step.stage_finish_s == pytest.approx([6.0 * m + s for s in range(num_stages)], rel=1e-9)
    assert step.breakdown["bubble_s"] == pytest.approx(num_stages - 1, rel=1e-9)


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize(
    ("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 1.0, 0.75), (2.0, 2.0, 1.5), (1.0, 1.25, 0.75), (1.2, 1.0, 1.0)]
)
def test_bubble_of_dualpipe(num_stages: int, f: float, b: float, w: float) -> None:
    """(p / 2 - 1) (F&B + B - 3 W), DeepSeek-V3 2412.19437 table 2, for F&B = F + B, B = I + W and I = F.

    Where they differ it is (p / 2 - 1) (2 F + I - W), which is the same at I = F.
    """
    m = 2 * num_stages + 4
    job = equal_stages_job(
        num_stages=num_stages,
        num_micro_batches=m,
        num_chunks=2,
        forward=[("gemm", f)],
        backward=[("gemm", b)],
        weight=[("gemm", w)],
        schedule="dualpipe",
    )
    step = simulate_step(job, interference=NONE, fidelity="kernel")
    whole = b + w
    bubble = (num_stages // 2 - 1) * (2 * f + b - w)
    if f == b:
        assert bubble == pytest.approx((num_stages // 2 - 1) * (f + whole + whole - 3 * w), rel=1e-12)
    assert step.step_time_s == pytest.approx(m * (f + whole) + bubble, rel=1e-9)


def test_a_send_waits_for_its_receiver() -> None:
    """Stage 0 has its second forward done at 3, but stage 1 posts its second receive after 7 s of its first passes."""
    job = equal_stages_job(num_stages=2, num_micro_batches=2, send_s=1.0, overlap_p2p=False)
    slow = replace(job.stages[1].chunks[0], forward=timed_graph([("gemm", 5.0)]))
    job = replace(job, stages=(job.stages[0], replace(job.stages[1], chunks=(slow,))))
    step = simulate_step(job, interference=NONE, fidelity="kernel", record_spans=True)
    sends = {(s.name, s.micro_batch): (s.start_s, s.end_s) for s in step.spans if s.name.startswith("send")}
    assert sends["send forward", 0] == (1.0, 2.0)
    assert sends["send forward", 1] == (9.0, 10.0)  # stage 1 runs both passes of micro-batch 0 from 2 to 9


def test_interleaving_exchanges_both_ways_at_once() -> None:
    """In the steady phase the transfer of a forward starts with that of the backward behind it."""
    job = equal_stages_job(num_stages=2, num_micro_batches=6, num_chunks=2, send_s=0.25, overlap_p2p=False)
    step = simulate_step(job, interference=NONE, fidelity="kernel", record_spans=True)
    sends = [s for s in step.spans if s.name.startswith("send") and s.rank_class == 1]
    forwards = {round(s.start_s, 9) for s in sends if s.name == "send forward"}
    backwards = {round(s.start_s, 9) for s in sends if s.name == "send backward"}
    assert len(forwards & backwards) >= 4


@examples(60)
@given(job=pipeline_jobs(), slow=st.sampled_from([(1.0, 1.0), (1.3, 1.1), (1.0, 2.0)]))
def test_folded_equals_unfolded(job: PipelineJob, slow: tuple[float, float]) -> None:
    model = interference(*slow)
    folded = simulate_step(job, interference=model, fidelity="kernel")
    check_equal(folded, simulate_step(job, interference=model, fidelity="kernel", fold=False), rel=1e-6)


@examples(30)
@given(
    job=pipeline_jobs(max_stages=3, data_parallel=True),
    extra=st.integers(10, 40),
    slow=st.sampled_from([(1.0, 1.0), (1.5, 1.2)]),
)
def test_many_micro_batches_fold(job: PipelineJob, extra: int, slow: tuple[float, float]) -> None:
    grouped = {"interleaved": len(job.stages), "dualpipe": 2}.get(job.schedule, 1)
    job = replace(job, num_micro_batches=job.num_micro_batches + extra * grouped)
    model = interference(*slow)
    folded = simulate_step(job, interference=model, fidelity="kernel")
    check_equal(folded, simulate_step(job, interference=model, fidelity="kernel", fold=False), rel=1e-6)


@examples(30)
@given(job=pipeline_jobs())
def test_block_equals_kernel_without_interference(job: PipelineJob) -> None:
    kernel = simulate_step(job, interference=NONE, fidelity="kernel")
    block = simulate_step(job, interference=NONE, fidelity="block")
    assert block.step_time_s == pytest.approx(kernel.step_time_s, rel=1e-9)
    assert block.breakdown == pytest.approx(kernel.breakdown, rel=0, abs=1e-9 * max(1.0, kernel.step_time_s))


@examples(40)
@given(job=pipeline_jobs(), slow=st.sampled_from([(1.0, 1.0), (1.4, 1.2)]))
def test_breakdown_adds_up(job: PipelineJob, slow: tuple[float, float]) -> None:
    step = simulate_step(job, interference=interference(*slow), fidelity="kernel")
    assert tuple(step.breakdown) == tuple(BREAKDOWN_KEYS)
    exclusive = {key: value for key, value in step.breakdown.items() if key not in PARTS}
    assert sum(exclusive.values()) == pytest.approx(step.step_time_s, rel=1e-9)
    assert all(value >= -1e-9 for value in step.breakdown.values())
    assert sum(step.breakdown[key] for key in PARTS) <= step.breakdown["compute_s"] + 1e-9
    for times in step.classes:
        assert sum(times.exposed_s.values()) + times.busy_s["compute"] == pytest.approx(times.finish_s, rel=1e-9)
        for axis in set(times.busy_s) - {"compute"}:
            assert times.exposed_s[axis] <= times.busy_s[axis] + 1e-9 * step.step_time_s, axis
        assert max(times.busy_s[axis] for axis in ("compute", "tensor", "context", "data")) <= step.step_time_s + 1e-9


@examples(30)
@given(job=pipeline_jobs())
def test_between_busiest_stream_and_serial_sum(job: PipelineJob) -> None:
    step = simulate_step(job, interference=NONE, fidelity="kernel")
    busiest = max(max(times.busy_s.values()) for times in step.classes)
    compute = max(times.busy_s["compute"] for times in step.classes)
    serial = sum(sum(times.busy_s.values()) for times in step.classes)
    launches = sum(
        job.num_micro_batches * (chunk.forward.graph.num_ops + chunk.backward.graph.num_ops) * job.host_call_s
        for stage in job.stages
        for chunk in stage.chunks
    )
    assert compute <= step.step_time_s + 1e-9
    assert busiest <= 2 * step.step_time_s + 1e-9  # the two directions of transfers count as one axis
    rows = sum(c.forward.graph.num_ops + c.backward.graph.num_ops for stage in job.stages for c in stage.chunks)
    launches += job.num_micro_batches * rows * LAUNCH_LATENCY_S if job.launch_blocking else 0.0
    launches += sum(int(stage.epilogue.graph.host_calls.sum()) for stage in job.stages) * job.host_update_s
    assert step.step_time_s <= (serial + launches + job.host_step_s) * (1 + 1e-9)


def test_interference_slows_overlapped_buckets_only() -> None:
    bucket = GradientBucket(
        collective=Collective.ALL_REDUCE, message_bytes=1.0, time_s=1.0, sigma_log=0.1, ready_after=0
    )
    job = equal_stages_job(
        num_stages=1,
        num_micro_batches=2,
        forward=[("gemm", 1.0)],
        backward=[("gemm", 1.0), ("gemm", 1.0)],
        buckets=(bucket,),
    )
    # Kernel 2 runs beside the bucket from 5 to 5 + 1.2 (bucket slowed 1.2); it then did 1.2 / 1.5, and 0.2 are left.
    step = simulate_step(job, interference=interference(1.5, 1.2), fidelity="kernel")
    assert step.step_time_s == pytest.approx(5.0 + 1.2 + (1 - 1.2 / 1.5))
    assert step.breakdown["interference_s"] == pytest.approx(0.4)
    off = simulate_step(replace(job, overlap_grad_reduce=False), interference=interference(1.5, 1.2), fidelity="kernel")
    assert off.step_time_s == pytest.approx(7.0)
    assert off.breakdown["data_s"] == pytest.approx(1.0)


def test_cost_does_not_grow_with_micro_batches() -> None:
    job = equal_stages_job(num_stages=4, num_micro_batches=100, forward=[("gemm", 1.0), ("sync", 0.1)], send_s=0.01)
    few = simulate_step(job, interference=NONE, fidelity="kernel")
    many = simulate_step(replace(job, num_micro_batches=10_000), interference=NONE, fidelity="kernel")
    assert many.num_simulated_ops == few.num_simulated_ops
    assert many.num_simulated_micro_batches == few.num_simulated_micro_batches < 50
    odd = simulate_step(replace(job, num_micro_batches=10_003), interference=NONE, fidelity="kernel")
    assert odd.num_simulated_ops < 3 * few.num_simulated_ops  # the period is four micro-batches: one more short run
    assert odd.step_time_s == pytest.approx(many.step_time_s + 3 * 3.115, rel=1e-5)


def test_late_steady_state_is_waited_for() -> None:
    """A middle stage 2 % slower than the last decides only after the queue before it has filled."""
    job = equal_stages_job(num_stages=6, num_micro_batches=400, send_s=0.001)
    slow = timed_graph([("gemm", 2.06)], phase=Phase.BACKWARD)
    chunk = replace(job.stages[2].chunks[0], backward=slow)
    stages = tuple(replace(stage, chunks=(chunk,)) if s == 2 else stage for s, stage in enumerate(job.stages))
    job = replace(job, stages=stages)
    folded = simulate_step(job, interference=NONE, fidelity="kernel")
    check_equal(folded, simulate_step(job, interference=NONE, fidelity="kernel", fold=False), rel=1e-9)


def test_block_is_near_kernel_under_interference() -> None:
    """Coalesced kernels are slowed like the longest of them: within 3 % where kernels of two classes mix."""
    bucket = GradientBucket(
        collective=Collective.ALL_REDUCE, message_bytes=1.0, time_s=4.0, sigma_log=0.1, ready_after=2
    )
    backward: list[Item] = [("gemm", 1.0), ("norm", 0.2), ("sync", 0.3), *[("gemm", 1.0), ("norm", 0.2)] * 3]
    job = equal_stages_job(num_stages=2, num_micro_batches=8, backward=backward, buckets=(bucket,))
    model = interference(1.0, 1.1)
    model.compute[OpClass.GEMM], model.compute[OpClass.NORM] = 1.1, 1.5
    kernel = simulate_step(job, interference=model, fidelity="kernel")
    block = simulate_step(job, interference=model, fidelity="block")
    assert block.step_time_s == pytest.approx(kernel.step_time_s, rel=0.03)
    assert block.num_simulated_ops < kernel.num_simulated_ops


def test_spans_change_no_number_and_agree_with_it() -> None:
    job = equal_stages_job(num_stages=3, num_micro_batches=60, send_s=0.1)
    plain = simulate_step(job, interference=NONE, fidelity="kernel")
    shown = simulate_step(job, interference=NONE, fidelity="kernel", record_spans=True)
    assert replace(shown, spans=()) == plain
    assert max(span.end_s for span in shown.spans) == pytest.approx(plain.step_time_s)
    kernels = sum(span.end_s - span.start_s for span in shown.spans if span.rank_class == 0 and span.stream == 0)
    assert kernels == pytest.approx(plain.breakdown["compute_s"])


def test_exchanges_of_experts_run_beside_another_micro_batch() -> None:
    """The first forward and the last backward alone, m - 1 pairs of which no exchange shows."""
    forward, backward = (
        [("gemm", 2.0), ("exchange", 1.0), ("gemm", 2.0)],
        [("gemm", 3.0), ("exchange", 1.5), ("gemm", 3.0)],
    )
    for m in (1, 2, 5, 40):
        alone = equal_stages_job(num_stages=1, num_micro_batches=m, forward=forward, backward=backward)
        beside = replace(alone, overlap_exchanges=True)
        steps = [simulate_step(job, interference=NONE, fidelity="kernel").step_time_s for job in (alone, beside)]
        assert steps[0] == pytest.approx(12.5 * m)
        assert steps[1] == pytest.approx(5.0 + 7.5 + 10.0 * (m - 1))


def test_dualpipe_hides_exchanges_of_experts_in_its_pairs() -> None:
    """Two more micro-batches are two more pairs on every stage: 10 s each of kernels, or 12.5 s with exchanges."""
    forward = [("gemm", 2.0), ("exchange", 1.0), ("gemm", 2.0)]
    backward = [("gemm", 2.0), ("exchange", 1.5), ("gemm", 2.0)]
    for overlaps, pair_s in ((False, 12.5), (True, 10.0)):
        steps = [
            simulate_step(
                equal_stages_job(
                    num_stages=4, num_micro_batches=m, num_chunks=2, forward=forward, backward=backward,
                    weight=[("gemm", 2.0)], schedule="dualpipe", overlap_exchanges=overlaps,
                ),
                interference=NONE, fidelity="kernel",
            ).step_time_s
            for m in (20, 30)
        ]  # fmt: skip
        assert steps[1] - steps[0] == pytest.approx(10 * pair_s)


def test_an_exchange_longer_than_what_hides_it_shows() -> None:
    forward = [("gemm", 1.0), ("exchange", 9.0), ("gemm", 1.0)]
    backward = [("gemm", 0.5), ("exchange", 0.25), ("gemm", 0.5)]
    job = equal_stages_job(
        num_stages=1, num_micro_batches=11, forward=forward, backward=backward, overlap_exchanges=True
    )
    step = simulate_step(job, interference=NONE, fidelity="kernel")
    # A pair: a kernel of each, the forward's exchange beside the other kernel of the backward, its own other kernel.
    assert step.step_time_s == pytest.approx(11.0 + 1.25 + 10 * (0.5 + 1.0 + 9.0 + 1.0))
    assert step.breakdown["expert_s"] == pytest.approx(9.0 + 0.25 + 10 * 8.5)


def test_collectives_over_stages_in_another_order_name_their_rows() -> None:
    """Stage 0 sums its tied embedding first, stage 1 the norm of its gradients: neither ever meets the other."""
    job = equal_stages_job(num_stages=2, num_micro_batches=2)
    orders: tuple[list[Item], ...] = ([("embedding", 0.1), ("model", 0.1)], [("model", 0.1), ("embedding", 0.1)])
    epilogues = [timed_graph(order, phase=Phase.OPTIMIZER) for order in orders]
    job = replace(job, stages=tuple(replace(s, epilogue=e) for s, e in zip(job.stages, epilogues, strict=True)))
    with pytest.raises(EchoError, match="wait for each other") as error:
        simulate_step(job, interference=NONE, fidelity="kernel")
    assert "row 0 (optimizer all_reduce 1 B over embedding" in str(error.value)
    assert "row 0 (optimizer all_reduce 1 B over model" in str(error.value)
    assert "on model of rank class 0" in str(error.value)
    assert "on model of rank class 1" in str(error.value)
    assert "\n" not in str(error.value)


def test_collectives_that_share_links_slow_each_other() -> None:
    """A tensor collective of 2 s from 4 to 6 s beside a bucket of 3 s from 4 s on, tensor 2 x and data 1.5 x as slow.

    Both run from 4: the bucket at 2/3 would end at 8.5, the other at 1/2 ends at 8; the bucket has 3 - 4 * 2/3 = 1/3
    left then and ends at 8 + 1/3.
    """
    bucket = GradientBucket(
        collective=Collective.ALL_REDUCE, message_bytes=1.0, time_s=3.0, sigma_log=0.1, ready_after=0
    )
    job = equal_stages_job(
        num_stages=1,
        num_micro_batches=1,
        forward=[("gemm", 3.0)],
        backward=[("gemm", 1.0), ("sync", 2.0)],
        buckets=(bucket,),
    )
    alone = simulate_step(job, interference=NONE, fidelity="kernel")
    assert alone.step_time_s == pytest.approx(7.0)
    shared = SharedLinks(first=Axis.TENSOR, second=Axis.DATA, first_slowdown=2.0, second_slowdown=1.5)
    both = replace(job, shared_links=(shared,))
    for fold in (True, False):
        step = simulate_step(both, interference=NONE, fidelity="kernel", fold=fold)
        assert step.step_time_s == pytest.approx(8.0 + 1 / 3)
    bad = replace(job, shared_links=(replace(shared, first_slowdown=0.5),))
    with pytest.raises(SpecError, match="shared_links"):
        simulate_step(bad, interference=NONE, fidelity="kernel")


@examples(30)
@given(job=pipeline_jobs(), slow=st.sampled_from([(1.0, 1.0), (1.3, 1.1)]))
def test_folded_equals_unfolded_with_shared_links(job: PipelineJob, slow: tuple[float, float]) -> None:
    job = replace(
        job,
        shared_links=(
            SharedLinks(first=Axis.TENSOR, second=Axis.DATA, first_slowdown=1.5, second_slowdown=1.2),
            SharedLinks(first=Axis.CONTEXT, second=Axis.TENSOR, first_slowdown=2.0, second_slowdown=2.0),
        ),
    )
    model = interference(*slow)
    folded = simulate_step(job, interference=model, fidelity="kernel")
    check_equal(folded, simulate_step(job, interference=model, fidelity="kernel", fold=False), rel=1e-6)


@pytest.mark.parametrize(("each_s", "expected_s"), [(0.0, 2.5), (0.1, 2.5), (0.3, 3.5)])
def test_the_host_updates_parameters_beside_the_kernels_of_the_update(each_s: float, expected_s: float) -> None:
    """Behind the gradient norm the slower of the two counts: kernels, or the host's loop over ten parameters."""
    norm, wait, update = (OpRow(kind=kind, phase=Phase.OPTIMIZER, host_calls=calls) for kind, calls in
                          ((OpKind.COMPUTE, 0), (OpKind.HOST_SYNC, 0), (OpKind.COMPUTE, 10)))  # fmt: skip
    graph = build_graph([norm, wait, update])
    epilogue = TimedGraph(graph=graph, time_s=np.array([0.5, 0.0, 2.0]), sigma_log=np.zeros(3))
    passes = equal_stages_job(num_stages=1, num_micro_batches=1)
    job = replace(passes, stages=(replace(passes.stages[0], epilogue=epilogue),), host_update_s=each_s)
    with_epilogue, without = (simulate_step(j, interference=NONE, fidelity="kernel") for j in (job, passes))
    assert with_epilogue.step_time_s - without.step_time_s == pytest.approx(expected_s)
