from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from echo_explore.comm.contention import (
    Communicator,
    _table,
    busiest_link_time,
    contended_times,
    flow_rates,
    flow_times,
)
from echo_explore.comm.fair_share import fill, new_rates
from echo_explore.comm.patterns import Flows, all_to_all, flows_between, incast, ring, shift
from echo_explore.comm.symmetric import all_to_all_time, card_rate, incast_time, ring_time, shift_time
from echo_explore.core import SpecError
from echo_explore.core.jit import python_of
from echo_explore.graph.kinds import Collective
from echo_explore.specs import ClusterSpec, load_cluster
from echo_explore.topology import Network, cluster_network
from echo_explore.topology.routing import Routes, Spread, route
from tests.examples import examples

BASE = load_cluster("h100-ndr")


def cluster_of(**changes: object) -> ClusterSpec:
    return BASE.model_copy(update={"fabric": BASE.fabric.model_copy(update=changes)})


SMALL = cluster_network(cluster_of(nodes_per_leaf=2, oversubscription=2.0), 8)


def matrix(network: Network, routes: Routes) -> np.ndarray:
    """Shares of flows on the links in use, shape (num_links, num_flows)."""
    used, links = np.unique(routes.links, return_inverse=True)
    found = np.zeros((len(used), routes.num_flows))
    np.add.at(found, (links, np.repeat(np.arange(routes.num_flows), np.diff(routes.offsets))), routes.shares)
    return np.asarray(found / network.bandwidth_bytes_per_s[used][:, None])


def lp_max_min(shares: np.ndarray) -> np.ndarray:
    """Max-min rates by linear programs: raise the least, fix those that cannot go higher, go on."""
    num = shares.shape[1]
    fixed: dict[int, float] = {}
    scale = 1.0 / shares.max()
    unit = shares * scale
    while len(fixed) < num:
        bounds = [(fixed[f], fixed[f]) if f in fixed else (0, None) for f in range(num)]
        rest = [f for f in range(num) if f not in fixed]
        above = np.zeros((len(rest), num + 1))
        above[np.arange(len(rest)), rest] = -1.0
        above[:, -1] = 1.0
        rows = np.vstack([np.hstack([unit, np.zeros((len(unit), 1))]), above])
        limit = np.concatenate([np.ones(len(unit)), np.zeros(len(rest))])
        level = linprog(np.r_[np.zeros(num), -1.0], A_ub=rows, b_ub=limit, bounds=[*bounds, (0, None)]).x[-1]
        for f in rest:
            goal = np.zeros(num)
            goal[f] = -1.0
            least = [(fixed[g], fixed[g]) if g in fixed else (level * (1 - 1e-9), None) for g in range(num)]
            best = linprog(goal, A_ub=unit, b_ub=np.ones(len(unit)), bounds=least).x[f]
            if best <= level * (1 + 1e-6):
                fixed[f] = level
    return np.asarray(np.array([fixed[f] for f in range(num)]) * scale)


@pytest.mark.parametrize("spread", ["hash", "spray"])
@pytest.mark.parametrize("pattern", ["incast", pytest.param("permutation", marks=pytest.mark.slow), "ring", "mixed"])
def test_rates_are_the_max_min_optimum_of_a_linear_program(pattern: str, spread: Spread) -> None:
    rng = np.random.default_rng(3)
    devices = rng.choice(64, 12, replace=False)
    flows = {
        "incast": incast(devices[1:], int(devices[0]), 1.0),
        "permutation": flows_between(devices, rng.permutation(devices), 1.0),
        "ring": ring(devices, 1.0),
        "mixed": flows_between(np.r_[devices, devices], np.r_[np.roll(devices, 3), np.repeat(devices[:3], 4)], 1.0),
    }[pattern]
    apart = flows.sources != flows.targets
    routes = route(SMALL, flows.sources[apart], flows.targets[apart], spread=spread)
    rates = flow_rates(SMALL, routes)
    assert rates == pytest.approx(lp_max_min(matrix(SMALL, routes)), rel=1e-5)


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), min_size=1, max_size=40),
    st.sampled_from(["hash", "spray"]),
)
def test_every_flow_has_a_full_link_where_nobody_is_faster(pairs: list[tuple[int, int]], spread: Spread) -> None:
    pairs = [p for p in pairs if p[0] != p[1]]
    if not pairs:
        return
    routes = route(SMALL, *np.array(pairs).T, spread=spread)
    rates, shares = flow_rates(SMALL, routes), matrix(SMALL, routes)
    use = shares @ rates
    assert use.max() <= 1 + 1e-9
    for f in range(len(pairs)):
        full = np.flatnonzero((shares[:, f] > 0) & (use > 1 - 1e-9))
        assert any(rates[shares[link] > 0].max() <= rates[f] * (1 + 1e-9) for link in full)


