"""Ranks that are slower than the others, and passes that take longer by chance."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph.execution_graph import Floats
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.layout import NUM_KINDS
from echo_explore.timeline.replicas import slowed_kernels


def with_slow_ranks(job: PipelineJob, factors: Mapping[int, float]) -> PipelineJob:
    """The job with a rank in each of these stages whose kernels take so many times as long.

    Ranks of its stage that it shares collectives with wait for it there, and so do the data-parallel replicas without
    a slow rank at the reductions of gradients: the step is that of the replica with the slow ranks.

    # Approximation: all slow ranks are in one data-parallel replica (over-estimates where several replicas have one).

    Args:
        job: the step.
        factors: time of kernels over that of a healthy rank, 1 or more, by stage.

    Raises:
        SpecError: a stage that the job does not have, a factor below 1 or not finite.
    """
    num_stages = len(job.stages)
    for stage, factor in factors.items():
        if not 0 <= stage < num_stages:
            raise SpecError("slow_rank", stage, f"the job has stages 0..{num_stages - 1}", "name one of them")
        if not 1.0 <= factor < np.inf:
            raise SpecError("slow_rank", factor, "the factor must be 1 or more, and finite", f"write {stage}:1.2")
    return replace(job, stages=slowed_kernels(job.stages, factors))


def jitter_factors(job: PipelineJob) -> Floats:
    """(num_ranks, NUM_KINDS, num_chunks, num_micro_batches) How many times as long a pass takes by chance.

    exp(sigma |z|), z standard normal: chance only delays, so that lower bounds stay bounds. The same seed gives the
    same draws.
    """
    shape = (len(job.classes), NUM_KINDS, len(job.stages[0].chunks), job.num_micro_batches)
    draws = np.random.default_rng(job.jitter_seed).standard_normal(shape)
    return np.exp(job.jitter_sigma_log * np.abs(draws))
