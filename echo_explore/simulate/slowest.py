"""The slowest of a job's GPUs, at whose pace a synchronous step runs."""

from statistics import NormalDist
from typing import Final

import numpy as np

from echo_explore.graph import ExecutionGraph, OpClass
from echo_explore.graph.execution_graph import Floats

CLOCK_BOUND: Final = (OpClass.GEMM, OpClass.GROUPED_GEMM, OpClass.CONVOLUTION, OpClass.ATTENTION)
"""Classes at the pace of the matrix units' clock; the others wait for memory, whose clock is the same everywhere."""


def expected_maximum(num_gpus: int) -> float:
    """Expected largest of `num_gpus` (>= 1) independent standard normal numbers; 0 for one, rising without bound.

    The quantile at (n - 3/8) / (n + 1/4), within 0.03 of the exact value.

    References:
        Blom, Statistical Estimates and Transformed Beta-Variables (1958), section 6.9.
    """
    return NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25))


def slowest_factor(num_gpus: int, clock_spread_fraction: float) -> float:
    """How many times as long a clock-bound kernel takes on the slowest of `num_gpus` GPUs as on the mean one.

    1 / (1 - s m(n)): clocks are normal around their mean with a standard deviation of s times it, m(n) of
    `expected_maximum` below the mean is the slowest of n.

    # Approximation: GPUs of one job are independent; those of one host share its air, which makes the slowest of few
    # hosts slower than this (under-estimates). No outliers: operators drain GPUs that are far behind.
    # Approximation: every GPU keeps the pace of the slowest. In a pipeline only its own stage does, so that the
    # warm-up and cool-down of the others is over-estimated, by s m(n) of the bubble at most.

    References:
        Sinha et al., Not All GPUs Are Created Equal, SC 2022 (arXiv 2208.11035): clocks under a power limit differ
        between GPUs of one kind, and steps of several GPUs wait for the slowest.
    """
    return 1.0 / (1.0 - clock_spread_fraction * expected_maximum(num_gpus))


def straggler_fraction(graph: ExecutionGraph, factor: float) -> Floats:
    """(num_ops,) Share of each row's time that the slowest GPU takes longer: 1 - 1 / factor of clock-bound kernels.

    # Approximation: products so thin that memory bounds them are taken to follow the clock (over-estimates).
    """
    return np.where(np.isin(graph.op_class, CLOCK_BOUND) & graph.is_compute, 1.0 - 1.0 / factor, 0.0)
