"""What one group has of the links: bandwidth and latency of its scale-up and network level."""

from dataclasses import dataclass

from echo_explore.comm.coefficients import CommCoefficients, NetworkCoefficients, ScaleUpCoefficients
from echo_explore.core import PlacementError
from echo_explore.specs import ClusterSpec
from echo_explore.topology import GroupShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLinks:
    """The figures of a cluster that prices depend on, with their coefficients.

    Attributes:
        scale_up_bytes_per_s: of one GPU into its scale-up domain, one direction.
        hop_s: one step between GPUs of a domain, by protocol.
        gpu_network_bytes_per_s: of the cards that one GPU can drive alone.
        network_bytes_per_s: of all cards of a host.
        domain_hosts: hosts in a scale-up domain.
        network_hop_s: one step between domains, by protocol.
    """

    scale_up: ScaleUpCoefficients
    network: NetworkCoefficients
    scale_up_bytes_per_s: float
    hop_s: tuple[float, float, float]
    has_switch_reduction: bool
    gpu_network_bytes_per_s: float
    network_bytes_per_s: float
    domain_gpus: int
    domain_hosts: float
    network_hop_s: tuple[float, float, float]
    has_network_reduction: bool
    nodes_per_leaf: int
    oversubscription: float


def cluster_links(cluster: ClusterSpec, coefficients: CommCoefficients) -> ClusterLinks:
    """The links of a cluster under these coefficients.

    One GPU alone drives the cards next to it: num_nics / num_gpus of them, at least one, and not more than its PCIe
    link carries (a card behind NVLink, as NCCL's PXN uses it, is left out).
    """
    node, fabric = cluster.node, cluster.fabric
    scale_up, network = coefficients.scale_up_of(cluster), coefficients.network_of(cluster)
    a, b, c = scale_up.hop_factor
    d, e, f = network.hop_factor
    cards = max(1.0, node.num_nics / node.num_gpus) if node.num_nics else 0.0
    return ClusterLinks(
        scale_up=scale_up,
        network=network,
        scale_up_bytes_per_s=node.link_bandwidth_bytes_per_s,
        hop_s=(a * node.link_latency_s, b * node.link_latency_s, c * node.link_latency_s),
        has_switch_reduction=node.in_network_reduction,
        gpu_network_bytes_per_s=min(cards * node.nic_bandwidth_bytes_per_s, node.pcie_bandwidth_bytes_per_s),
        network_bytes_per_s=node.network_bandwidth_bytes_per_s,
        domain_gpus=node.domain_gpus,
        domain_hosts=node.domain_gpus / node.num_gpus,
        network_hop_s=(d * fabric.latency_s, e * fabric.latency_s, f * fabric.latency_s),
        has_network_reduction=fabric.in_network_reduction,
        nodes_per_leaf=fabric.nodes_per_leaf,
        oversubscription=fabric.oversubscription,
    )


def network_share(group: GroupShape, links: ClusterLinks) -> float:
    """Bytes per second, one direction, that a group of several domains has out of each domain.

    The least of: an equal share of all cards of the domain among the groups in it; what the group's GPUs there can
    drive. Above the leaf switches the share shrinks by the oversubscription.

    Raises:
        PlacementError: the hosts have no network card.
    """
    if links.network_bytes_per_s <= 0:
        raise PlacementError(
            "node.nics", 0, f"a group of {group.num_ranks} GPUs spans {group.num_nodes} nodes", "add network cards"
        )
    cards = links.network_bytes_per_s * links.domain_hosts / group.groups_per_node
    share = min(cards, group.ranks_per_node * links.gpu_network_bytes_per_s)
    # Approximation: a group within the nodes of one leaf is taken to lie under one leaf (under-estimates groups with
    # distant nodes), a larger one to send all its traffic above the leaves (over-estimates rings of neighbours).
    return share / links.oversubscription if group.num_nodes > links.nodes_per_leaf else share
