import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.comm.contention import step_time
from echo_explore.comm.patterns import flows_between
from echo_explore.core import SpecError
from echo_explore.specs import load_cluster
from echo_explore.topology import Network, VertexKind, cluster_network
from echo_explore.topology.graphs import as_graph
from echo_explore.topology.routing import Spread, route
from tests.examples import examples

BASE = load_cluster("h100-ndr")


def network_of(**changes: object) -> Network:
    return cluster_network(BASE.model_copy(update={"fabric": BASE.fabric.model_copy(update=changes)}), 16)


NETWORKS = [
    network_of(nodes_per_leaf=4),
    network_of(nodes_per_leaf=2, topology="fat-tree", leaves_per_pod=2),
    network_of(topology="torus", dims=(4, 4)),
    network_of(topology="dragonfly", nodes_per_leaf=2, leaves_per_pod=2),
    cluster_network(load_cluster("gb200-nvl72"), 36),
    cluster_network(load_cluster("v100-pcie-shared-uplinks"), 4),
    cluster_network(load_cluster("v100-25gbe"), 2),
]
SPREADS: list[Spread] = ["hash", "destination", "spray"]


def forwarding(network: Network, ends: tuple[int, int], *, kinds: tuple[str, ...]) -> nx.DiGraph:
    """The network without other devices and without links of other kinds."""
    graph = as_graph(network)
    keep = {network.vertex_names[network.devices[d]] for d in ends}
    nodes = [n for n, data in graph.nodes(data=True) if data["kind"] != "device" or n in keep]
    edges = [(a, b) for a, b, data in graph.subgraph(nodes).edges(data=True) if data["kind"] in kinds]
    found = nx.DiGraph(edges)
    found.add_nodes_from(keep)
    return found


@examples(60)
@given(st.sampled_from(NETWORKS), st.sampled_from(SPREADS), st.data())
def test_routes_are_shortest_paths_and_keep_every_byte(network: Network, spread: Spread, data: st.DataObject) -> None:
    device = st.integers(0, network.num_devices - 1)
    s, t = data.draw(device), data.draw(device)
    routes = route(network, [s], [t], spread=spread, seed=data.draw(st.integers(0, 5)))
    links, shares = routes.of(0), routes.shares
    if s == t:
        assert not len(links)
        return
    first, last = (network.vertex_names[network.devices[d]] for d in (s, t))
    for kinds in (("scale-up",), ("scale-up", "pcie"), ("scale-up", "pcie", "network")):
        graph = forwarding(network, (s, t), kinds=kinds)
        if nx.has_path(graph, first, last):
            break
    assert routes.num_links[0] == nx.shortest_path_length(graph, first, last)
    assert shares.sum() == pytest.approx(routes.num_links[0])
    flow = np.zeros(network.num_vertices)
    np.add.at(flow, network.source[links], shares)
    np.add.at(flow, network.target[links], -shares)
    assert flow[network.devices[s]] == pytest.approx(1.0)
    assert flow[network.devices[t]] == pytest.approx(-1.0)
    flow[[network.devices[s], network.devices[t]]] = 0.0
    assert np.abs(flow).max() < 1e-9
    if spread != "spray":
        assert (network.target[links[:-1]] == network.source[links[1:]]).all()


def test_spray_uses_all_equal_paths_evenly() -> None:
    network = network_of(nodes_per_leaf=4)
    routes = route(network, [0], [32], spread="spray")
    up = network.vertex_kind[network.target[routes.links]] == VertexKind.SWITCH
    assert routes.num_links[0] == 8
    assert sorted(routes.shares[up])[:4] == [0.25] * 4


def test_hash_spreads_over_spines_and_depends_on_the_seed() -> None:
    network = network_of(nodes_per_leaf=4)
    sources, targets = np.zeros(4000, np.int64), np.full(4000, 32)
    routes = route(network, sources, targets)
    spine = np.flatnonzero(network.vertex_kind == VertexKind.SWITCH)
    counts = np.bincount(network.target[routes.links], minlength=network.num_vertices)[spine]
    four = np.sort(counts)[-6:-2]  # four spines; the two leaves see every flow
    assert four.sum() == 4000
    assert four.min() > 900
    assert not np.array_equal(routes.links, route(network, sources, targets, seed=1).links)
    assert np.array_equal(routes.links, route(network, sources, targets).links)


