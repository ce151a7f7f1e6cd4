import networkx as nx
import numpy as np
import pytest

from echo_explore.core import PlacementError, SpecError
from echo_explore.graph import Axis
from echo_explore.specs import ClusterSpec, ParallelConfig, load_cluster
from echo_explore.topology import (
    LinkKind,
    NetworkBuilder,
    SiteLink,
    VertexKind,
    axis_groups,
    cards_of,
    cluster_network,
    group_shape,
    join_sites,
)
from echo_explore.topology.graphs import as_graph, network_from_graph
from echo_explore.topology.routing import route

CLUSTERS = ["h100-ndr", "h100-p5-efa", "a100-p4de-efa", "gb200-nvl72", "v100-25gbe", "mi300x-roce"]


def fabric(name: str, **changes: object) -> ClusterSpec:
    cluster = load_cluster(name)
    return cluster.model_copy(update={"fabric": cluster.fabric.model_copy(update=changes)})


@pytest.mark.parametrize("name", CLUSTERS)
def test_network_has_every_part_and_goes_through_networkx_and_back(name: str) -> None:
    cluster = load_cluster(name)
    network = cluster_network(cluster, 4)
    kinds = np.bincount(network.vertex_kind)
    assert kinds[VertexKind.DEVICE] == 4 * cluster.node.num_gpus
    assert kinds[VertexKind.CARD] == 4 * cluster.node.num_nics
    assert (network.source[network.reverse] == network.target).all()
    graph = as_graph(network)
    assert nx.is_strongly_connected(graph)
    again = network_from_graph(graph)
    assert again.vertex_names == network.vertex_names
    assert sorted(again.bandwidth_bytes_per_s) == sorted(network.bandwidth_bytes_per_s)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_card_is_next_to_a_gpu(name: str) -> None:
    cluster = load_cluster(name)
    cards = {card for rank in range(cluster.node.num_gpus) for card in cards_of(cluster, rank)}
    assert cards == set(range(cluster.node.num_nics))


def test_counts_of_placement_agree_with_the_network() -> None:
    cluster = load_cluster("h100-ndr")
    layout = ParallelConfig(tensor_parallel=4, data_parallel=4, pipeline_parallel=4)
    network = cluster_network(cluster, layout.num_gpus // cluster.node.num_gpus)
    domain = network.domain[network.devices]
    for axis in (Axis.TENSOR, Axis.DATA, Axis.EMBEDDING, Axis.MODEL):
        shape = group_shape(axis, layout, cluster)
        for group in axis_groups(axis, layout):
            counts = np.bincount(domain[group])
            assert set(counts[counts > 0]) == {shape.ranks_per_node}
            assert (counts > 0).sum() == shape.num_nodes


def test_oversubscription_thins_the_links_above_the_leaves() -> None:
    for over in (1.0, 2.0, 3.0):
        network = cluster_network(fabric("h100-ndr", oversubscription=over), 64)
        leaf = network.vertex_names.index("leaf/0/0")
        up = (network.source == leaf) & (network.vertex_kind[network.target] == VertexKind.SWITCH)
        down = (network.source == leaf) & (network.vertex_kind[network.target] == VertexKind.CARD)
        bandwidth = network.bandwidth_bytes_per_s
        assert bandwidth[up].sum() == pytest.approx(bandwidth[down].sum() / over)


def test_pods_hang_under_cores() -> None:
    thin = fabric("h100-ndr", nodes_per_leaf=4, leaves_per_pod=2, core_oversubscription=2.0)
    network = cluster_network(thin, 16)
    routes = route(network, [0, 0, 0, 0], [32, 64, 33, 9])
    assert routes.num_switches(network).tolist() == [3, 5, 3, 3]
    spine = network.vertex_names.index("spine/0/0")
    names = [network.vertex_names[w] for w in network.target[network.source == spine]]
    up = sum(n.startswith("core") for n in names)
    assert up == sum(n.startswith("leaf") for n in names) / 2


def test_the_place_of_cards_decides_which_links_a_path_takes() -> None:
    cluster = load_cluster("h100-ndr")
    node = cluster.node.model_copy(update={"gpus_per_pcie_switch": 2, "nic_place": "root"})
    network = cluster_network(cluster.model_copy(update={"node": node}), 2)
    names = [network.link_name(link) for link in route(network, [0], [8]).of(0)]
    assert "root-port/0/0 -> root/0" in names
    own = cluster_network(cluster, 2)
    assert not any("root" in own.link_name(link) for link in route(own, [0], [8]).of(0))


def test_direct_links_and_detours_over_pcie() -> None:
    network = cluster_network(load_cluster("v100-25gbe"), 1)
    near, far = route(network, [0, 0], [4, 5]).num_links
    assert (near, far) == (1, 2)  # 0 and 5 share no link of the cube mesh; a GPU forwards nothing


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"topology": "single-switch"}, 1),
        ({"topology": "dragonfly", "nodes_per_leaf": 2, "leaves_per_pod": 4}, 4),
        ({"topology": "torus", "dims": (4, 2, 4)}, 6),
        ({"topology": "mesh", "dims": (8, 4)}, 11),
        ({"topology": "bigraph", "nodes_per_leaf": 4}, 3),
    ],
)
def test_longest_paths_of_a_fabric(changes: dict[str, object], most: int) -> None:
    network = cluster_network(fabric("h100-ndr", **changes), 32)
    sources, targets = np.divmod(np.arange(256 * 256), 256)
    other = sources // 8 != targets // 8
    switches = route(network, sources[other], targets[other]).num_switches(network)
    assert switches.min() >= 1
    assert switches.max() == most


