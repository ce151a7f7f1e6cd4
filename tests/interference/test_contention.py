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

CHIP = Chip(num_sms=108, memory_bandwidth_bytes_per_s=2e12)
RING = Traffic(num_channels=24, link_bytes_per_s=2e11, link_peak_bytes_per_s=3e11, chunk_bytes=2.0**19)


def kernels(memory: float, arithmetic: float, blocks: float, *, time_s: float = 1e-4) -> KernelLoads:
    """One kernel."""
    return KernelLoads(
        time_s=np.array([time_s]),
        memory_fraction=np.array([memory]),
        arithmetic_fraction=np.array([arithmetic]),
        num_blocks=np.array([blocks]),
        threads_per_block=np.array([256.0]),
    )


@st.composite
def any_kernel(draw: st.DrawFn) -> KernelLoads:
    """A kernel of any kind."""
    share = st.floats(0, 1)
    return kernels(draw(share), draw(share), draw(st.integers(1, 10**6)), time_s=draw(st.floats(1e-6, 1.0)))


@given(any_kernel())
def test_an_idle_copy_engine_slows_nothing(load: KernelLoads) -> None:
    idle = Traffic(num_channels=0, link_bytes_per_s=0.0, link_peak_bytes_per_s=3e11, chunk_bytes=0.0)
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
    """Norm weight gradients: every block is resident, and the one beside a channel ends last."""
    sharing = shipped_coefficients().sharing
    few, many = kernels(0.3, 0.0, 100.0), kernels(0.3, 0.0, 1e6)
    few = replace(few, threads_per_block=np.array([1024.0]))
    many = replace(many, threads_per_block=np.array([1024.0]))
    assert kernel_slowdown(few, RING, CHIP, sharing)[0] > 2 * kernel_slowdown(many, RING, CHIP, sharing)[0]


def test_large_products_hardly_slow_down() -> None:
    factor = kernel_slowdown(kernels(0.3, 0.8, 1e6, time_s=1e-2), RING, CHIP, shipped_coefficients().sharing)[0]
    assert 1.0 <= factor < 1.1


def test_memory_is_shared() -> None:
    sharing = replace(shipped_coefficients().sharing, queued_bytes=0.0)
    share = memory_fraction(RING, CHIP, sharing)
    assert share == pytest.approx(2 * 2e11 / 2e12)
    engine = replace(RING, num_channels=0)
    assert kernel_slowdown(kernels(0.95, 0.0, 1e6), engine, CHIP, sharing)[0] == pytest.approx(0.95 + share)


def test_a_channel_leaves_something_of_its_sm() -> None:
    with pytest.raises(SpecError, match=r"sharing.copying_path_fraction = 1\.1.*: polling and copying take a whole SM"):
        SharingCoefficients(
            polling_path_fraction=0.8,
            copying_path_fraction=0.3,
            issue_fraction=0.0,
            memory_bytes_per_link_byte=2.0,
            queued_bytes=0.0,
        )
