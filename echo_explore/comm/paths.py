"""What groups have of the links: bandwidth and latency of their scale-up and network level."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.comm.coefficients import CommCoefficients, NetworkCoefficients, ScaleUpCoefficients
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
    nodes_per_leaf: int
    oversubscription: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """Groups as columns of equal length.

    Attributes:
        num_ranks: n.
        num_nodes: M, scale-up domains that a group spans.
        ranks_per_node: r, at most n.
        network_bytes_per_s: B of the group out of a domain, one direction; infinite inside one domain.
    """

    num_ranks: Floats
    num_nodes: Floats
    ranks_per_node: Floats
    network_bytes_per_s: Floats

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
) -> ClusterLinks:
    """The links of a cluster under these coefficients, or under the given ones.

    One GPU alone drives the cards next to it: num_nics / num_gpus of them, at least one, and not more than its PCIe
    link carries (a card behind NVLink, as NCCL's PXN uses it, is left out).
    """
    node, fabric = cluster.node, cluster.fabric
    cards = max(1.0, node.num_nics / node.num_gpus) if node.num_nics else 0.0
    return ClusterLinks(
        scale_up=scale_up or coefficients.scale_up_of(cluster),
        network=network or coefficients.network_of(cluster),
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
        nodes_per_leaf=fabric.nodes_per_leaf,
        oversubscription=fabric.oversubscription,
    )


def group_arrays(
    links: ClusterLinks, num_ranks: npt.ArrayLike, ranks_per_node: npt.ArrayLike, groups_per_node: npt.ArrayLike
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
    # Approximation: a group within the nodes of one leaf is taken to lie under one leaf (under-estimates groups with
    # distant nodes), a larger one to send all its traffic above the leaves (over-estimates rings of neighbours).
    share = np.where(nodes > links.nodes_per_leaf, share / links.oversubscription, share)
    return GroupArrays(
        num_ranks=n,
        num_nodes=nodes,
        ranks_per_node=np.minimum(r, n),
        network_bytes_per_s=np.where(crosses, share, np.inf),
    )


def network_share(group: GroupShape, links: ClusterLinks) -> float:
    """Bytes per second, one direction, that a group of several domains has out of each domain.

    The least of: an equal share of all cards of the domain among the groups in it; what the group's GPUs there can
    drive. Above the leaf switches the share shrinks by the oversubscription.

    Raises:
        PlacementError: the hosts have no network card.
    """
    arrays = group_arrays(links, group.num_ranks, group.ranks_per_node, group.groups_per_node)
    return float(arrays.network_bytes_per_s[0])
