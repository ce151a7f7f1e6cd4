"""The shape of a group whose ranks are known, on a cluster where rank r runs on device r."""

from collections.abc import Sequence

import numpy as np

from echo_explore.core import SpecError
from echo_explore.specs import ClusterSpec
from echo_explore.topology.placement import GroupShape


def shape_of_ranks(ranks: Sequence[int], cluster: ClusterSpec, *, world_size: int) -> GroupShape:
    """The shape of the group `ranks`, as if all ranks of the job were in groups like it.

    Ranks that lie unevenly over scale-up domains are spread evenly over as many.

    Raises:
        SpecError: a rank twice or outside of the world.
    """
    members = np.asarray(ranks, dtype=np.int64)
    if np.unique(members).size != members.size or members.min() < 0 or members.max() >= world_size:
        raise SpecError("ranks", list(ranks)[:8], f"must be distinct and below {world_size}", "name ranks of the job")
    domain = min(cluster.node.domain_gpus, world_size)
    num_nodes = int(np.unique(members // domain).size)
    ranks_per_node = -(-members.size // num_nodes)
    return GroupShape(
        num_ranks=int(members.size),
        ranks_per_node=ranks_per_node,
        groups_per_node=max(1, domain // ranks_per_node),
    )
