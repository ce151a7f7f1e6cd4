"""Replicas that are not alike: by hand, folded against one class a replica, and against every op of every pass."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective, Phase, TimedGraph
from echo_explore.testing.strategies import equal_stages_job, interference, pipeline_jobs, timed_graph
from echo_explore.timeline import (
    ChunkJob,
    GradientBucket,
    PipelineJob,
    ReplicaKind,
    StepTimeline,
    one_by_one,
    perfectly_overlapped,
    simulate_step,
    slowed_kernels,
    slowed_transfers,
    step_time_lower_bound,
    with_slow_ranks,
    with_unlike_replicas,
)
from echo_explore.timeline.meeting import meets_over_replicas
from tests.examples import examples
from tests.timeline.test_step import check_equal

NONE = interference()
BUCKET = GradientBucket(
    collective=Collective.ALL_REDUCE, message_bytes=1.0, time_s=4.0, sigma_log=0.1, ready_after=0, axis=Axis.DATA
)


def _step(job: PipelineJob, **options: bool) -> StepTimeline:
    return simulate_step(job, interference=NONE, fidelity="kernel", **options)


def check_every_replica(job: PipelineJob, slow: tuple[float, float]) -> StepTimeline:
    """Folded kinds of replicas equal every op, and every replica run by itself, which is given."""
    model = interference(*slow)
    folded = simulate_step(job, interference=model, fidelity="kernel")
    check_equal(folded, simulate_step(job, interference=model, fidelity="kernel", fold=False), rel=1e-6)
    apart = simulate_step(one_by_one(job), interference=model, fidelity="kernel", fold=False)
    assert apart.step_time_s == pytest.approx(folded.step_time_s, rel=1e-6)
    p, counts = len(job.stages), [job.num_replicas, *(variant.num_replicas for variant in job.variants)]
    of_replicas = [folded.stage_finish_s[k * p : (k + 1) * p] for k, count in enumerate(counts) for _ in range(count)]
    assert apart.stage_finish_s == pytest.approx([finish_s for own in of_replicas for finish_s in own], rel=1e-6)
    assert step_time_lower_bound(job) <= folded.step_time_s * (1 + 1e-9)
    return apart


def _slow(job: PipelineJob, factor: float, num_slow: int, num_replicas: int, per_exchange: int = 1) -> PipelineJob:
    """The first replicas are slow on all stages."""
    kind = ReplicaKind(
        label="slow replica", stages=slowed_kernels(job.stages, dict.fromkeys(range(len(job.stages)), factor))
    )
    kind_of = [1] * num_slow + [0] * (num_replicas - num_slow)
    return with_unlike_replicas(job, [kind], kind_of, replicas_per_exchange=per_exchange)


def test_replicas_meet_where_gradients_are_reduced() -> None:
    """m (1 + 2) s of passes, twice that in the slow replica, then a bucket of 4 s that both start together."""
    job = equal_stages_job(num_stages=1, num_micro_batches=5, buckets=(BUCKET,))
    job = replace(job, stages=(replace(job.stages[0], multiplicity=8),))
    step = _step(_slow(job, 2.0, 1, 8), record_spans=True, explain=True)
    assert step.step_time_s == pytest.approx(2 * 15.0 + 4.0)
    assert [(times.label, times.multiplicity) for times in step.classes] == [
        ("stage", 7), ("stage, 2 x as slow, slow replica", 1),
    ]  # fmt: skip
    assert step.num_rank_classes == 2
    assert [times.exposed_s["bubble"] for times in step.classes] == pytest.approx([15.0, 0.0])
    assert step.critical_class == 1  # both end together; the slow one waits for nobody
    assert {s.start_s for s in step.spans if s.name.startswith("gradient bucket")} == {30.0}
    assert {(s.rank_class, s.variant) for s in step.spans} == {(0, 0), (1, 1)}
    assert step.explanation is not None
    assert step.explanation.critical_path_stages_s == pytest.approx((4.0, 30.0))


def test_the_slowest_link_decides_a_shared_collective() -> None:
    job = equal_stages_job(num_stages=2, num_micro_batches=6, buckets=(BUCKET,), send_s=0.5)
    broken = ReplicaKind(label="broken link", stages=slowed_transfers(job.stages, [Axis.DATA], 3.0))
    everywhere = replace(job, stages=broken.stages)
    step = _step(with_unlike_replicas(job, [broken], [0, 0, 1, 0]))
    assert step.step_time_s == _step(everywhere).step_time_s == pytest.approx(_step(job).step_time_s + 8.0)
    sends = slowed_transfers(job.stages, [Axis.PIPELINE], 2.0)
    assert [(s.send_forward_s, s.send_backward_s) for s in sends] == [(1.0, 1.0)] * 2
    assert [s.chunks[0].buckets for s in sends] == [(BUCKET,)] * 2


@pytest.mark.parametrize("num_micro_batches", [4, 100])
def test_replicas_meet_inside_passes_that_gather_parameters(num_micro_batches: int) -> None:
    """Sharded parameters: each pass starts with a gather, and so all passes of the fast replicas wait."""
    rows = [("data", 0.25), ("gemm", 1.0)]
    job = equal_stages_job(num_stages=1, num_micro_batches=num_micro_batches, forward=rows, backward=rows)
    step = _step(_slow(job, 2.0, 1, 4))
    assert step.step_time_s == pytest.approx(2 * num_micro_batches * 2.25)
    assert step.classes[0].exposed_s["bubble"] == pytest.approx(2.0 * num_micro_batches - 1.0)
    assert step.num_simulated_micro_batches <= 20


def test_only_replicas_of_an_expert_group_wait_at_its_exchanges() -> None:
    """Replicas 0 and 1 exchange tokens, and so do 2 and 3; 0 is slow."""
    rows = [("exchange", 0.5), ("gemm", 1.0)]
    job = equal_stages_job(num_stages=1, num_micro_batches=4, forward=rows, backward=rows)
    job = replace(job, stages=(replace(job.stages[0], multiplicity=4),))
    step = _step(_slow(job, 3.0, 1, 4, per_exchange=2))
    assert [(times.label, times.multiplicity) for times in step.classes] == [
        ("stage", 2), ("stage, exchanges with slow replica", 1), ("stage, 3 x as slow, slow replica", 1),
    ]  # fmt: skip
    assert step.stage_finish_s == pytest.approx((8 * 1.5, 8 * 3.5 - 2.0, 8 * 3.5))


def test_pairs_of_passes_wait_for_slow_replicas_that_they_exchange_tokens_with() -> None:
    """A forward and a backward of 0.5 s of exchange beside 1 s of the other's kernel: 3 s apart, 2.5 s as a pair.

    Replica 0 is three times as slow, 1 exchanges with it and waits at every pair, 2 and 3 do not.
    """
    rows = [("exchange", 0.5), ("gemm", 1.0)]
    job = equal_stages_job(num_stages=1, num_micro_batches=6, forward=rows, backward=rows)
    job = replace(job, overlap_exchanges=True, stages=(replace(job.stages[0], multiplicity=4),))
    alone = _step(job)
    assert alone.step_time_s < 6 * 3.0
    step = _step(_slow(job, 3.0, 1, 4, per_exchange=2))
    assert step.stage_finish_s[0] == alone.step_time_s
    slow = _step(replace(job, stages=slowed_kernels(job.stages, {0: 3.0}))).step_time_s
    assert step.stage_finish_s[2] == pytest.approx(slow)
    assert slow - 2.0 <= step.stage_finish_s[1] <= slow
    assert [times.multiplicity for times in step.classes] == [2, 1, 1]
    check_equal(step, _step(_slow(job, 3.0, 1, 4, per_exchange=2), fold=False), rel=1e-9)


LOADED = [("gemm", 0.5), ("exchange", 0.25), ("gemm", 1.0), ("exchange", 0.25), ("gemm", 0.5)]


def _loaded(job: PipelineJob, loads: tuple[float, ...], num_groups: int = 1) -> PipelineJob:
    """Ranks of expert groups whose experts take so many times as long; what comes before and behind them does not."""

    def kind(load: float) -> ReplicaKind:
        def graph(timed: TimedGraph) -> TimedGraph:
            exchanges = np.flatnonzero(timed.graph.is_collective & (timed.graph.axis == Axis.EXPERT))
            inside = np.zeros(timed.graph.num_ops, dtype=np.bool_)
            for first, last in zip(exchanges[::2], exchanges[1::2], strict=False):
                inside[first:last] = timed.graph.is_compute[first:last]
            return replace(timed, time_s=np.where(inside, timed.time_s * load, timed.time_s))

        def chunk(c: ChunkJob) -> ChunkJob:
            split = c.split and replace(c.split, input=graph(c.split.input), weight=graph(c.split.weight))
            return replace(c, forward=graph(c.forward), backward=graph(c.backward), split=split)

        stages = tuple(replace(s, chunks=tuple(chunk(c) for c in s.chunks)) for s in job.stages)
        return ReplicaKind(label=f"load {load:g}", stages=stages)

    kind_of = [*range(1, len(loads) + 1)] * num_groups
    return with_unlike_replicas(job, [kind(load) for load in loads], kind_of, replicas_per_exchange=len(loads))


def test_ranks_with_other_loads_are_classes_that_cost_one_body_a_pass() -> None:
    """Four loads of an expert group: all wait for the fullest at every combine; only measuring has their rows."""
    job = equal_stages_job(num_stages=4, num_micro_batches=200, forward=LOADED, backward=LOADED, send_s=0.1)
    job = replace(job, stages=tuple(replace(stage, multiplicity=32) for stage in job.stages))
    step = _step(_loaded(job, (1.0, 2.0, 0.5, 1.5), num_groups=8))
    fullest = _step(_loaded(job, (2.0,)))
    assert step.num_rank_classes == 16
    assert [times.multiplicity for times in step.classes] == [8] * 16
    assert step.step_time_s == pytest.approx(fullest.step_time_s, rel=1e-12)
    assert step.num_simulated_ops < 4.2 * fullest.num_simulated_ops
    waits = [step.classes[4 * k].exposed_s["bubble"] for k in range(4)]
    bubble_s = waits[1]
    assert waits == pytest.approx([bubble_s + 400.0, bubble_s, bubble_s + 600.0, bubble_s + 200.0])
    assert step.critical_class in range(4, 8)  # of those that end together, the one that waits least


def test_a_wait_inside_a_pass_is_a_bubble_whatever_runs_beside_it() -> None:
    """Gradients of the second chunk are reduced while the rank waits for a fuller one in passes of the first."""
    bucket = replace(BUCKET, time_s=8.0)
    job = equal_stages_job(num_stages=2, num_micro_batches=2, num_chunks=2, forward=LOADED, backward=LOADED)
    chunks = tuple(replace(chunk, buckets=(bucket,) * v) for v, chunk in enumerate(job.stages[0].chunks))
    job = _loaded(replace(job, stages=tuple(replace(s, chunks=chunks, multiplicity=2) for s in job.stages)), (1.0, 3.0))
    folded = _step(job)
    check_equal(folded, _step(job, fold=False), rel=1e-9)
    emptier, fuller = folded.classes[0], folded.classes[2]
    assert emptier.exposed_s["bubble"] == pytest.approx(fuller.exposed_s["bubble"] + 8 * 2.0)  # 8 passes, 2 s each
    assert emptier.exposed_s["data"] == pytest.approx(fuller.exposed_s["data"])


@examples(40)
@given(
    job=pipeline_jobs(max_stages=2, max_micro_batches=5),
    loads=st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0]), min_size=1, max_size=4),
    moe=st.booleans(),
    slow=st.sampled_from([(1.0, 1.0), (1.3, 1.1)]),
)
def test_folded_loads_equal_a_class_for_every_rank(
    job: PipelineJob, loads: list[float], moe: bool, slow: tuple[float, float]
) -> None:
    if moe and job.schedule in ("1f1b", "interleaved", "no-pipelining", "gpipe"):
        chunk = ChunkJob(forward=timed_graph(LOADED), backward=timed_graph(LOADED, phase=Phase.BACKWARD))
        traffic = [stage.chunks[0] for stage in job.stages]
        stages = tuple(
            replace(
                stage,
                chunks=(
                    replace(
                        chunk,
                        buckets=tuple(replace(b, ready_after=min(b.ready_after, 4)) for b in c.buckets),
                        gathers=tuple(replace(g, needed_before=min(g.needed_before, 4)) for g in c.gathers),
                    ),
                )
                * len(stage.chunks),
            )
            for stage, c in zip(job.stages, traffic, strict=True)
        )
        job = replace(job, stages=stages)
    job = replace(job, stages=tuple(replace(stage, multiplicity=12) for stage in job.stages))
    job = _loaded(job, tuple(loads))
    check_every_replica(job, slow)


@examples(25)
@given(job=pipeline_jobs(), factor=st.sampled_from([1.0, 1.5]), num_slow=st.integers(0, 3))
def test_kinds_that_run_the_same_are_one(job: PipelineJob, factor: float, num_slow: int) -> None:
    """No change, or the same to all replicas: bit by bit the job as it was, with its classes."""
    num_slow = num_slow if factor == 1.0 else 3
    alone = replace(job, stages=slowed_kernels(job.stages, dict.fromkeys(range(len(job.stages)), factor)))
    one, other = _step(alone), _step(_slow(job, factor, num_slow, 3))
    assert one.num_rank_classes == other.num_rank_classes == len(job.stages)
    assert (one.step_time_s, one.breakdown, one.stage_finish_s) == (
        other.step_time_s, other.breakdown, other.stage_finish_s,
    )  # fmt: skip


@st.composite
def unlike_jobs(draw: st.DrawFn) -> PipelineJob:
    """Small jobs with up to three kinds of replicas, which may exchange tokens with each other."""
    job = draw(pipeline_jobs(max_stages=3, max_micro_batches=5))
    overlapped = job.overlap_exchanges and not meets_over_replicas(job)
    job = replace(job, overlap_exchanges=overlapped)
    stages = tuple(replace(stage, multiplicity=60) for stage in job.stages)
    factors = st.sampled_from([1.0, 1.25, 2.0])
    slow = slowed_kernels(stages, {s: draw(factors) for s in range(len(stages))})
    axes = draw(st.sampled_from([(Axis.DATA,), (Axis.TENSOR, Axis.PIPELINE), (Axis.EXPERT, Axis.EXPERT_DATA)]))
    kinds = [
        ReplicaKind(label="slow", stages=slow),
        ReplicaKind(label="broken", stages=slowed_transfers(stages, axes, 1.5)),
    ]
    per_exchange = draw(st.sampled_from([1, 2]))
    num_replicas = per_exchange * draw(st.integers(1, 3))
    kind_of = draw(st.lists(st.integers(0, 2), min_size=num_replicas, max_size=num_replicas))
    return with_unlike_replicas(replace(job, stages=stages), kinds, kind_of, replicas_per_exchange=per_exchange)


@examples(60)
@given(job=unlike_jobs(), slow=st.sampled_from([(1.0, 1.0), (1.3, 1.1)]))
def test_folded_equals_every_op_of_every_replica(job: PipelineJob, slow: tuple[float, float]) -> None:
    apart = check_every_replica(job, slow)
    assert sum(times.multiplicity for times in apart.classes) == 60 * len(job.stages)


@examples(20)
@given(
    job=pipeline_jobs(max_stages=3),
    extra=st.integers(10, 30),
    slow=st.sampled_from([(1.0, 1.0), (1.5, 1.2)]),
    per_exchange=st.sampled_from([1, 2]),
)
def test_many_micro_batches_fold(job: PipelineJob, extra: int, slow: tuple[float, float], per_exchange: int) -> None:
    grouped = {"interleaved": len(job.stages), "dualpipe": 2}.get(job.schedule, 1)
    job = replace(job, num_micro_batches=job.num_micro_batches + extra * grouped, overlap_exchanges=False)
    job = _slow(job, 1.25, 1, 4, per_exchange)
    model = interference(*slow)
    folded = simulate_step(job, interference=model, fidelity="kernel")
    check_equal(folded, simulate_step(job, interference=model, fidelity="kernel", fold=False), rel=1e-6)


def test_a_slow_replica_holds_the_step_back_as_if_all_were_slow() -> None:
    """Without interference only the pipeline of the slow replica counts, to the end of the step."""
    job = equal_stages_job(num_stages=4, num_micro_batches=30, send_s=0.1, buckets=(BUCKET,))
    slow = ReplicaKind(label="slow", stages=slowed_kernels(job.stages, {2: 1.5}))
    step = _step(with_unlike_replicas(job, [slow], [1, *[0] * 1023]))
    assert step.step_time_s == pytest.approx(_step(with_slow_ranks(job, {2: 1.5})).step_time_s)
    assert step.num_rank_classes == 8


def test_perfect_overlap_reaches_all_kinds() -> None:
    job = _slow(equal_stages_job(num_stages=1, num_micro_batches=3, forward=[("sync", 1.0), ("gemm", 1.0)]), 2.0, 1, 2)
    assert _step(perfectly_overlapped(job)).step_time_s == pytest.approx(3 * (2.0 + 4.0))


def test_refused() -> None:
    job = equal_stages_job(num_stages=2, num_micro_batches=4, buckets=(BUCKET,))
    other = equal_stages_job(num_stages=2, num_micro_batches=4)
    with pytest.raises(SpecError, match="kind from 0 to 0"):
        with_unlike_replicas(job, [], [0, 1])
    with pytest.raises(SpecError, match="must divide the 3 replicas"):
        with_unlike_replicas(job, [], [0, 0, 0], replicas_per_exchange=2)
    with pytest.raises(SpecError, match=r"variants.buckets = 2: all replicas need the same ones"):
        _step(with_unlike_replicas(job, [ReplicaKind(label="bare", stages=other.stages)], [0, 1]))
    gathering = ChunkJob(forward=timed_graph([("data", 1.0)]), backward=timed_graph([("gemm", 1.0)]), buckets=(BUCKET,))
    stages = tuple(replace(stage, chunks=(gathering,)) for stage in job.stages)
    with pytest.raises(SpecError, match="meet over DATA need as many"):
        _step(with_unlike_replicas(job, [ReplicaKind(label="gathers", stages=stages)], [0, 1]))
    short = with_unlike_replicas(job, [ReplicaKind(label="slow", stages=other.stages)], [0, 1])
    short = replace(short, variants=(replace(short.variants[0], stages=short.stages[:1]),))
    with pytest.raises(SpecError, match="needs the 2 stages"):
        _step(short)
