"""A cluster as a graph of devices, cards, switches and links, to look at and to check counts of placement against.

Vertices are strings: `gpu/<rank>`, `domain/<i>` (a scale-up switch; direct links too), `nic/<host>/<card>`,
`leaf/<group>/<rail>`, `spine`. Edges carry `kind` and `bandwidth_bytes_per_s` (one direction). Prices do not route on
this graph: they use closed forms of the same figures.
"""

from collections.abc import Sequence

import networkx as nx

from echo_explore.core import PlacementError
from echo_explore.specs import ClusterSpec


def cluster_graph(cluster: ClusterSpec, num_nodes: int) -> nx.Graph:
    """The graph of the first `num_nodes` hosts.

    Rail-optimised: card j of every host under leaf switch (group of hosts, j). Other fabrics: all cards of a group of
    hosts under one leaf. Leaves join at one spine vertex, with the bandwidth that the oversubscription leaves them.

    Raises:
        PlacementError: the cluster has fewer hosts.
    """
    if not 1 <= num_nodes <= cluster.max_nodes:
        raise PlacementError("num_nodes", num_nodes, f"{cluster.name} has 1..{cluster.max_nodes} nodes", "change it")
    graph = nx.Graph(name=cluster.name)
    for host in range(num_nodes):
        _add_host(graph, cluster, host)
    _join_leaves(graph, cluster)
    return graph


def _add_host(graph: nx.Graph, cluster: ClusterSpec, host: int) -> None:
    node, fabric = cluster.node, cluster.fabric
    ranks = range(host * node.num_gpus, (host + 1) * node.num_gpus)
    for rank in ranks:
        domain = f"domain/{rank // node.domain_gpus}"
        graph.add_node(f"gpu/{rank}", kind="gpu", host=host, domain=rank // node.domain_gpus)
        graph.add_node(domain, kind="scale-up")
        graph.add_edge(f"gpu/{rank}", domain, kind=node.link, bandwidth_bytes_per_s=node.link_bandwidth_bytes_per_s)
    for card in range(node.num_nics):
        name, rail = f"nic/{host}/{card}", card if fabric.topology == "rail-optimised" else 0
        leaf = f"leaf/{host // fabric.nodes_per_leaf}/{rail}"
        graph.add_node(name, kind="nic", host=host)
        graph.add_node(leaf, kind="leaf")
        graph.add_edge(name, leaf, kind=fabric.kind, bandwidth_bytes_per_s=node.nic_bandwidth_bytes_per_s)
    for rank in ranks:
        for card in cards_of(cluster, rank):
            bandwidth = node.pcie_bandwidth_bytes_per_s
            graph.add_edge(f"gpu/{rank}", f"nic/{host}/{card}", kind="pcie", bandwidth_bytes_per_s=bandwidth)


def cards_of(cluster: ClusterSpec, rank: int) -> range:
    """Cards of its host that lie next to a GPU: an equal share, at least one; none where the host has none."""
    node = cluster.node
    local = rank % node.num_gpus
    if node.num_nics >= node.num_gpus:
        each = node.num_nics // node.num_gpus
        return range(local * each, (local + 1) * each)
    first = local * node.num_nics // node.num_gpus
    return range(first, first + 1) if node.num_nics else range(0)


def _join_leaves(graph: nx.Graph, cluster: ClusterSpec) -> None:
    leaves = [name for name, kind in graph.nodes(data="kind") if kind == "leaf"]
    if len(leaves) < 2:
        return
    graph.add_node("spine", kind="spine")
    for leaf in leaves:
        down = sum(bandwidth for _, _, bandwidth in graph.edges(leaf, data="bandwidth_bytes_per_s"))
        up = down / cluster.fabric.oversubscription
        graph.add_edge(leaf, "spine", kind=cluster.fabric.kind, bandwidth_bytes_per_s=up)


def domains_of(graph: nx.Graph, ranks: Sequence[int]) -> dict[int, int]:
    """Number of the given ranks by scale-up domain."""
    counts: dict[int, int] = {}
    for rank in ranks:
        domain = graph.nodes[f"gpu/{rank}"]["domain"]
        counts[domain] = counts.get(domain, 0) + 1
    return counts


def network_bandwidth(graph: nx.Graph, domain: int) -> float:
    """Bytes per second, one direction, of all cards of a scale-up domain."""
    hosts = {data["host"] for _, data in graph.nodes(data=True) if data.get("domain") == domain}
    cards = [name for name, data in graph.nodes(data=True) if data["kind"] == "nic" and data["host"] in hosts]
    return sum(
        float(data["bandwidth_bytes_per_s"])
        for card in cards
        for _, other, data in graph.edges(card, data=True)
        if graph.nodes[other]["kind"] == "leaf"
    )
