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
by tests.

References: "Doubling all2all performance with NVIDIA Collective Communication Library 2.12" (NVIDIA, 2022) for PXN.
"""

from typing import Literal

import numpy as np

from echo_explore.comm.paths import ClusterLinks, Floats, GroupArrays

Pattern = Literal["neighbours", "pairs", "shift"]


def spine_share(groups: GroupArrays, links: ClusterLinks, pattern: Pattern, *, pxn: bool = True) -> Floats:
    """Share of B that the levels above the leaves leave to a pattern, 0..1; 1 inside one node."""
    share = np.ones_like(groups.num_ranks)
    below, over = links.leaf_domains, links.oversubscription
    for level, factor in ((1.0, 1.0), (links.pod_leaves, links.core_oversubscription)):
        if level == 0.0:
            continue
        below, over = below * level, over * factor
        share = np.minimum(share, _level_share(groups, links, below, over, pattern, pxn))
    return np.where(groups.crosses, share, 1.0)


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
