"""Lower bounds never exceed a simulated step, and are tight where they should be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.graph import Collective
from echo_explore.testing.strategies import equal_stages_job, interference, pipeline_jobs
from echo_explore.timeline import GradientBucket, PipelineJob, cheap_bound, simulate_step, step_time_lower_bound
from tests.examples import examples

WHOLE_BACKWARDS = ("no-pipelining", "1f1b", "interleaved", "gpipe")


@examples(120)
@given(job=pipeline_jobs(), slow=st.sampled_from([(1.0, 1.0), (1.5, 1.5)]))
def test_never_above_the_simulation(job: PipelineJob, slow: tuple[float, float]) -> None:
    step = simulate_step(job, interference=interference(*slow), fidelity="kernel")
    assert step_time_lower_bound(job) <= step.step_time_s * (1 + 1e-9)


@examples(60)
@given(job=pipeline_jobs(data_parallel=False))
def test_cheap_bound_never_above_the_simulation(job: PipelineJob) -> None:
    """FLOP and peak such that every kernel runs at the peak."""
    step = simulate_step(job, interference=interference(), fidelity="kernel")
    passes = job.num_micro_batches / (2 if job.schedule == "dualpipe" else 1)  # each end feeds half of them
    flop = [
        passes * sum(float(t.time_s[t.graph.is_compute].sum()) for c in stage.chunks for t in (c.forward, c.backward))
        for stage in job.stages
    ]
    if job.schedule not in WHOLE_BACKWARDS:  # others fill what the first forwards leave: the busiest stage alone bounds
        flop = [max(flop)]
    bound = cheap_bound(
        flop=flop,
        bytes_moved=[0.0] * len(flop),
        peak_flop_per_s=1.0,
        memory_bandwidth_bytes_per_s=1.0,
        num_micro_batches=job.num_micro_batches,
        virtual_pipeline=len(job.stages[0].chunks),
    )
    assert bound <= step.step_time_s * (1 + 1e-9)


def test_a_split_backward_beats_the_bound_of_whole_ones() -> None:
    """Why the bound of several stages is for whole backwards only: weights fill what would be a bubble."""
    one = [("gemm", 1.0)]
    job = equal_stages_job(num_stages=2, num_micro_batches=1, backward=one, weight=one, schedule="zb-h1")
    step = simulate_step(job, interference=interference(), fidelity="kernel")
    ends_with_whole = cheap_bound(
        flop=[3.0, 3.0],
        bytes_moved=[0.0] * 2,
        peak_flop_per_s=1.0,
        memory_bandwidth_bytes_per_s=1.0,
        num_micro_batches=1,
    )
    assert (
        cheap_bound(
            flop=[3.0], bytes_moved=[0.0], peak_flop_per_s=1.0, memory_bandwidth_bytes_per_s=1.0, num_micro_batches=1
        )
        <= step.step_time_s
        < ends_with_whole
    )


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_both_bounds_are_the_bubble_of_equal_stages(num_chunks: int) -> None:
    p, m = 4, 12
    job = equal_stages_job(num_stages=p, num_micro_batches=m, num_chunks=num_chunks)
    step = simulate_step(job, interference=interference(), fidelity="kernel")
    cheap = cheap_bound(
        flop=[3.0 * m * num_chunks] * p,
        bytes_moved=[0.0] * p,
        peak_flop_per_s=1.0,
        memory_bandwidth_bytes_per_s=1.0,
        num_micro_batches=m,
        virtual_pipeline=num_chunks,
        equal_stages=True,
    )
    assert cheap == pytest.approx(step.step_time_s)
    assert step_time_lower_bound(job) == pytest.approx(step.step_time_s)


def test_last_bucket_counts() -> None:
    bucket = GradientBucket(
        collective=Collective.ALL_REDUCE, message_bytes=1.0, time_s=5.0, sigma_log=0.1, ready_after=0
    )
    job = equal_stages_job(
        num_stages=2, num_micro_batches=4, backward=[("gemm", 1.0), ("gemm", 1.0)], buckets=(bucket,)
    )
    step = simulate_step(job, interference=interference(), fidelity="kernel")
    assert step_time_lower_bound(job) == pytest.approx(step.step_time_s)
    serial = replace(job, overlap_grad_reduce=False)
    step = simulate_step(serial, interference=interference(), fidelity="kernel")
    assert step_time_lower_bound(serial) == pytest.approx(step.step_time_s)


def test_memory_bound_stage_and_bad_input() -> None:
    values = {"peak_flop_per_s": 2.0, "memory_bandwidth_bytes_per_s": 4.0, "num_micro_batches": 1}
    assert cheap_bound(flop=[2.0, 2.0], bytes_moved=[0.0, 12.0], **values) == pytest.approx(4.0)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="needs an entry a stage"):
        cheap_bound(flop=[1.0], bytes_moved=[], **values)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="peak_flop_per_s = 0"):
        cheap_bound(flop=[1.0], bytes_moved=[0.0], **{**values, "peak_flop_per_s": 0})  # type: ignore[arg-type]
