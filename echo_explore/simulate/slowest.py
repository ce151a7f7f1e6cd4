"""The slowest of a job's GPUs, at whose pace a synchronous step runs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

from echo_explore.graph import OpClass, TimedGraph
from echo_explore.timeline import PipelineJob
from echo_explore.timeline.job import StageJob
from echo_explore.timeline.replicas import changed_graphs

CLOCK_BOUND: Final = (OpClass.GEMM, OpClass.GROUPED_GEMM, OpClass.CONVOLUTION, OpClass.ATTENTION)
"""Classes at the pace of the matrix units' clock; the others wait for memory, whose clock is the same everywhere."""
_NORMAL = NormalDist()
_HALVINGS = 40
"""Of the bisection: 2^-40 of a factor of at most 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What a stage does for one micro-batch on mean GPUs.

    Attributes:
        num_gpus: GPUs of the stage in all replicas.
        clock_s: seconds of clock-bound kernels.
        other_s: seconds of all else that follows one another.
    """

    num_gpus: int
    clock_s: float
    other_s: float


def _quantile(num_gpus: int) -> float:
    """Of one normal number, where the largest of `num_gpus` is expected."""
    return (num_gpus - 0.375) / (num_gpus + 0.25)


def expected_maximum(num_gpus: int) -> float:
    """Expected largest of `num_gpus` (>= 1) independent standard normal numbers; 0 for one, rising without bound.

    The quantile at (n - 3/8) / (n + 1/4), within 0.03 of the exact value.

    References:
        Blom, Statistical Estimates and Transformed Beta-Variables (1958), section 6.9.
    """
    return _NORMAL.inv_cdf(_quantile(num_gpus))


def slowest_factor(num_gpus: int, clock_spread_fraction: float) -> float:
    """How many times as long a clock-bound kernel takes on the slowest of `num_gpus` GPUs as on the mean one.

    1 / (1 - s m(n)): clocks are normal around their mean with a standard deviation of s times it, m(n) of
    `expected_maximum` below the mean is the slowest of n.

    # Approximation: GPUs of one job are independent; those of one host share its air, which makes the slowest of few
    # hosts slower than this (under-estimates). No outliers: operators drain GPUs that are far behind.

    References:
        Sinha et al., Not All GPUs Are Created Equal, SC 2022 (arXiv 2208.11035): clocks under a power limit differ
        between GPUs of one kind, and steps of several GPUs wait for the slowest.
    """
    return 1.0 / (1.0 - clock_spread_fraction * expected_maximum(num_gpus))


def pace_factor(stages: Mapping[StageWork, int], clock_spread_fraction: float) -> float:
    """How many times as long clock-bound kernels take at the pace of the slowest stage, from 1 up.

    A stage is as slow as the slowest of its GPUs, a pipeline as its slowest stage: a slow GPU in a stage with time to
    spare holds nobody up. T solves prod_s P(c_s F_s + r_s <= T) = P(largest of N <= m(N)), F_s the slowest of the n_s
    GPUs of stage s, N all of them; the factor is min_s (T - r_s) / c_s, so that no stage takes longer than T. Equal
    stages give `slowest_factor` of N, never less than that of the largest stage alone.

    Args:
        stages: distinct stages and how many there are of each.
        clock_spread_fraction: s of `slowest_factor`.
    """
    work = {stage: count for stage, count in stages.items() if stage.clock_s > 0}
    if not work or clock_spread_fraction == 0.0:
        return 1.0
    num_gpus = sum(stage.num_gpus * count for stage, count in work.items())
    longest = slowest_factor(num_gpus, clock_spread_fraction)
    if len(work) == 1:
        return longest
    target = num_gpus * math.log(_quantile(num_gpus))

    def log_probability(pace_s: float) -> float:
        total = 0.0
        for stage, count in work.items():
            left_s = pace_s - stage.other_s
            z = (1.0 - stage.clock_s / left_s) / clock_spread_fraction if left_s > 0 else -math.inf
            total += stage.num_gpus * count * math.log(max(_NORMAL.cdf(z), 1e-300))
        return total

    low = max(stage.clock_s + stage.other_s for stage in work)
    high = max(stage.clock_s * longest + stage.other_s for stage in work)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if log_probability(middle) >= target else (middle, high)
    return max(1.0, min((high - stage.other_s) / stage.clock_s for stage in work))


def at_the_slowest_pace(job: PipelineJob, clock_spread_fraction: float, straggler_factor: float = 1.0) -> PipelineJob:
    """The job with clock-bound kernels as long as at the pace of its slowest GPU.

    # Approximation: every stage keeps that pace, also while it warms up and cools down (over-estimates, by that share
    # of the bubble at most).

    Args:
        job: the step on mean GPUs.
        clock_spread_fraction: of the device.
        straggler_factor: on what the slowest takes longer (`--what-if stragglers=`).
    """
    alone = pace_factor(Counter(_work(stage) for stage in job.stages), clock_spread_fraction)
    factor = 1.0 + (alone - 1.0) * straggler_factor
    if factor == 1.0:
        return job
    return replace(job, stages=changed_graphs(job.stages, lambda timed: held_up(timed, factor)))


def held_up(timed: TimedGraph, factor: float) -> TimedGraph:
    """The rows with clock-bound kernels `factor` times as long, and told so.

    # Approximation: products so thin that memory bounds them are taken to follow the clock (over-estimates).
    """
    rows = clock_bound(timed)
    return replace(
        timed,
        time_s=np.where(rows, timed.time_s * factor, timed.time_s),
        straggler_fraction=np.where(rows, 1.0 - 1.0 / factor, 0.0),
    )


def clock_bound(timed: TimedGraph) -> npt.NDArray[np.bool_]:
    """(num_ops,) Kernels that follow the clock of the matrix units."""
    graph = timed.graph
    return np.isin(graph.op_class, CLOCK_BOUND) & graph.is_compute


def _work(stage: StageJob) -> StageWork:
    clock_s = other_s = 0.0
    for timed in (graph for chunk in stage.chunks for graph in (chunk.forward, chunk.backward)):
        rows, beside = clock_bound(timed), timed.graph.is_collective & timed.graph.asynchronous
        clock_s += float(timed.time_s[rows].sum())
        other_s += float(timed.time_s[~rows & ~beside].sum())
    return StageWork(num_gpus=stage.multiplicity, clock_s=clock_s, other_s=other_s)
