"""The critical path is as long as the step, and bubbles fall where schedules have them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.testing.strategies import equal_stages_job, interference, pipeline_jobs, timed_graph
from echo_explore.timeline import PipelineJob, ReplicaKind, StepExplanation, simulate_step, with_unlike_replicas
from echo_explore.timeline.blocks import prepare_blocks
from echo_explore.timeline.explain import critical_path
from echo_explore.timeline.program import checked_pairs
from echo_explore.timeline.step import _run_collapsed
from tests.examples import examples


def explained(job: PipelineJob) -> tuple[StepExplanation, float]:
    step = simulate_step(job, interference=interference(), fidelity="kernel", explain=True)
    assert step.explanation is not None
    return step.explanation, step.step_time_s


@examples(40)
@given(job=pipeline_jobs(), slow=st.sampled_from([(1.0, 1.0), (1.4, 1.2)]))
def test_critical_path_is_a_chain_as_long_as_the_step(job: PipelineJob, slow: tuple[float, float]) -> None:
    pairs = checked_pairs(interference(*slow))
    run = _run_collapsed(job, prepare_blocks(job, pairs, "kernel"), pairs, job.num_micro_batches)
    path = critical_path(run.step.program, run.times)
    start, end = run.times.start_s[path], run.times.end_s[path]
    assert end[0] == run.times.end_s.max()
    assert start[-1] == pytest.approx(0.0, abs=1e-12)
    for later, earlier in pairwise(range(len(path))):
        assert start[later] == pytest.approx(end[earlier], rel=1e-9, abs=1e-9), (later, earlier)


@examples(25)
@given(job=pipeline_jobs())
def test_shares_and_bubbles_add_up(job: PipelineJob) -> None:
    step = simulate_step(job, interference=interference(), fidelity="kernel", explain=True)
    assert step.explanation is not None
    longest = max(step.step_time_s, sum(step.explanation.critical_path_s.values()))
    assert sum(step.explanation.critical_path_s.values()) == pytest.approx(longest, rel=1e-9)
    assert sum(step.explanation.critical_path_stages_s) == pytest.approx(longest, rel=1e-9)
    slowed_s = sum(step.classes[step.critical_class].slowed_s.values())
    assert slowed_s == pytest.approx(step.breakdown["interference_s"], abs=1e-9 * step.step_time_s)
    for split, times in zip(step.explanation.bubbles, step.classes, strict=True):
        parts = (split.warm_up_s, split.steady_s, split.cool_down_s)
        assert min(parts) >= -1e-9
        assert sum(parts) == pytest.approx(times.exposed_s["bubble"], rel=1e-6, abs=1e-6 * step.step_time_s)


def test_bubbles_of_1f1b_lie_at_both_ends() -> None:
    explanation, step_time_s = explained(equal_stages_job(num_stages=4, num_micro_batches=8))
    first, last = explanation.bubbles[0], explanation.bubbles[-1]
    assert (first.warm_up_s, first.steady_s, first.cool_down_s) == pytest.approx((6.0, 0.0, 3.0), abs=1e-9)
    assert (last.warm_up_s, last.steady_s, last.cool_down_s) == pytest.approx((3.0, 0.0, 0.0), abs=1e-9)
    assert explanation.critical_path_s == pytest.approx({"gemm": step_time_s})


def test_a_transfer_on_the_path_is_named() -> None:
    explanation, step_time_s = explained(equal_stages_job(num_stages=2, num_micro_batches=1, send_s=0.5))
    assert explanation.critical_path_s == pytest.approx({"gemm": 6.0, "pipeline": 1.0})
    assert np.sum(explanation.critical_path_stages_s) == pytest.approx(step_time_s)


def test_transfers_of_the_optimizer_phase_are_told_by_axis() -> None:
    job = equal_stages_job(num_stages=2, num_micro_batches=2, forward=[("context", 0.25), ("gemm", 1.0)])
    end = [("embedding", 0.5), ("sync", 0.125), ("model", 0.25), ("optimizer", 1.0), ("data", 2.0)]
    job = replace(job, stages=tuple(replace(stage, epilogue=timed_graph(end)) for stage in job.stages))
    step = simulate_step(job, interference=interference(), fidelity="kernel", explain=True)
    assert step.explanation is not None
    expected = {"tensor": 0.125, "data": 2.0, "embedding": 0.5, "model": 0.25}
    assert step.explanation.optimizer_transfers_s == (expected, expected)
    assert step.classes[0].exposed_s["context"] == pytest.approx(0.5)
    assert step.classes[0].exposed_s["pipeline"] == pytest.approx(0.75)


def test_a_wait_for_a_fuller_rank_on_the_critical_path_is_no_host_time() -> None:
    """Loads that are fuller by turns: each waits 1 s for the other in every pass, and no host has anything to do."""
    rows = [[("gemm", 2.0 - k), ("exchange", 0.5), ("gemm", 1.0 + k), ("exchange", 0.5)] for k in (0, 1)]
    jobs = [equal_stages_job(num_stages=1, num_micro_batches=3, forward=r, backward=r) for r in rows]
    other = ReplicaKind(label="other", stages=jobs[1].stages)
    job = with_unlike_replicas(
        replace(jobs[0], stages=(replace(jobs[0].stages[0], multiplicity=2),)), [other], [0, 1], replicas_per_exchange=2
    )
    explanation, step_time_s = explained(job)
    assert step_time_s == pytest.approx(6 * 5.0)
    assert explanation.critical_path_s == pytest.approx({"gemm": 18.0, "expert": 6.0, "wait": 6.0})
