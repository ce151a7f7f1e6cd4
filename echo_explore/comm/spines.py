"""What switches above the leaves leave of a group's cards where all groups of an axis communicate at once.

Symbols: B bytes per second of the group out of a node, all groups' cards in use; M nodes of a group, k of them under
one leaf, r of its ranks in a node; h nodes a leaf, s nodes from one of the group's nodes to the next, so that k is
ceil(h/s); o bandwidth below over bandwidth above the leaves. Leaves are full and traffic spreads evenly. The share is

- rings, chains and trees of neighbours: min(1, k/o) for M > k: a leaf has h g/k rings of g groups a node, each of which
  leaves it once, over h g B / o;
- pairs (all-to-all): min(1, 1 / ((1 - p) o)), p = (k-1)/(M-1) being the part that stays under a leaf;
- sends over s nodes: min(1, h / (min(s, h) o)).

On rail-optimised fabrics a leaf holds one card of each host. NCCL's PXN hands data to the GPU of its host that has the
receiver's rail, so that pairs stay on a rail; without it only 1/r of them do: p = (k-1)/(M-1)/r. Pods under cores: the
same with the nodes of a pod and the product of both oversubscriptions; the least share counts. Equal to the flow engine
by tests. Dragonflies, tori, meshes and BiGraphs have no leaves in this sense: see `routed`.

References: "Doubling all2all performance with NVIDIA Collective Communication Library 2.12" (NVIDIA, 2022) for PXN.
"""

import numpy as np

from echo_explore.comm.paths import ClusterLinks, Floats, GroupArrays
from echo_explore.comm.routed import Pattern, RoutedFabric, RoutedShare, routed_share


def spine_share(groups: GroupArrays, links: ClusterLinks, pattern: Pattern, *, pxn: bool = True) -> Floats:
    """Share of B that the levels above the leaves leave to a pattern, 0..1; 1 inside one node.

    Raises:
        As `routed.routed_share`.
    """
    if links.routed is not None:
        return np.minimum(1.0, routed_headroom(groups, links, pattern))
    if pattern in ("tree", "exchange"):
        pattern = "neighbours"
    share = np.ones_like(groups.num_ranks)
    below, over = links.leaf_domains, links.oversubscription
    for level, factor in ((1.0, 1.0), (links.pod_leaves, links.core_oversubscription)):
        if level == 0.0:
            continue
        below, over = below * level, over * factor
        share = np.minimum(share, _level_share(groups, links, below, over, pattern, pxn))
    return np.where(groups.crosses, share, 1.0)


def routed_headroom(groups: GroupArrays, links: ClusterLinks, pattern: Pattern) -> Floats:
    """What a routed fabric could give to the groups of a domain over what their cards take; infinite inside one."""
    found = routed_columns(groups, links.routed, pattern)
    could = np.array([np.inf if f is None else f.bytes_per_s for f in found])
    takes = np.where(groups.crosses, groups.groups_per_node * groups.network_bytes_per_s, 1.0)
    return could / takes


def routed_step_s(groups: GroupArrays, links: ClusterLinks, pattern: Pattern) -> Floats | float:
    """Latency of a step beyond that of the fabric: its cables between switches; 0 on a Clos, which counts them in."""
    if links.routed is None:
        return 0.0
    found = routed_columns(groups, links.routed, pattern)
    return np.array([0.0 if f is None else f.extra_s for f in found])


def routed_columns(groups: GroupArrays, fabric: RoutedFabric | None, pattern: Pattern) -> list[RoutedShare | None]:
    """The share of each group; None inside one domain."""
    columns = zip(groups.num_nodes.tolist(), groups.node_stride.tolist(), strict=True)
    return [
        routed_share(fabric, int(nodes), int(stride), pattern) if fabric is not None and nodes > 1 else None
        for nodes, stride in columns
    ]


def _level_share(
    groups: GroupArrays, links: ClusterLinks, below: float, over: float, pattern: Pattern, pxn: bool
) -> Floats:
    """The share that one level leaves, with `below` nodes under a switch and oversubscription `over`."""
    nodes, stride = groups.num_nodes, groups.node_stride
    if pattern == "shift":
        return np.minimum(1.0, below / (np.minimum(stride, below) * over))
    near = np.minimum(nodes, np.ceil(below / stride))
    if pattern == "neighbours":
        return np.where(nodes > near, np.minimum(1.0, near / over), 1.0)
    stays = (near - 1.0) / np.maximum(nodes - 1.0, 1.0)
    if links.has_rails and not pxn:
        stays = stays / groups.ranks_per_node
    return 1.0 / np.maximum(1.0, (1.0 - stays) * over)
