"""Mutual slowdown of a kernel and a collective: nothing asked is nothing lost, and asking for more never helps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.interference.coefficients import SharingCoefficients, shipped_coefficients
from echo_explore.interference.contention import collective_slowdown, kernel_slowdown, memory_fraction
from echo_explore.interference.loads import Chip, KernelLoads, Traffic

CHIP = Chip(num_sms=108, memory_bandwidth_bytes_per_s=2e12, l2_bandwidth_bytes_per_s=7e12)
RING = Traffic(num_channels=24, link_bytes_per_s=2e11, link_peak_bytes_per_s=3e11, burst_bytes=2.0**22)


def kernels(
    memory: float,
    arithmetic: float,
    blocks: float,
    *,
    l2: float = 0.0,
    time_s: float = 1e-4,
    per_sm: float = 2.0,
    fixed: bool = False,
) -> KernelLoads:
    """One kernel."""
    return KernelLoads(
        time_s=np.array([time_s]),
        memory_fraction=np.array([memory]),
        l2_fraction=np.array([l2]),
        arithmetic_fraction=np.array([arithmetic]),
        num_blocks=np.array([blocks]),
        blocks_per_sm=np.array([per_sm]),
        fixed_grid=np.array([fixed]),
    )


@st.composite
def any_kernel(draw: st.DrawFn) -> KernelLoads:
    """A kernel of any kind."""
    share = st.floats(0, 1)
    return kernels(
        draw(share), draw(share), draw(st.integers(1, 10**6)), l2=draw(share), time_s=draw(st.floats(1e-6, 1.0))
    )


@given(any_kernel())
def test_an_idle_copy_engine_slows_nothing(load: KernelLoads) -> None:
    idle = Traffic(num_channels=0, link_bytes_per_s=0.0, link_peak_bytes_per_s=3e11, burst_bytes=0.0)
    sharing = shipped_coefficients().sharing
    assert kernel_slowdown(load, idle, CHIP, sharing) == pytest.approx([1.0])
    assert collective_slowdown(load, idle, CHIP, sharing) == pytest.approx([1.0])


@given(any_kernel(), st.integers(1, 80))
def test_factors_are_at_least_one_and_grow_with_traffic(load: KernelLoads, num_channels: int) -> None:
    sharing = shipped_coefficients().sharing
    some = replace(RING, num_channels=num_channels)
    more = replace(some, num_channels=num_channels + 8, link_bytes_per_s=2.5e11)
    assert kernel_slowdown(load, some, CHIP, sharing)[0] >= 1.0
    assert kernel_slowdown(load, more, CHIP, sharing)[0] >= kernel_slowdown(load, some, CHIP, sharing)[0] - 1e-12
    assert collective_slowdown(load, some, CHIP, sharing)[0] >= 1.0


def test_few_blocks_suffer_more_than_many() -> None:
    """Norm weight gradients: a block that waits behind the link holds the whole kernel; of many, others take over."""
    sharing = shipped_coefficients().sharing
    few, many = kernels(0.5, 0.0, 24.0), kernels(0.5, 0.0, 1e6)
    assert kernel_slowdown(few, RING, CHIP, sharing)[0] > 1.05
    assert kernel_slowdown(many, RING, CHIP, sharing)[0] < 1.01


@given(st.floats(1e-6, 1e-2), st.floats(0, 2.0**26))
def test_the_backlog_never_outlasts_the_burst(time_s: float, burst_bytes: float) -> None:
    load = kernels(0.3, 0.0, 24.0, time_s=time_s)
    traffic = replace(RING, burst_bytes=burst_bytes)
    factor = kernel_slowdown(load, traffic, CHIP, shipped_coefficients().sharing)[0]
    assert (factor - 1) * time_s <= burst_bytes / RING.link_bytes_per_s + 1e-12


def test_a_resident_grid_that_no_longer_fits_runs_twice() -> None:
    sharing = shipped_coefficients().sharing
    persistent = kernels(0.3, 0.5, 108.0, per_sm=1.0, fixed=True)
    assert kernel_slowdown(persistent, RING, CHIP, sharing) == pytest.approx([2.0])
    assert kernel_slowdown(kernels(0.3, 0.5, 84.0, per_sm=1.0, fixed=True), RING, CHIP, sharing) == pytest.approx([1.0])


def test_products_run_on_the_sms_that_are_left() -> None:
    factor = kernel_slowdown(kernels(0.3, 0.8, 1e6, time_s=1e-2), RING, CHIP, shipped_coefficients().sharing)[0]
    assert factor == pytest.approx(108 / 84)


def test_exclusive_channels_confine_streaming_kernels_too() -> None:
    sharing = shipped_coefficients().sharing
    alone = replace(RING, link_bytes_per_s=0.0)
    assert kernel_slowdown(kernels(0.5, 0.0, 1e6), alone, CHIP, sharing) == pytest.approx([1.0])
    confined = kernel_slowdown(kernels(0.5, 0.0, 1e6), replace(alone, exclusive=True), CHIP, sharing)
    assert confined == pytest.approx([108 / 84])


def test_a_collective_shares_an_sm_with_products_and_waits_for_their_first_blocks() -> None:
    sharing = shipped_coefficients().sharing
    product = kernels(0.3, 0.8, 1e6, time_s=1e-2)
    long, short = (collective_slowdown(product, replace(RING, time_s=t), CHIP, sharing)[0] for t in (1.0, 1e-5))
    assert long == pytest.approx(RING.activity / 0.6, rel=1e-3)
    assert short > long


def test_memory_is_shared() -> None:
    sharing = shipped_coefficients().sharing
    share = memory_fraction(RING, CHIP, sharing)
    assert share == pytest.approx(2 * 2e11 / 2e12)
    engine = replace(RING, num_channels=0)
    assert kernel_slowdown(kernels(0.95, 0.0, 1e6), engine, CHIP, sharing)[0] == pytest.approx(0.95 + share)


def test_the_l2_cache_is_shared_where_it_is_shorter_than_memory() -> None:
    sharing = shipped_coefficients().sharing
    engine = replace(RING, num_channels=0)
    share = memory_fraction(RING, CHIP, sharing) * 2e12 / 7e12
    for slowdown in (kernel_slowdown, collective_slowdown):
        assert slowdown(kernels(0.3, 0.0, 1e6, l2=1.0), engine, CHIP, sharing)[0] == pytest.approx(1.0 + share)
        assert slowdown(kernels(0.3, 0.0, 1e6, l2=0.5), engine, CHIP, sharing)[0] == 1.0


def test_a_share_is_not_negative() -> None:
    with pytest.raises(SpecError, match=r"sharing.packets_ahead = -1.0: must be finite and not negative"):
        SharingCoefficients(packets_ahead=-1.0, memory_bytes_per_link_byte=2.0)
