"""The network of a cluster file."""

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs import ClusterSpec
from echo_explore.topology.bigraph import add_bigraph
from echo_explore.topology.fabrics import (
    Cable,
    Cards,
    ClosShape,
    add_clos,
    add_dragonfly,
    add_grid,
    add_single_switch,
)
from echo_explore.topology.hosts import HostShape, add_host, cards_of_gpu
from echo_explore.topology.network import Network, NetworkBuilder


def cluster_network(cluster: ClusterSpec, num_nodes: int) -> Network:
    """The network of the first `num_nodes` hosts: device r is GPU r % gpus of host r // gpus.

    Vertices: `gpu/<device>`, `scale-up/<domain>`, `root/<host>`, `pcie/<host>/<i>`, `nic/<host>/<card>`, and switches
    `leaf/<set>/<rail>`, `spine/<pod>/<i>`, `core/<spine>/<i>`, `router/...`, `upper/<i>`, `lower/<i>`, `switch`.

    Raises:
        PlacementError: the cluster has fewer hosts, or hosts that need a network have no cards.
        SpecError: the fabric's figures do not fit together or to the number of hosts.
    """
    if not 1 <= num_nodes <= cluster.max_nodes:
        raise PlacementError("num_nodes", num_nodes, f"{cluster.name} has 1..{cluster.max_nodes} nodes", "change it")
    builder, shape = NetworkBuilder(), host_shape(cluster)
    ordinals = _ordinals(cluster, num_nodes)
    gpus = cluster.node.num_gpus
    cards = [
        add_host(builder, shape, host, ordinals=ordinals[host * gpus : (host + 1) * gpus]) for host in range(num_nodes)
    ]
    if num_nodes > shape.domain_hosts and (cluster.fabric.topology == "none" or not cluster.node.num_nics):
        raise PlacementError(
            "num_nodes",
            num_nodes,
            f"no network joins the hosts of {cluster.name}",
            "add cards and a fabric",
        )
    if cluster.fabric.topology != "none" and cluster.node.num_nics:
        _add_fabric(builder, cluster, cards)
    return builder.build()


def host_shape(cluster: ClusterSpec) -> HostShape:
    """The host of a cluster."""
    node = cluster.node
    return HostShape(
        num_gpus=node.num_gpus,
        link=node.link,
        link_bandwidth_bytes_per_s=node.link_bandwidth_bytes_per_s,
        link_latency_s=node.link_latency_s,
        pcie_bandwidth_bytes_per_s=node.pcie_bandwidth_bytes_per_s,
        num_nics=node.num_nics,
        nic_bandwidth_bytes_per_s=node.nic_bandwidth_bytes_per_s,
        domain_hosts=node.domain_gpus // node.num_gpus,
        gpus_per_pcie_switch=node.gpus_per_pcie_switch,
        nic_place=node.nic_place,
    )


def cards_of(cluster: ClusterSpec, rank: int) -> range:
    """Cards of its host that lie next to a GPU; see `cards_of_gpu`."""
    return cards_of_gpu(cluster.node.num_gpus, cluster.node.num_nics, rank % cluster.node.num_gpus)


def _ordinals(cluster: ClusterSpec, num_nodes: int) -> list[int]:
    """Numbers of the devices, counted leaf by leaf; rails of a set of hosts have leaves of their own."""
    gpus = cluster.node.num_gpus
    if cluster.fabric.topology != "rail-optimised":
        return list(range(num_nodes * gpus))
    return [i * num_nodes + host for host in range(num_nodes) for i in range(gpus)]


def _add_fabric(builder: NetworkBuilder, cluster: ClusterSpec, cards: Cards) -> None:
    node, fabric = cluster.node, cluster.fabric
    cable = Cable(
        bandwidth_bytes_per_s=node.nic_bandwidth_bytes_per_s,
        latency_s=fabric.latency_s,
        hop_latency_s=fabric.hop_latency_s,
    )
    match fabric.topology:
        case "single-switch":
            add_single_switch(builder, cards, cable)
        case "fat-tree" | "rail-optimised":
            shape = ClosShape(
                nodes_per_leaf=fabric.nodes_per_leaf,
                rails=fabric.topology == "rail-optimised",
                oversubscription=fabric.oversubscription,
                leaves_per_pod=fabric.leaves_per_pod,
                core_oversubscription=fabric.core_oversubscription,
            )
            add_clos(builder, cards, cable, shape)
        case "dragonfly":
            if not fabric.leaves_per_pod:
                raise SpecError("fabric.leaves_per_pod", 0, "a dragonfly needs its routers per group", "give it")
            add_dragonfly(
                builder,
                cards,
                cable,
                nodes_per_router=fabric.nodes_per_leaf,
                routers_per_group=fabric.leaves_per_pod,
                oversubscription=fabric.oversubscription,
            )
        case "torus" | "mesh":
            each = node.num_nics * node.nic_bandwidth_bytes_per_s / (2 * max(1, len(fabric.dims)))
            add_grid(
                builder,
                cards,
                cable,
                dims=fabric.dims,
                wrap=fabric.topology == "torus",
                link_bytes_per_s=each / fabric.oversubscription,
            )
        case "bigraph":
            _add_bigraph(builder, cluster, cards, cable)


def _add_bigraph(builder: NetworkBuilder, cluster: ClusterSpec, cards: Cards, cable: Cable) -> None:
    """`nodes_per_leaf` hosts to a pair of switches, or, with one card a host, to a switch."""
    node, fabric = cluster.node, cluster.fabric
    per_switch = fabric.nodes_per_leaf * max(1, node.num_nics // 2)
    half = max(1, sum(len(host) for host in cards) // (2 * per_switch))
    pair = per_switch * node.nic_bandwidth_bytes_per_s / half / fabric.oversubscription
    add_bigraph(builder, cards, cable, cards_per_switch=per_switch, pair_bytes_per_s=pair)
