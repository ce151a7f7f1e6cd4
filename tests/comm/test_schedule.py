import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_explore.comm.schedule import collective_plan
from echo_explore.core import SpecError

ALGORITHMS = st.sampled_from(["ring", "tree", "nvls", "nvls-tree", "collnet", "pat", "direct", "chain"])
PROTOCOLS = st.sampled_from(["LL", "LL128", "Simple"])


@settings(deadline=None)
@given(ALGORITHMS, PROTOCOLS, st.floats(1, 2**36), st.integers(2, 1024))
def test_chunks_cover_the_message(algorithm: str, protocol: str, size: float, ranks: int) -> None:
    plan = collective_plan(algorithm, protocol, size, num_ranks=ranks, architecture="hopper")
    parts = ranks if algorithm in ("ring", "pat") else 1
    assert plan.num_channels * plan.chunk_bytes * plan.num_loops * parts >= size * (1 - 1e-9)
    assert 1 <= plan.num_sms <= 32
    assert 0 < plan.slice_bytes <= plan.chunk_bytes
    assert plan.slice_bytes * plan.pipeline_depth == pytest.approx(plan.chunk_bytes)


@settings(deadline=None)
@given(ALGORITHMS, PROTOCOLS, st.floats(1, 2**36), st.floats(1, 2**36))
def test_larger_messages_take_no_fewer_sms(algorithm: str, protocol: str, one: float, other: float) -> None:
    small, large = (
        collective_plan(algorithm, protocol, size, num_ranks=8, architecture="ampere").num_sms
        for size in sorted((one, other))
    )
    assert small <= large


def test_a_large_ring_under_simple_moves_chunks_of_2_mib_in_slices_of_1_mib() -> None:
    # NCCL 2.18: buffers of 4 MiB in 8 steps, chunks of 4 steps, slices of 2.
    plan = collective_plan("ring", "Simple", 2**32, num_ranks=8, architecture="ampere")
    assert (plan.chunk_bytes, plan.slice_bytes, plan.num_channels) == (2**21, 2**20, 24)


def test_small_messages_use_one_channel_and_fewer_threads() -> None:
    # 1 KiB under LL on 8 ranks: 512 threads * 8 B * 8 ranks = 32 KiB a channel, so one channel, threads halved.
    plan = collective_plan("ring", "LL", 1024, num_ranks=8, architecture="hopper")
    assert plan.num_channels == 1
    assert plan.num_threads < 512


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SpecError, match="protocol = 'LL64'"):
        collective_plan("ring", "LL64", 1.0, num_ranks=2, architecture="hopper")
    with pytest.raises(SpecError, match="architecture = 'kepler'"):
        collective_plan("ring", "LL", 1.0, num_ranks=2, architecture="kepler")
