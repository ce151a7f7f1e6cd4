"""Where the ranks of each parallelism axis lie: how many share a node, how many nodes a group spans."""

from dataclasses import dataclass

from echo_explore.graph.kinds import Axis
from echo_explore.specs import ClusterSpec, ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A communication group and the groups like it that communicate at the same time.

    Attributes:
        num_ranks: GPUs in the group.
        ranks_per_node: of these in one scale-up domain.
        groups_per_node: groups of this axis with ranks in one domain, which share its network cards.
    """

    num_ranks: int
    ranks_per_node: int
    groups_per_node: int = 1

    @property
    def num_nodes(self) -> int:
        """Scale-up domains that the group spans."""
        return -(-self.num_ranks // self.ranks_per_node)
