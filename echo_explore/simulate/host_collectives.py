"""What a collective takes the host beyond the operator that starts it."""

from collections.abc import Callable

from echo_explore.graph import Axis
from echo_explore.specs import StackProfile
from echo_explore.topology import GroupShape

CHECK_S_PER_RANK = 0.30e-3
"""A check of TORCH_DISTRIBUTED_DEBUG=DETAIL, by ranks of the group: 0.28 to 0.32 ms a rank of 4 and 8, 0.29 to 0.45
of 2 and 3, on 2 shared x86-64 cores (Zen 3, torch 2.13); scripts/bench_host_checks.py, 2026-12-01. PyTorch's
ProcessGroupWrapper (2.1 to 2.13) runs a monitored barrier and two gathers over Gloo, a message a rank each."""


def collective_seconds(
    stack: StackProfile, shape_of: Callable[[Axis], GroupShape], *, factor: float
) -> tuple[float, ...]:
    """(num_axes,) Seconds by code of `Axis`; empty where they are nothing.

    # Approximation: all ranks come to a check at a time, so none waits for another there (under-estimates).

    Args:
        stack: what runs.
        shape_of: where the groups of an axis lie.
        factor: on all of them; 0 with CUDA graphs.
    """
    if factor == 0.0 or (stack.host_collective_s == 0.0 and not stack.collective_checks):
        return ()
    return tuple(factor * _seconds(stack, shape_of, axis) for axis in Axis)


def _seconds(stack: StackProfile, shape_of: Callable[[Axis], GroupShape], axis: Axis) -> float:
    num_ranks = 1 if axis in (Axis.NONE, Axis.HOST) else shape_of(axis).num_ranks
    if num_ranks == 1:
        return 0.0
    return stack.host_collective_s + (num_ranks * CHECK_S_PER_RANK if stack.collective_checks else 0.0)