def test_a_torus_wraps_and_a_mesh_does_not() -> None:
    for topology, expected in (("torus", 2), ("mesh", 8)):
        network = cluster_network(fabric("h100-ndr", topology=topology, dims=(8, 4)), 32)
        assert route(network, [0], [28 * 8]).num_switches(network)[0] == expected


def test_sites_are_joined_by_wide_area_links_only() -> None:
    site = cluster_network(load_cluster("h100-ndr"), 2)
    both = join_sites(
        [site, site], [SiteLink(a=0, b=1, bandwidth_bytes_per_s=1e9, latency_s=0.01, back_bytes_per_s=5e8)]
    )
    routes = route(both, [0, 16, 0], [16, 0, 8])
    wide = [both.link_kind[routes.of(i)] == LinkKind.WIDE_AREA for i in range(3)]
    assert [int(w.sum()) for w in wide] == [1, 1, 0]
    assert both.bandwidth_bytes_per_s[routes.of(0)][wide[0]] == 1e9
    assert both.bandwidth_bytes_per_s[routes.of(1)][wide[1]] == 5e8
    assert routes.latency_s(both)[0] == pytest.approx(0.01, rel=0.01)
    with pytest.raises(SpecError, match=r"site = 2: must lie in 0..1"):
        join_sites([site, site], [SiteLink(a=0, b=2, bandwidth_bytes_per_s=1e9, latency_s=0.01)])


def pair(bandwidth: float = 1.0, latency: float = 0.0, *, joined: bool = True) -> NetworkBuilder:
    builder = NetworkBuilder()
    a, b = (builder.vertex(name, VertexKind.DEVICE) for name in ("gpu/0", "gpu/1"))
    if joined:
        builder.link(a, b, LinkKind.NETWORK, bandwidth, latency_s=latency)
    return builder


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (pair(joined=False), "network = 'gpu/1': no path joins it to gpu/0: the network is in parts"),
        (pair(0.0), r"link gpu/0 -> gpu/1.bandwidth_bytes_per_s = 0.0: a link needs a positive, finite bandwidth"),
        (pair(float("nan")), r"link gpu/0 -> gpu/1.bandwidth_bytes_per_s = nan"),
        (pair(latency=-1e-6), r"link gpu/0 -> gpu/1.latency_s = -1e-06: must be finite and not negative"),
        (NetworkBuilder(), r"has no GPU"),
    ],
)
def test_bad_networks_are_named_in_one_line(builder: NetworkBuilder, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        builder.build()
    assert "\n" not in str(caught.value)


def test_asymmetric_links_must_say_so() -> None:
    graph = nx.DiGraph()
    for name in ("a", "b"):
        graph.add_node(name, kind="device")
    graph.add_edge("a", "b", kind="network", bandwidth_bytes_per_s=2.0)
    with pytest.raises(SpecError, match="link a -> b = 1: has 0 links in the other direction"):
        network_from_graph(graph)
    graph.add_edge("b", "a", kind="network", bandwidth_bytes_per_s=1.0)
    with pytest.raises(SpecError, match=r"link a -> b.bandwidth_bytes_per_s = 2.0: is asymmetric: 1"):
        network_from_graph(graph)
    nx.set_edge_attributes(graph, values=True, name="asymmetric")
    assert sorted(network_from_graph(graph).bandwidth_bytes_per_s) == [1.0, 2.0]
    graph.edges["a", "b"].pop("bandwidth_bytes_per_s")
    with pytest.raises(SpecError, match=r"link a -> b.bandwidth_bytes_per_s = None"):
        network_from_graph(graph)


def test_more_hosts_than_there_are_are_refused() -> None:
    with pytest.raises(PlacementError, match="num_nodes = 1000000"):
        cluster_network(load_cluster("h100-ndr"), 1_000_000)


def test_oversubscription_below_one_is_refused() -> None:
    from echo_explore.topology.fabrics import ClosShape

    with pytest.raises(SpecError, match=r"oversubscription = 0: must be 1.0 or more"):
        ClosShape(nodes_per_leaf=4, oversubscription=0)
