"""One collective to price, and its price."""

from dataclasses import dataclass

from echo_explore.graph.kinds import Collective, DType
from echo_explore.topology import GroupShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest:
    """A collective over a group.

    Attributes:
        collective: its kind; SEND prices one transfer between two ranks (group of 2: ranks_per_node 2 inside a node).
        message_bytes: nccl-tests' S.
        group: where its ranks lie.
        dtype: of the elements; NONE where it is not known. Switches reduce no 8-bit types.
        imbalance: of an all-to-all with unequal parts, the most bytes that a rank sends or receives over S.
    """

    collective: Collective
    message_bytes: float
    group: GroupShape
    dtype: DType = DType.NONE
    imbalance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Seconds alone, and the standard deviation of their log."""

    time_s: float
    sigma_log: float
