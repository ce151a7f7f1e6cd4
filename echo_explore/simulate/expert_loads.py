"""Ranks of an expert group whose experts get unequal numbers of tokens: which are alike, each class traced once."""

from dataclasses import dataclass, replace

from echo_explore.specs import Candidate
from echo_explore.specs.expert_legality import routing_of
from echo_explore.tracing.request import TraceRequest, request_of

_ONE_BY_ONE = ("deepep", "hybridep")
"""Dispatchers that send a token once to a rank, however many of its experts it visits: each expert's load counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """The classes of an expert group.

    Attributes:
        class_of: (expert_parallel,) class of each rank; 0 is that of the busiest.
        requests: by class, the trace of a rank of it.
        shares: by class, what a rank of it gets over what it would get of balanced routing.
    """

    class_of: tuple[int, ...]
    requests: tuple[TraceRequest, ...]
    shares: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """Distinct loads."""
        return len(self.requests)


def expert_loads(candidate: Candidate) -> ExpertLoads:
    """The classes of the candidate's expert groups; one where loads are even, sizes are fixed or nothing is split."""
    request, recipe, moe = request_of(candidate), candidate.recipe, candidate.model.moe
    num_ranks = candidate.layout.expert_parallel
    fixed = recipe.expert_capacity_factor is not None or candidate.stack.framework != "megatron"
    if moe is None or num_ranks == 1 or not recipe.expert_load or fixed:
        return ExpertLoads(class_of=(0,), requests=(request,), shares=(1.0,))
    routing = routing_of(moe, recipe.expert_load)
    apart = candidate.model.linear_bias or candidate.model.activation == "quick-geglu"
    by_total = not apart and request.expert_dispatcher not in _ONE_BY_ONE
    class_of, first = routing.alike(num_ranks, by_total=by_total)
    shares = routing.shares(num_ranks)
    return ExpertLoads(
        class_of=class_of,
        requests=(request, *(replace(request, expert_rank=rank) for rank in first[1:])),
        shares=tuple(num_ranks * shares[rank] for rank in first),
    )
