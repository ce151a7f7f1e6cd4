"""What groups have of the links: bandwidth and latency of their scale-up and network level."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.comm.coefficients import CommCoefficients, NetworkCoefficients, ScaleUpCoefficients
from echo_explore.comm.routed import RoutedFabric, routed_fabric
from echo_explore.core import PlacementError
from echo_explore.specs import ClusterSpec
from echo_explore.topology import GroupShape

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLinks:
    """The figures of a cluster that prices depend on, with their coefficients.

    Attributes:
        scale_up_bytes_per_s: of one GPU into its scale-up domain, one direction.
        link_latency_s: one step between GPUs of a domain, before the factor of the protocol.
        gpu_network_bytes_per_s: of the cards that one GPU can drive alone.
        network_bytes_per_s: of all cards of a host.
        domain_hosts: hosts in a scale-up domain.
        host_gpus: GPUs of a host.
        network_latency_s: one step between domains, before the factor of the protocol.
        leaf_domains: scale-up domains under one leaf switch.
        oversubscription: bandwidth below over bandwidth above the leaves.
        pod_leaves: leaves in a pod under cores; 0: no cores.
        core_oversubscription: bandwidth below over bandwidth above a pod's spines.
        has_rails: a leaf holds one card of each host.
        num_rails: cards of a domain that lie on leaves of their own; 1 without rails.
        routed: a fabric that is no Clos and no single switch.
    """

    scale_up: ScaleUpCoefficients
    network: NetworkCoefficients
    scale_up_bytes_per_s: float
    link_latency_s: float
    has_switch_reduction: bool
    gpu_network_bytes_per_s: float
    network_bytes_per_s: float
    domain_gpus: int
    domain_hosts: float
    host_gpus: int
    network_latency_s: float
    has_network_reduction: bool
    leaf_domains: float
    oversubscription: float
    pod_leaves: int
    core_oversubscription: float
    has_rails: bool
    num_rails: int
    routed: RoutedFabric | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """Groups as columns of equal length.

    Attributes:
        num_ranks: n.
        num_nodes: M, scale-up domains that a group spans.
        ranks_per_node: r, at most n.
        network_bytes_per_s: B of the group out of a domain, one direction; infinite inside one domain.
        node_stride: domains from one of the group to the next; 1: neighbours.
        groups_per_node: groups that share the cards of a domain.
    """

    num_ranks: Floats
    num_nodes: Floats
    ranks_per_node: Floats
    network_bytes_per_s: Floats
    node_stride: Floats
    groups_per_node: Floats

    @property
    def crosses(self) -> npt.NDArray[np.bool_]:
        """The group spans several domains."""
        return self.num_nodes > 1


def cluster_links(
    cluster: ClusterSpec,
    coefficients: CommCoefficients,
    *,
    scale_up: ScaleUpCoefficients | None = None,
    network: NetworkCoefficients | None = None,
    library: str = "",
) -> ClusterLinks:
    """The links of a cluster under these coefficients (those of the library, where it has its own), or the given ones.

    One GPU alone drives the cards next to it: num_nics / num_gpus of them, at least one, and not more than its PCIe
    link carries (a card behind NVLink, as NCCL's PXN uses it, is left out).
    """
    node, fabric = cluster.node, cluster.fabric
    cards = max(1.0, node.num_nics / node.num_gpus) if node.num_nics else 0.0
    return ClusterLinks(
        scale_up=scale_up or coefficients.scale_up_of(cluster),
        network=network or coefficients.network_of(cluster, library),
        scale_up_bytes_per_s=node.link_bandwidth_bytes_per_s,
        link_latency_s=node.link_latency_s,
        has_switch_reduction=node.in_network_reduction,
        gpu_network_bytes_per_s=min(cards * node.nic_bandwidth_bytes_per_s, node.pcie_bandwidth_bytes_per_s),
        network_bytes_per_s=node.network_bandwidth_bytes_per_s,
        domain_gpus=node.domain_gpus,
        domain_hosts=node.domain_gpus / node.num_gpus,
        host_gpus=node.num_gpus,
        network_latency_s=fabric.latency_s,
        has_network_reduction=fabric.in_network_reduction,
        leaf_domains=max(1.0, fabric.nodes_per_leaf * node.num_gpus / node.domain_gpus),
        oversubscription=fabric.oversubscription,
        pod_leaves=fabric.leaves_per_pod,
        core_oversubscription=fabric.core_oversubscription,
        has_rails=fabric.topology == "rail-optimised",
        routed=routed_fabric(cluster),
        num_rails=max(1, node.num_nics) if fabric.topology == "rail-optimised" else 1,
    )


def group_arrays(
    links: ClusterLinks,
    num_ranks: npt.ArrayLike,
    ranks_per_node: npt.ArrayLike,
    groups_per_node: npt.ArrayLike,
    node_stride: npt.ArrayLike = 1,
) -> GroupArrays:
    """Groups with their share of the cards: see `network_share`.

    Raises:
        PlacementError: a group spans nodes and the hosts have no network card.
    """
    n, r, sharing = (np.atleast_1d(np.asarray(a, dtype=float)) for a in (num_ranks, ranks_per_node, groups_per_node))
    nodes = np.ceil(n / r)
    crosses = nodes > 1
    if links.network_bytes_per_s <= 0 and crosses.any():
        i = int(np.flatnonzero(crosses)[0])
        rule = f"a group of {n[i]:.0f} GPUs spans {nodes[i]:.0f} nodes"
        raise PlacementError("node.nics", 0, rule, "add network cards")
    cards = links.network_bytes_per_s * links.domain_hosts / sharing
    share = np.minimum(cards, r * links.gpu_network_bytes_per_s)
    return GroupArrays(
        num_ranks=n,
        num_nodes=nodes,
        ranks_per_node=np.minimum(r, n),
        network_bytes_per_s=np.where(crosses, share, np.inf),
        node_stride=np.broadcast_to(np.asarray(node_stride, dtype=float), n.shape),
        groups_per_node=np.broadcast_to(sharing, n.shape),
    )


def network_share(group: GroupShape, links: ClusterLinks) -> float:
    """Bytes per second, one direction, that a group of several domains has out of each domain.

    The least of: an equal share of all cards of the domain among the groups in it; what the group's GPUs there can
    drive. What the switches above leave of it: `spines.spine_share`.

    Raises:
        PlacementError: the hosts have no network card.
    """
    arrays = group_arrays(links, group.num_ranks, group.ranks_per_node, group.groups_per_node)
    return float(arrays.network_bytes_per_s[0])