def reference_times(shares: np.ndarray, num_bytes: np.ndarray, start_s: np.ndarray) -> np.ndarray:
    """The engine in plain Python: every rate anew at every event."""
    left, end, now = num_bytes.astype(float), start_s.astype(float), 0.0
    done = left <= 0
    while not done.all():
        going = ~done & (start_s <= now)
        rates = np.zeros(len(left))
        rates[going] = python_max_min(shares[:, going])
        waits = start_s[~done & (start_s > now)] - now
        needs = left[going] / rates[going]
        until = min([*needs, *waits])
        left -= rates * until
        now += until
        ended = going & (left <= 1e-9 * num_bytes)
        end[ended] = now
        done |= ended
    return end


def python_max_min(shares: np.ndarray) -> np.ndarray:
    rates, settled = np.zeros(shares.shape[1]), np.zeros(shares.shape[1], bool)
    while not settled.all():
        weight = shares[:, ~settled].sum(axis=1)
        level = np.where(weight > 0, (1 - shares @ (rates * settled)) / np.where(weight > 0, weight, 1), np.inf)
        link = int(level.argmin())
        hit = ~settled & (shares[link] > 0)
        rates[hit] = max(level[link], 0)
        settled |= hit
    return rates


@examples(25)
@given(st.integers(0, 10_000), st.booleans())
def test_times_equal_those_of_the_slow_engine(seed: int, late: bool) -> None:
    rng = np.random.default_rng(seed)
    sources = rng.integers(0, 64, 14)
    targets = (sources + rng.integers(1, 64, 14)) % 64
    size = rng.integers(1, 5, 14) * 1e9
    start = rng.uniform(0, 0.05, 14) if late else np.zeros(14)
    routes = route(SMALL, sources, targets)
    times = flow_times(SMALL, routes, size, start_s=start)
    assert times == pytest.approx(reference_times(matrix(SMALL, routes), size, start), rel=1e-6)
    assert times.max() >= busiest_link_time(SMALL, routes, size) * (1 - 1e-9)


@pytest.mark.parametrize("spread", ["hash", "spray"])
def test_rating_only_what_an_event_touches_is_exact(spread: Spread) -> None:
    rng = np.random.default_rng(7)  # hundreds of events, of which each touches few of the flows
    network = cluster_network(cluster_of(nodes_per_leaf=4), 32)
    sources = np.tile(np.arange(256), 2)
    targets = np.concatenate([rng.permutation(256), rng.permutation(256)])
    apart = sources != targets
    routes = route(network, sources[apart], targets[apart], spread=spread)
    size = rng.uniform(1e6, 1e8, routes.num_flows)
    start = rng.uniform(0, 1e-3, routes.num_flows)
    found = flow_times(network, routes, size, start_s=start)
    assert found == pytest.approx(times_by_whole_fillings(network, routes, size, start), rel=1e-6)


def times_by_whole_fillings(network: Network, routes: Routes, num_bytes: np.ndarray, start_s: np.ndarray) -> np.ndarray:
    """Ends where all rates are filled anew at every event."""
    table = _table(network, routes)
    left, end, now = num_bytes.copy(), np.full(len(num_bytes), np.inf), 0.0
    while np.isinf(end).any():
        state = new_rates(len(left), len(table.capacity))
        state.active[:] = np.isinf(end) & (start_s <= now)
        fill(table, state)
        needs = np.where(state.active, left / np.where(state.active, state.rate, 1.0), np.inf)
        waits = np.where(np.isinf(end) & (start_s > now), start_s - now, np.inf)
        until = min(needs.min(), waits.min())
        left -= np.where(state.active, state.rate, 0.0) * until
        now = now + until if needs.min() <= waits.min() else float(start_s[waits.argmin()])
        end[state.active & (needs <= until * (1 + 1e-12))] = now
    return end


