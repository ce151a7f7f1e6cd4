import networkx as nx
import pytest

from echo_explore.core import PlacementError
from echo_explore.graph import Axis
from echo_explore.specs import ParallelConfig, load_cluster
from echo_explore.topology import group_shape
from echo_explore.topology.network import cards_of, cluster_graph, domains_of, network_bandwidth

CLUSTERS = ["h100-ndr", "h100-p5-efa", "a100-p4de-efa", "gb200-nvl72", "v100-25gbe"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_graph_is_connected_and_has_every_part(name: str) -> None:
    cluster = load_cluster(name)
    graph = cluster_graph(cluster, 4)
    kinds = [kind for _, kind in graph.nodes(data="kind")]
    assert nx.is_connected(graph)
    assert kinds.count("gpu") == 4 * cluster.node.num_gpus
    assert kinds.count("nic") == 4 * cluster.node.num_nics
    assert all(bandwidth > 0 for _, _, bandwidth in graph.edges(data="bandwidth_bytes_per_s"))


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_card_is_next_to_a_gpu(name: str) -> None:
    cluster = load_cluster(name)
    cards = {card for rank in range(cluster.node.num_gpus) for card in cards_of(cluster, rank)}
    assert cards == set(range(cluster.node.num_nics))


def test_counts_of_placement_agree_with_the_graph() -> None:
    cluster = load_cluster("h100-ndr")
    layout = ParallelConfig(tensor_parallel=4, data_parallel=4, pipeline_parallel=4)
    graph = cluster_graph(cluster, layout.num_gpus // cluster.node.num_gpus)
    for axis, ranks in (
        (Axis.TENSOR, range(4)),
        (Axis.DATA, range(1, 16, 4)),
        (Axis.EMBEDDING, (3, 51)),
        (Axis.MODEL, [16 * stage + 4 + t for stage in range(4) for t in range(4)]),
    ):
        shape, counts = group_shape(axis, layout, cluster), domains_of(graph, list(ranks))
        assert set(counts.values()) == {shape.ranks_per_node}
        assert len(counts) == shape.num_nodes


@pytest.mark.parametrize(("name", "hosts"), [("h100-ndr", 1), ("gb200-nvl72", 18)])
def test_bandwidth_out_of_a_domain_is_that_of_its_cards(name: str, hosts: int) -> None:
    cluster = load_cluster(name)
    graph = cluster_graph(cluster, 2 * hosts)
    assert network_bandwidth(graph, 1) == pytest.approx(hosts * cluster.node.network_bandwidth_bytes_per_s)


def test_oversubscription_thins_the_links_above_the_leaves() -> None:
    cluster = load_cluster("h100-ndr")
    thin = cluster.model_copy(update={"fabric": cluster.fabric.model_copy(update={"oversubscription": 2.0})})
    full, half = (cluster_graph(c, 64).edges["leaf/0/0", "spine"]["bandwidth_bytes_per_s"] for c in (cluster, thin))
    assert half == full / 2


def test_more_hosts_than_there_are_are_refused() -> None:
    with pytest.raises(PlacementError, match="num_nodes = 1000000"):
        cluster_graph(load_cluster("h100-ndr"), 1_000_000)
