"""Which axes of a candidate hold each other back on links that they share."""

from itertools import combinations
from typing import Final

from echo_explore.comm.coefficient_file import shipped_coefficients
from echo_explore.comm.paths import cluster_links
from echo_explore.comm.sharing import LinkUse, link_use, shared_rates
from echo_explore.graph import Axis, Collective
from echo_explore.specs import Candidate
from echo_explore.timeline import SharedLinks
from echo_explore.topology import group_shape

_KINDS: Final = {
    Axis.TENSOR: Collective.ALL_GATHER,
    Axis.CONTEXT: Collective.ALL_GATHER,
    Axis.EXPERT: Collective.ALL_TO_ALL,
    Axis.DATA: Collective.REDUCE_SCATTER,
    Axis.EXPERT_TENSOR: Collective.ALL_GATHER,
    Axis.EXPERT_MODEL: Collective.ALL_GATHER,
    Axis.EXPERT_DATA: Collective.REDUCE_SCATTER,
}
"""What an axis mostly runs; all rings of one group use links alike."""


def shared_links(candidate: Candidate) -> tuple[SharedLinks, ...]:
    """How much collectives of two axes slow each other down where a rank runs both at a time.

    # Approximation: a collective takes links for all of its time, its latency too (over-estimates small ones).
    # Approximation: transfers between stages share nothing (under-estimates).
    """
    layout = candidate.layout
    degrees = {
        Axis.TENSOR: layout.tensor_parallel,
        Axis.CONTEXT: layout.context_parallel,
        Axis.EXPERT: layout.expert_parallel,
        Axis.DATA: layout.data_parallel * layout.context_parallel,
    }
    if candidate.model.moe is not None:
        degrees |= {
            Axis.EXPERT_TENSOR: layout.expert_tensor_ranks,
            Axis.EXPERT_MODEL: layout.expert_gpus if layout.expert_tensor_ranks > 1 else 1,
            Axis.EXPERT_DATA: layout.expert_data_parallel,
        }
    links = cluster_links(candidate.cluster, shipped_coefficients())
    uses: dict[Axis, LinkUse] = {}
    for axis in (axis for axis, degree in degrees.items() if degree > 1):
        shape = group_shape(axis, layout, candidate.cluster, candidate.placement)
        if shape.num_ranks > 1:
            uses[axis] = link_use(_KINDS[axis], shape, links)
    found = []
    for first, second in combinations(uses, 2):
        rates = shared_rates(uses[first], uses[second])
        if rates.level is not None:
            found.append(
                SharedLinks(
                    first=first,
                    second=second,
                    first_slowdown=max(1.0, 1.0 / rates.first),
                    second_slowdown=max(1.0, 1.0 / rates.second),
                )
            )
    return tuple(found)