def test_routes_by_destination_do_not_collide_on_shifts() -> None:
    network = network_of(nodes_per_leaf=4)
    devices = np.arange(128)
    for hosts in (4, 8, 12):
        links = route(network, devices, (devices + 8 * hosts) % 128, spread="destination").links
        assert np.bincount(links).max() == 1


def test_flows_to_another_rail_go_by_the_gpu_of_that_rail() -> None:
    network = network_of(nodes_per_leaf=16)
    plain, aligned = (route(network, [0], [11], via_rail=v) for v in (False, True))
    assert plain.num_switches(network)[0] == 3
    assert aligned.num_switches(network)[0] == 1
    names = [network.link_name(link) for link in aligned.of(0)]
    assert names[:2] == ["gpu/0 -> scale-up/0", "scale-up/0 -> gpu/3"]
    both = route(network, [0, 3, 5], [11, 11, 6], via_rail=True)
    assert [len(both.of(i)) for i in range(3)] == [8, 6, 2]


DRAGONFLY = network_of(topology="dragonfly", nodes_per_leaf=2, leaves_per_pod=4)


@pytest.mark.parametrize("spread", SPREADS)
def test_a_detour_is_a_walk_over_the_switch_of_a_third_host(spread: Spread) -> None:
    sources, targets = np.arange(128), (np.arange(128) + 64) % 128
    routes = route(DRAGONFLY, sources, targets, spread=spread, detour=True)
    switch = DRAGONFLY.vertex_kind == VertexKind.SWITCH
    for i in range(128):
        links = routes.of(i)
        flow = np.zeros(DRAGONFLY.num_vertices)
        shares = routes.shares[routes.offsets[i] : routes.offsets[i + 1]]
        np.add.at(flow, DRAGONFLY.source[links], shares)
        np.add.at(flow, DRAGONFLY.target[links], -shares)
        assert flow[DRAGONFLY.devices[[sources[i], targets[i]]]] == pytest.approx([1.0, -1.0])
        flow[DRAGONFLY.devices[[sources[i], targets[i]]]] = 0.0
        assert np.abs(flow).max() < 1e-9
        own = {int(DRAGONFLY.host[DRAGONFLY.devices[d]]) for d in (sources[i], targets[i])}
        ends = np.r_[DRAGONFLY.source[links], DRAGONFLY.target[links]]
        assert set(DRAGONFLY.host[ends[~switch[ends]]]) == own
    plain = route(DRAGONFLY, sources, targets, spread=spread)
    assert routes.num_switches(DRAGONFLY).mean() > plain.num_switches(DRAGONFLY).mean()
    assert (route(DRAGONFLY, [0, 5], [3, 5], detour=True).num_links == route(DRAGONFLY, [0, 5], [3, 5]).num_links).all()


def test_detours_spread_a_shift_of_groups_and_cost_neighbours() -> None:
    # Kim et al. (ISCA 2008), section 4: minimal routes put all that one group sends to the next on one cable.
    changes = {"topology": "dragonfly", "nodes_per_leaf": 1, "leaves_per_pod": 2}
    groups = cluster_network(BASE.model_copy(update={"fabric": BASE.fabric.model_copy(update=changes)}), 32)
    devices = np.arange(groups.num_devices)
    next_group, next_router = (devices + 16) % len(devices), devices ^ 8

    def seconds(targets: np.ndarray, *, detour: bool) -> float:
        return step_time(groups, flows_between(devices, targets, 1e6), detour=detour)

    assert seconds(next_group, detour=True) < 0.5 * seconds(next_group, detour=False)
    assert seconds(next_router, detour=True) > seconds(next_router, detour=False)


def test_detours_are_refused_where_there_is_no_switch_to_go_over() -> None:
    with pytest.raises(SpecError, match=r"detour = 'host 0': the cards of a host hang on several switches"):
        route(NETWORKS[0], [0], [64], detour=True)
    with pytest.raises(SpecError, match=r"detour = True: does not go with via_rail"):
        route(DRAGONFLY, [0], [64], detour=True, via_rail=True)


def test_wrong_devices_are_refused() -> None:
    with pytest.raises(SpecError, match=r"device = 128: must lie in 0..127"):
        route(NETWORKS[0], [0], [128])
    with pytest.raises(SpecError, match="targets = 2: must be as many as sources = 1"):
        route(NETWORKS[0], [0], [1, 2])
    with pytest.raises(SpecError, match="spread = 'magic'"):
        route(NETWORKS[0], [0], [1], spread="magic")  # type: ignore[arg-type]
