"""Gradient buckets as Megatron lays them out (megatron-core 0.16.1, distributed/param_and_grad_buffer.py)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARAMETER_ALIGNMENT = 64
"""Elements that a parameter's start is padded to, distributed optimizer only [megatron-core 0.16.1, 2026-11-30]."""
BUCKET_ALIGNMENT = 128
"""Elements of which a bucket's end is a multiple, with the group size, likewise [megatron-core 0.16.1, 2026-11-30]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One bucket.

    Attributes:
        num_elements: padded size.
        first: index of the last parameter put in, in module order (its gradient comes last in the backward).
        last: index of the first parameter put in.
        expert: of routed experts, which are reduced over the expert-data group.
    """

    num_elements: int
    first: int
    last: int
    expert: bool = False


def default_bucket_elements(data_parallel: int, configured: int) -> int:
    """Elements after which Megatron closes a bucket when gradients overlap: max(configured, 1e6 * data_parallel)."""
    return max(configured, 1_000_000 * data_parallel)


def bucket_layout(
    num_elements: Sequence[int],
    *,
    group_size: int,
    distributed_optimizer: bool,
    bucket_elements: int | None,
    own_bucket: frozenset[int] = frozenset(),
) -> tuple[Bucket, ...]:
    """Buckets in launch order: parameters are taken from the last to the first.

    Args:
        num_elements: elements of each parameter, in module order.
        group_size: ranks that reduce together.
        distributed_optimizer: pads starts and ends so that shards are equal.
        bucket_elements: a bucket is closed when it holds at least this many; None: one bucket.
        own_bucket: indices of shared embeddings, each a bucket of its own under the distributed optimizer.
    """

    def padded(value: int, unit: int) -> int:
        return -(-value // unit) * unit if distributed_optimizer else value

    unit = math.lcm(group_size, BUCKET_ALIGNMENT)
    buckets: list[Bucket] = []
    start = end = 0
    members: list[int] = []

    def close(at: int) -> int:
        nonlocal start, members
        stop = padded(at, unit)
        buckets.append(Bucket(num_elements=stop - start, first=min(members), last=max(members)))
        start, members = stop, []
        return stop

    for index in range(len(num_elements) - 1, -1, -1):
        alone = distributed_optimizer and index in own_bucket
        begin = padded(end, PARAMETER_ALIGNMENT)
        if alone and members:
            begin = close(begin)
        end = begin + num_elements[index]
        members.append(index)
        if alone or (bucket_elements is not None and end - start >= bucket_elements):
            end = close(end)
    if members:
        close(end)
    return tuple(buckets)
