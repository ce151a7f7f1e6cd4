"""Slow ranks and jitter: by hand, folded against unfolded, bounds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.testing.strategies import equal_stages_job, interference, pipeline_jobs
from echo_explore.timeline import PipelineJob, simulate_step, step_time_lower_bound, with_slow_ranks
from tests.examples import examples
from tests.timeline.test_step import check_equal

NONE = interference()


def test_the_slow_stage_sets_the_pace() -> None:
    """1F1B: a slow stage 1 of 2 does m micro-batches one after the other, behind the first forward of stage 0."""
    job = equal_stages_job(num_stages=2, num_micro_batches=10)
    plain = simulate_step(job, interference=NONE, fidelity="kernel")
    slow = simulate_step(with_slow_ranks(job, {1: 1.2}), interference=NONE, fidelity="kernel")
    assert plain.step_time_s == pytest.approx(3.0 * 11)
    assert slow.step_time_s == pytest.approx(1.0 + 10 * 3.6 + 2.0)  # and the last backward of stage 0
    assert [times.label for times in slow.classes] == ["stage", "stage, 1.2 x as slow"]


def test_transfers_of_a_slow_rank_take_as_long_as_before() -> None:
    job = equal_stages_job(num_stages=1, num_micro_batches=4, forward=[("gemm", 1.0), ("sync", 0.5)])
    plain = simulate_step(job, interference=NONE, fidelity="kernel")
    slow = simulate_step(with_slow_ranks(job, {0: 2.0}), interference=NONE, fidelity="kernel")
    assert slow.breakdown["compute_s"] == pytest.approx(2 * plain.breakdown["compute_s"])
    assert slow.breakdown["tensor_s"] == pytest.approx(plain.breakdown["tensor_s"])


@pytest.mark.parametrize(("factors", "rule"), [({4: 1.2}, "has stages 0..3"), ({1: 0.9}, "must be 1 or more")])
def test_refused(factors: dict[int, float], rule: str) -> None:
    with pytest.raises(SpecError, match=rule):
        with_slow_ranks(equal_stages_job(num_stages=4, num_micro_batches=4), factors)


@examples(40)
@given(
    job=pipeline_jobs(),
    slow=st.sampled_from([(1.0, 1.0), (1.3, 1.1)]),
    factors=st.lists(st.sampled_from([1.0, 1.2, 3.0]), min_size=4, max_size=4),
    jitter=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
)
def test_folded_equals_unfolded(
    job: PipelineJob, slow: tuple[float, float], factors: list[float], jitter: float
) -> None:
    job = with_slow_ranks(job, dict(enumerate(factors[: len(job.stages)])))
    job = replace(job, jitter_sigma_log=jitter, jitter_seed=3)
    model = interference(*slow)
    folded = simulate_step(job, interference=model, fidelity="kernel")
    check_equal(folded, simulate_step(job, interference=model, fidelity="kernel", fold=False), rel=1e-6)
    assert step_time_lower_bound(job) <= folded.step_time_s * (1 + 1e-9)


def test_many_micro_batches_of_slow_stages_fold() -> None:
    job = equal_stages_job(num_stages=4, num_micro_batches=200, num_chunks=2, send_s=0.01)
    job = with_slow_ranks(job, {2: 1.3})
    folded = simulate_step(job, interference=NONE, fidelity="kernel")
    assert folded.num_simulated_micro_batches < 100
    check_equal(folded, simulate_step(job, interference=NONE, fidelity="kernel", fold=False), rel=1e-9)


def test_jitter_only_delays_and_repeats_with_its_seed() -> None:
    job = equal_stages_job(num_stages=4, num_micro_batches=16)
    plain = simulate_step(job, interference=NONE, fidelity="kernel").step_time_s

    def jittered(sigma: float, seed: int) -> float:
        noisy = replace(job, jitter_sigma_log=sigma, jitter_seed=seed)
        return simulate_step(noisy, interference=NONE, fidelity="kernel").step_time_s

    assert plain < jittered(0.05, 1) < jittered(0.2, 1)
    assert jittered(0.05, 1) == jittered(0.05, 1) != jittered(0.05, 2)
    with pytest.raises(SpecError, match="jitter_sigma_log"):
        jittered(-1.0, 1)
