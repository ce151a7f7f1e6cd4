import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from echo_explore.calibration import collective_vectors as v
from echo_explore.calibration.collective_fit import _polished
from echo_explore.comm.coefficients import LL128_SHARE, LL_SHARE
from echo_explore.comm.paths import Floats

ANYTHING = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(0.0, 30.0, 24))


def test_starts_survive_the_way_to_a_vector_and_back() -> None:
    ring = v.ring_from(v.ring_vector(v.START_RING))
    assert_allclose(ring.hop_factor, v.START_RING.hop_factor)
    assert_allclose(ring.launch_s, v.START_RING.launch_s)
    assert_allclose(ring.efficiency, v.START_RING.efficiency, rtol=1e-6)
    network = v.network_from(v.network_vector(v.START_NETWORK, 0.4), v.START_NETWORK)
    assert_allclose(network.hop_factor, v.START_NETWORK.hop_factor)
    assert network.tree_efficiency == pytest.approx(v.START_NETWORK.tree_efficiency)
    assert network.rail_efficiency == pytest.approx(v.START_NETWORK.rail_efficiency)
    assert v.tree_efficiency_from(v.network_vector(v.START_NETWORK, 0.4)) == pytest.approx(0.4)
    pairs = v.pair_from(v.pair_vector(v.START_PAIRS))
    assert_allclose(pairs.efficiency, v.START_PAIRS.efficiency, rtol=1e-6)
    sends = v.sends_from(v.sends_vector(v.START_NETWORK), v.START_NETWORK)
    assert sends.hop_factor == pytest.approx((2.0, 2.0, 2.0))
    assert sends.base_s == pytest.approx(v.START_NETWORK.base_s)


@settings(deadline=None)
@given(ANYTHING)
def test_no_vector_leaves_what_physics_permits(x: Floats) -> None:
    ring = v.ring_from(x[:18])
    low, middle, high = ring.efficiency
    assert low <= LL_SHARE * high * (1 + 1e-9)
    assert middle <= LL128_SHARE * high * (1 + 1e-9)
    assert list(ring.hop_factor) == sorted(ring.hop_factor)
    assert ring.hop_factor[0] >= 0.5
    assert ring.hop_factor[2] <= 50
    assert ring.launch_s[0] >= 1.5e-6
    assert ring.launch_s[2] <= 150e-6
    network = v.network_from(x, v.START_NETWORK)
    assert network.protocol_efficiency[0] <= LL_SHARE
    assert network.protocol_efficiency[1] <= LL128_SHARE
    assert 0.5 <= network.hop_factor[0] <= 5
    assert network.hop_factor[2] <= 40
    assert 0.3 <= network.tree_efficiency <= 1
    pairs = v.pair_from(x[:13])
    assert pairs.efficiency[0] <= LL_SHARE * pairs.efficiency[1] * (1 + 1e-9)
    assert all(0.5 <= factor <= 40 for factor in v.sends_from(x[:3], v.START_NETWORK).hop_factor)


def test_trees_follow_what_rings_reach_of_the_same_cards() -> None:
    x = v.network_vector(v.START_NETWORK, 0.4)
    x[6] += np.log(0.9 / v.START_NETWORK.ring_efficiency)
    network = v.network_from(x, v.START_NETWORK)
    assert network.ring_efficiency == pytest.approx(0.9)
    assert network.tree_efficiency == pytest.approx(0.9)


def test_the_last_search_of_a_fit_climbs_down_stairs_that_have_no_slope() -> None:
    def stairs(x: Floats) -> float:
        return float(np.abs(np.round(x - np.array([3.0, -2.0]), 1)).sum())

    found = _polished(np.zeros(2), stairs)
    assert stairs(found) == 0
