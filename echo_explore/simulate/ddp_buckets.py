"""Gradient buckets as torch's DistributedDataParallel assigns them (torch 2.13, csrc/distributed/c10d/reducer.cpp)."""

from collections.abc import Sequence


def ddp_buckets(
    parameter_bytes: Sequence[int], *, first_bytes: float, others_bytes: float
) -> tuple[tuple[int, ...], ...]:
    """Indices of the parameters of each bucket, in launch order.

    Gradients become ready from the last parameter to the first, and after the first iteration the reducer rebuilds its
    buckets in that order; a bucket is closed when it holds at least its limit, the first one early.

    Args:
        parameter_bytes: bytes of the gradient of each parameter, in module order; all of one type.
        first_bytes: limit of the first bucket.
        others_bytes: limit of the others.
    """
    buckets: list[tuple[int, ...]] = []
    members: list[int] = []
    size, limit = 0, first_bytes
    for index in range(len(parameter_bytes) - 1, -1, -1):
        members.append(index)
        size += parameter_bytes[index]
        if size >= limit:
            buckets.append(tuple(members))
            members, size, limit = [], 0, others_bytes
    if members:
        buckets.append(tuple(members))
    return tuple(buckets)
