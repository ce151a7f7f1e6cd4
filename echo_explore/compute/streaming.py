"""Seconds of kernels that only move bytes: t = floor + bytes / (B e), e the share of bandwidth B that a class reaches.

# Approximation: tensors that still lie in the L2 cache are read faster than this says; over-estimates small chains.
"""

from dataclasses import dataclass

from echo_explore.compute.gemm import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCoefficients:
    """What one class of kernels on one device needs.

    Attributes:
        launch_floor_s: shortest time of such a kernel on the GPU.
        bandwidth_fraction: e in the forward.
        backward_bandwidth_fraction: e in the backward, over the bytes that the backward moves.
        sigma_log: standard deviation of the log of measured over predicted.
    """

    launch_floor_s: float
    bandwidth_fraction: float
    backward_bandwidth_fraction: float
    sigma_log: float


def stream_time_s(
    num_bytes: Floats, floor_s: float, bandwidth_fraction: Floats, bandwidth_bytes_per_s: float
) -> Floats:
    """(num_rows,) seconds; see the module."""
    return floor_s + num_bytes / (bandwidth_bytes_per_s * bandwidth_fraction)
