"""Collectives of two communicators run beside each other, those of one in order."""

from dataclasses import replace

import pytest

from echo_explore.graph import Axis, Collective
from echo_explore.testing.strategies import Item, equal_stages_job, interference
from echo_explore.timeline import GradientBucket, PipelineJob, SharedLinks, simulate_step

NONE = interference()


def _two_buckets(**options: object) -> PipelineJob:
    """A last backward of 4 s in four kernels; buckets of dense layers and of experts, ready after the first."""
    buckets = tuple(
        GradientBucket(
            collective=Collective.REDUCE_SCATTER,
            message_bytes=1.0,
            time_s=5.0,
            sigma_log=0.0,
            ready_after=0,
            axis=axis,
        )
        for axis in (Axis.DATA, Axis.EXPERT_DATA, Axis.DATA)
    )
    return equal_stages_job(num_stages=1, num_micro_batches=1, backward=[("gemm", 1.0)] * 4, buckets=buckets, **options)  # type: ignore[arg-type]


def test_communicators_run_beside_each_other_and_each_in_order() -> None:
    """The forward takes 1 s, then the first kernel 1 s: two buckets of one communicator in 10 s, the other's in 5."""
    job = _two_buckets()
    assert simulate_step(job, interference=NONE, fidelity="kernel").step_time_s == pytest.approx(1 + 1 + 10)
    shared = SharedLinks(first=Axis.DATA, second=Axis.EXPERT_DATA, first_slowdown=2.0, second_slowdown=2.0)
    both = replace(job, shared_links=(shared,))
    assert simulate_step(both, interference=NONE, fidelity="kernel").step_time_s == pytest.approx(1 + 1 + 15)


def test_without_overlap_communicators_follow_one_another() -> None:
    job = _two_buckets(overlap_data=False)
    assert simulate_step(job, interference=NONE, fidelity="kernel").step_time_s == pytest.approx(1 + 4 + 15)


def test_a_collective_over_expert_ranks_runs_beside_one_over_tensor_ranks() -> None:
    forward: list[Item] = [("gemm", 1.0), ("async", 4.0), ("expert tensor", 3.0), ("exchange", 2.0), ("wait", 0.0)]
    job = equal_stages_job(num_stages=1, num_micro_batches=1, forward=forward, backward=[("gemm", 0.0)])
    assert simulate_step(job, interference=NONE, fidelity="kernel").step_time_s == pytest.approx(1 + 3 + 2)
