"""Gradient buckets against an allocator that lays out single elements, and published sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.simulate.buckets import (
    BUCKET_ALIGNMENT,
    PARAMETER_ALIGNMENT,
    Bucket,
    bucket_layout,
    default_bucket_elements,
)

FREE = -1


def _element_by_element(
    sizes: list[int], group_size: int, *, sharded: bool, limit: int | None, own: frozenset[int]
) -> list[list[int]]:
    """The owner of every element of every bucket: parameters from the last to the first, `FREE` where padded."""
    done: list[list[int]] = []
    buffer: list[int] = []  # the whole buffer, so that alignments count from its start
    opened_at = 0

    def close() -> None:
        nonlocal opened_at
        while sharded and len(buffer) % math.lcm(group_size, BUCKET_ALIGNMENT):
            buffer.append(FREE)
        done.append(buffer[opened_at:])
        opened_at = len(buffer)

    for index in reversed(range(len(sizes))):
        while sharded and len(buffer) % PARAMETER_ALIGNMENT:
            buffer.append(FREE)
        alone = sharded and index in own
        if alone and any(owner != FREE for owner in buffer[opened_at:]):
            close()
        buffer += [index] * sizes[index]
        if alone or (limit is not None and len(buffer) - opened_at >= limit):
            close()
    if any(owner != FREE for owner in buffer[opened_at:]):
        close()
    return done


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    group_size=st.sampled_from([1, 2, 3, 5, 8]),
    sharded=st.booleans(),
    limit=st.none() | st.integers(1, 900),
    own=st.frozensets(st.integers(0, 7), max_size=2),
)
def test_equals_a_layout_element_by_element(
    sizes: list[int], group_size: int, sharded: bool, limit: int | None, own: frozenset[int]
) -> None:
    buckets = bucket_layout(
        sizes, group_size=group_size, distributed_optimizer=sharded, bucket_elements=limit, own_bucket=own
    )
    owners = _element_by_element(sizes, group_size, sharded=sharded, limit=limit, own=own)
    assert [bucket.num_elements for bucket in buckets] == [len(elements) for elements in owners]
    for bucket, elements in zip(buckets, owners, strict=True):
        members = set(elements) - {FREE}
        assert (bucket.first, bucket.last) == (min(members), max(members))
        assert members == set(range(bucket.first, bucket.last + 1))
    assert [i for b in buckets for i in range(b.last, b.first - 1, -1)] == list(reversed(range(len(sizes))))
    if sharded:
        assert all(bucket.num_elements % group_size == 0 for bucket in buckets)


def test_no_parameters_need_no_bucket() -> None:
    assert bucket_layout([], group_size=4, distributed_optimizer=True, bucket_elements=None) == ()


def test_without_sharding_nothing_is_padded() -> None:
    (bucket,) = bucket_layout([3, 5, 7], group_size=8, distributed_optimizer=False, bucket_elements=None)
    assert bucket == Bucket(num_elements=15, first=0, last=2)


def test_shared_embedding_is_alone() -> None:
    buckets = bucket_layout(
        [1000, 10, 10], group_size=2, distributed_optimizer=True, bucket_elements=None, own_bucket=frozenset({0})
    )
    assert buckets == (Bucket(num_elements=128, first=1, last=2), Bucket(num_elements=1024, first=0, last=0))


@pytest.mark.parametrize(("data_parallel", "elements"), [(1, 40_000_000), (40, 40_000_000), (64, 64_000_000)])
def test_buckets_grow_with_the_replicas(data_parallel: int, elements: int) -> None:
    """max(40 M, 1 M a replica) [megatron-core 0.16.1, distributed_data_parallel.py, 2026-11-30]."""
    assert default_bucket_elements(data_parallel, 40_000_000) == elements
