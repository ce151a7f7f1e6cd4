"""The cheapest changes that make a candidate fit into memory, each checked by a new profile."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from echo_explore.core import SpecError, format_bytes
from echo_explore.memory.bound import memory_lower_bound
from echo_explore.memory.profile import MemoryProfile
from echo_explore.specs import Candidate, ParallelConfig, TrainingRecipe, make_candidate
from echo_explore.specs.base import validate
from echo_explore.specs.recompute import recomputes_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A candidate that fits.

    Attributes:
        description: one line: what was changed, and the new peak.
        candidate: with the change.
        profile: of `candidate`.
        cost_fraction: guessed rise of the step time, which orders changes; not a prediction.
    """

    description: str
    candidate: Candidate
    profile: MemoryProfile
    cost_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One change of layout or recipe; `family` keeps two settings of the same field apart."""

    family: str
    text: str
    cost_fraction: float
    layout: dict[str, int | bool]
    recipe: dict[str, str | int | bool]


# Guessed shares of the step time, to order changes by; every proposal is to be predicted before use.
_COSTS = {
    "distributed_optimizer": 0.001,  # reduce-scatter + all-gather = all-reduce; arXiv 1910.02054 (2019)
    "sequence_parallel": 0.002,  # same bytes as without; arXiv 2205.05198 (2022), section 4.2.2
    "selective": 0.03,  # 1.6-4 % of the step; arXiv 2205.05198 (2022), table 4 and section 5
    "micro_batch_size": 0.05,  # arXiv 2104.04473 (2021), figure 7: 1.0-1.3x between neighbours
    "pipeline_parallel": 0.08,  # larger bubble (p - 1) / m; arXiv 2104.04473 (2021), section 2.2
    "tensor_parallel": 0.10,  # more communication and thinner kernels; arXiv 2104.04473 (2021), figure 13
    "full": 0.33,  # a second forward: 30-40 %; arXiv 2205.05198 (2022), section 5
}


def cheapest_changes(
    candidate: Candidate,
    profile_of: Callable[[Candidate], MemoryProfile],
    *,
    count: int = 2,
    max_profiles: int = 12,
) -> tuple[Change, ...]:
    """Up to `count` changes that make the candidate fit, cheapest first by a guessed order of time cost.

    Single changes come before combinations of higher cost; a combination that holds a change already found is left
    out. Nothing is proposed that was not profiled.

    Args:
        candidate: one that does not fit.
        profile_of: the profile of another candidate; may need a new trace.
        count: how many to look for.
        max_profiles: calls of `profile_of` after which to give up.
    """
    found: list[tuple[frozenset[str], Change]] = []
    calls = 0
    for options in _ordered(_options(candidate)):
        names = frozenset(option.text for option in options)
        if any(smaller <= names for smaller, _ in found):
            continue
        changed = _apply(candidate, options)
        if changed is None or memory_lower_bound(changed) > changed.cluster.device.memory_bytes:
            continue
        if calls == max_profiles:
            break
        calls += 1
        profile = profile_of(changed)
        if profile.fits:
            text = " and ".join(option.text for option in options)
            found.append((names, _change(text, changed, profile, sum(o.cost_fraction for o in options))))
        if len(found) == count:
            break
    return tuple(change for _, change in found)


def _change(text: str, candidate: Candidate, profile: MemoryProfile, cost: float) -> Change:
    return Change(
        description=f"{text}: peak {format_bytes(profile.peak_bytes)}",
        candidate=candidate,
        profile=profile,
        cost_fraction=cost,
    )


def _ordered(options: list[_Option]) -> Iterator[tuple[_Option, ...]]:
    """Sets of one, two or three options of different families, by total cost."""
    sets = [
        chosen
        for size in (1, 2, 3)
        for chosen in combinations(options, size)
        if len({option.family for option in chosen}) == size
    ]
    yield from sorted(sets, key=lambda chosen: (sum(o.cost_fraction for o in chosen), len(chosen)))


def _options(candidate: Candidate) -> list[_Option]:
    layout, recipe = candidate.layout, candidate.recipe
    options: list[_Option] = []

    def add(
        family: str, text: str, cost: str, *, layout: dict[str, int | bool] | None = None, **recipe: str | int
    ) -> None:
        options.append(
            _Option(family=family, text=text, cost_fraction=_COSTS[cost], layout=layout or {}, recipe=dict(recipe))
        )

    if not recipe.distributed_optimizer and layout.data_parallel * layout.context_parallel > 1:
        add("optimizer", "distributed_optimizer = true", "distributed_optimizer", distributed_optimizer=True)
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        add("sequence", "sp = 1", "sequence_parallel", layout={"sequence_parallel": True})
    if recipe.recompute == "none":
        add("recompute", "recompute = selective", "selective", recompute="selective")
    if not recomputes_layers(recipe.recompute) or ":block:" in recipe.recompute:
        add("recompute", "recompute = full", "full", recompute="full")
    if recipe.micro_batch_size % 2 == 0:
        half = recipe.micro_batch_size // 2
        add("micro-batch", f"micro_batch_size = {half}", "micro_batch_size", micro_batch_size=half)
    add("pipeline", f"pp = {2 * layout.pipeline_parallel}", "pipeline_parallel", layout=_doubled_pipeline(layout))
    tensor = 2 * layout.tensor_parallel
    if tensor <= candidate.cluster.node.domain_gpus:
        add("tensor", f"tp = {tensor}", "tensor_parallel", layout={"tensor_parallel": tensor})
    return options


def _doubled_pipeline(layout: ParallelConfig) -> dict[str, int | bool]:
    """Twice the stages; half the chunks a stage where that keeps the split of layers."""
    virtual = layout.virtual_pipeline
    keep = {"virtual_pipeline": virtual // 2} if virtual % 2 == 0 else {}
    return {"pipeline_parallel": 2 * layout.pipeline_parallel, **keep}


def _apply(candidate: Candidate, options: tuple[_Option, ...]) -> Candidate | None:
    """The candidate with the changes on the same number of GPUs, or None where that is not legal."""
    layout: dict[str, object] = candidate.layout.model_dump() | {"data_parallel": 0}
    recipe: dict[str, object] = candidate.recipe.model_dump() | {"schedule": "auto"}
    for option in options:
        layout |= option.layout
        recipe |= option.recipe
    if layout["pipeline_parallel"] != candidate.layout.pipeline_parallel:
        layout["layer_split"] = ()
    try:
        return make_candidate(
            model=candidate.model,
            cluster=candidate.cluster,
            layout=validate(ParallelConfig, layout, where="layout."),
            recipe=validate(TrainingRecipe, recipe, where="recipe."),
            stack=candidate.stack,
            num_gpus=candidate.num_gpus,
            placement=candidate.placement,
        )
    except SpecError:
        return None