def test_the_compiled_filling_is_the_python_one() -> None:
    rng = np.random.default_rng(1)
    routes = route(SMALL, rng.integers(0, 32, 30), rng.integers(32, 64, 30), spread="spray")
    table = _table(SMALL, routes)
    found = []
    for run in (fill, python_of(fill)):
        state = new_rates(30, len(table.capacity))
        state.active[:] = True
        run(table, state)
        found.append(state.rate)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


CASES = [
    cluster_of(topology=topology, nodes_per_leaf=2, oversubscription=over)
    for topology in ("rail-optimised", "fat-tree")
    for over in (1.0, 2.0, 4.0)
]


def rings_of(collective: Collective, num_devices: int, size: float) -> list[Communicator]:
    """One ring for each GPU of a host."""
    return [
        Communicator(collective=collective, devices=tuple(range(r, num_devices, 8)), message_bytes=size)
        for r in range(8)
    ]


def engine_time(cluster: ClusterSpec, flows: Flows, spread: Spread = "spray") -> float:
    network = cluster_network(cluster, 8)
    routes = route(network, flows.sources, flows.targets, spread=spread)
    return float(flow_times(network, routes, flows.num_bytes).max())


@pytest.mark.parametrize("cluster", CASES, ids=lambda c: f"{c.fabric.topology}-{c.fabric.oversubscription}")
def test_closed_forms_of_symmetric_patterns_are_the_engine(cluster: ClusterSpec) -> None:
    devices, size = np.arange(64), 1e9
    for hosts in (1, 2, 3, 4):
        form = shift_time(cluster, hosts, size)
        assert engine_time(cluster, shift(devices, 8 * hosts, size)) == pytest.approx(form, rel=1e-9)
    rings = rings_of(Collective.ALL_GATHER, 64, size)
    times = contended_times(cluster_network(cluster, 8), rings, spread="spray")
    assert [t.shared_s for t in times] == pytest.approx([ring_time(cluster, size * 7 / 8)] * 8, rel=1e-9)
    assert engine_time(cluster, all_to_all(devices, size)) == pytest.approx(all_to_all_time(cluster, 8, size), rel=1e-9)
    for senders in (1, 3, 7):
        flows = incast(8 * np.arange(1, senders + 1), 0, size)
        assert engine_time(cluster, flows) == pytest.approx(incast_time(cluster, senders, size), rel=1e-9)


def test_rings_share_one_card_evenly() -> None:
    cluster = load_cluster("v100-25gbe")
    network = cluster_network(cluster, 4)
    rings = rings_of(Collective.ALL_REDUCE, 32, 1e8)
    for time in contended_times(network, rings):
        assert time.slowdown == pytest.approx(8.0)
        assert time.shared_s == pytest.approx(8 * 1.5e8 / cluster.node.nic_bandwidth_bytes_per_s)
    with pytest.raises(SpecError, match="a card a GPU"):
        card_rate(cluster)


def test_all_to_all_under_an_all_reduce_slows_both_while_both_send() -> None:
    network = cluster_network(BASE, 4)
    data = rings_of(Collective.ALL_REDUCE, 32, 1e9)
    expert = [Communicator(collective=Collective.ALL_TO_ALL, devices=tuple(range(32)), message_bytes=1e9)]
    both = contended_times(network, data + expert, spread="spray")
    assert [t.slowdown for t in both[:8]] == pytest.approx([1.5] * 8)  # 24 flows a card go before one ring
    assert both[8].slowdown == pytest.approx(25 / 24)
    later = [replace(c, start_s=1.0) for c in expert]
    apart = contended_times(network, data + later, spread="spray")
    assert [t.slowdown for t in apart] == pytest.approx([1.0] * 9)


def test_nothing_to_send_takes_no_time() -> None:
    assert flow_times(SMALL, route(SMALL, [0, 3], [1, 3]), [0.0, 5.0]).tolist() == [0.0, 0.0]
    assert contended_times(SMALL, []) == []


def test_bad_flows_are_refused() -> None:
    routes = route(SMALL, [0], [9])
    with pytest.raises(SpecError, match=r"num_bytes = -1.0: must be finite and not negative"):
        flow_times(SMALL, routes, -1.0)
    with pytest.raises(SpecError, match="devices = 3: is twice in a communicator"):
        contended_times(SMALL, [Communicator(collective=Collective.ALL_REDUCE, devices=(3, 4, 3), message_bytes=1.0)])
    with pytest.raises(SpecError, match="is no pattern of flows"):
        contended_times(SMALL, [Communicator(collective=Collective.BARRIER, devices=(3, 4), message_bytes=1.0)])
