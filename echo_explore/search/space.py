"""The legal points of a search space, in an order that depends on nothing but the space.

Legal is decided by `specs` alone (`fill_data_parallel`, `layers_of_chunks`, `check_legal`, `check_native`): there is no
second copy of those rules here. What this module adds are the choices of the space and the rules that its user wrote.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import cast

from echo_explore.core import PlacementError, SpecError, content_hash, nearest
from echo_explore.core.expressions import Expression, Number, parse_expression
from echo_explore.search.point import SearchPoint
from echo_explore.specs import (
    Candidate,
    ClusterSpec,
    ModelSpec,
    ParallelConfig,
    SearchSpace,
    StackProfile,
    TrainingRecipe,
    check_legal,
    check_native,
    fill_data_parallel,
    layers_of_chunks,
    load_cluster,
    load_model,
    load_stack,
    make_candidate,
    parse_placement,
)
from echo_explore.specs.base import validate
from echo_explore.specs.placement import order_that_matters, placement_number
from echo_explore.specs.recipe import SEARCHED_SCHEDULES, ScheduleName
from echo_explore.specs.recompute import KINDS, normal_recompute, recompute_number
from echo_explore.specs.schedules import default_schedule, resolved_schedule

OBJECTIVES = ("step_time_s", "cost_usd", "energy_j")
"""What can be minimised: seconds, US dollars and joules of one step."""
_OBJECTIVE_OF_FLAG = {"step_time": "step_time_s", "cost": "cost_usd", "energy": "energy_j"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The choices of every axis, spelled out and checked; every entry is in increasing order."""

    num_gpus: tuple[int, ...]
    tensor_parallel: tuple[int, ...]
    pipeline_parallel: tuple[int, ...]
    virtual_pipeline: tuple[int, ...]
    context_parallel: tuple[int, ...]
    expert_parallel: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    recompute: tuple[str, ...]
    sequence_parallel: tuple[bool, ...]
    placement: tuple[str, ...]
    schedule: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ResolvedSpace:
    """A search space with everything it names loaded."""

    space: SearchSpace
    model: ModelSpec
    cluster: ClusterSpec
    stack: StackProfile

    @cached_property
    def axes(self) -> Axes:
        """The choices of every axis."""
        return _axes(self)

    @cached_property
    def objectives(self) -> tuple[str, ...]:
        """Names of what is minimised, a subset of `OBJECTIVES`."""
        return _objectives(self)

    @cached_property
    def hash(self) -> str:
        """Content hash of the space and of the model, cluster and stack files that it names."""
        parts = (self.space, self.model, self.cluster, self.stack)
        return content_hash([part.model_dump(mode="json", exclude={"description"}) for part in parts])

    def candidate(self, point: SearchPoint) -> Candidate:
        """The candidate of a point.

        Raises:
            SpecError: the point is not legal.
        """
        return make_candidate(
            model=self.model,
            cluster=self.cluster,
            layout=_layout(point),
            recipe=_recipe(self, point.micro_batch_size, point.recompute, point.schedule),
            stack=self.stack,
            num_gpus=point.num_gpus,
            placement=parse_placement(point.placement),
        )


def resolve_space(space: SearchSpace) -> ResolvedSpace:
    """The space with its model, cluster and stack loaded.

    Raises:
        SpecError: one of them is not known, or the space asks for what cannot be.
    """
    resolved = ResolvedSpace(
        space=space,
        model=load_model(space.model),
        cluster=load_cluster(space.cluster),
        stack=load_stack(space.recipe.stack),
    )
    _ = resolved.axes, resolved.objectives, _rules(resolved)
    return resolved


def with_objective(space: SearchSpace, text: str) -> SearchSpace:
    """The space with its objective replaced by `step_time`, `cost`, `energy` or a comma-separated list of them.

    Raises:
        SpecError: another name.
    """
    names = [part.strip() for part in text.split(",")]
    known = _OBJECTIVE_OF_FLAG | {name: name for name in OBJECTIVES}
    for name in names:
        if name not in known:
            hint = ", ".join(nearest(name, _OBJECTIVE_OF_FLAG))
            raise SpecError("objective", text, f"unknown objective {name!r}", f"use {hint}")
    objective = space.objective.model_copy(update={"minimize": tuple(known[name] for name in names)})
    return space.model_copy(update={"objective": objective})


def enumerate_points(resolved: ResolvedSpace) -> tuple[SearchPoint, ...]:
    """Every legal point once, in `SearchPoint.order`.

    Raises:
        SpecError: a rule is wrong, or there is no legal point (names the most frequent reason).
    """
    rules = _rules(resolved)
    reasons: Counter[str] = Counter()
    points = [
        point
        for layout in _legal_layouts(resolved, reasons)
        for point in _points_of_layout(resolved, layout, reasons)
        if _rules_hold(resolved, point, rules, reasons)
    ]
    if not points:
        reason = reasons.most_common(1)[0][0] if reasons else "an axis has no choice"
        raise SpecError("search", resolved.space.name, f"no point of the space is legal ({reason})", "widen an axis")
    return tuple(sorted(set(points), key=lambda point: point.order))


def rule_names(resolved: ResolvedSpace, point: SearchPoint) -> dict[str, Number]:
    """What a rule may name, with the values that the point gives them."""
    recipe, model, cluster = resolved.space.recipe, resolved.model, resolved.cluster
    numbers: dict[str, Number] = {k: v for k, v in point.params().items() if isinstance(v, int)}
    numbers |= {f"recompute_{name}": point.recompute.split(":")[0] == name for name in KINDS}
    runs = resolved_schedule(point.schedule, point.pipeline_parallel, point.virtual_pipeline)
    numbers |= {f"schedule_{name.replace('-', '_')}": runs == name for name in SEARCHED_SCHEDULES if name != "auto"}
    unit = point.micro_batch_size * point.data_parallel
    return numbers | {
        "data_parallel": point.data_parallel,
        "num_micro_batches": recipe.global_batch_size // unit,
        "num_nodes": -(-point.num_gpus // cluster.node.num_gpus),
        "gpus_per_node": cluster.node.num_gpus,
        "scale_up_gpus": cluster.node.domain_gpus,
        "global_batch_size": recipe.global_batch_size,
        "sequence_length": recipe.sequence_length,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "num_experts": model.moe.num_experts if model.moe else 0,
    }


def _layout(point: SearchPoint) -> ParallelConfig:
    return _make_layout(
        point.tensor_parallel,
        point.pipeline_parallel,
        point.virtual_pipeline,
        point.context_parallel,
        point.expert_parallel,
        point.sequence_parallel,
    )


def _make_layout(tensor: int, pipeline: int, virtual: int, context: int, expert: int, sequence: bool) -> ParallelConfig:
    degrees = {
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "virtual_pipeline": virtual,
        "context_parallel": context,
        "expert_parallel": expert,
        "sequence_parallel": sequence,
    }
    return validate(ParallelConfig, degrees, where="layout.")


def _recipe(resolved: ResolvedSpace, micro_batch_size: int, recompute: str, schedule: str = "auto") -> TrainingRecipe:
    fixed = resolved.space.recipe
    return TrainingRecipe(
        global_batch_size=fixed.global_batch_size,
        micro_batch_size=micro_batch_size,
        sequence_length=fixed.sequence_length,
        precision=fixed.precision,
        attention=fixed.attention,
        context_exchange=fixed.context_exchange,
        fusion=fixed.fusion,
        optimizer=fixed.optimizer,
        recompute=recompute,
        schedule=cast(ScheduleName, schedule),
    )


def _legal_layouts(resolved: ResolvedSpace, reasons: Counter[str]) -> Iterator[ParallelConfig]:
    """Layouts whose degrees and layer split are legal, data_parallel filled in; batch and heads come later."""
    axes = resolved.axes
    split_rule = resolved.stack.layer_split_rule if resolved.space.search.uneven_stages else "none"
    degrees = product(axes.num_gpus, axes.tensor_parallel, axes.pipeline_parallel, axes.virtual_pipeline)
    for num_gpus, tensor, pipeline, virtual in degrees:
        for context, expert, sequence in product(axes.context_parallel, axes.expert_parallel, axes.sequence_parallel):
            if sequence and tensor == 1 and False in axes.sequence_parallel:
                continue  # the same point as without
            try:
                layout = _make_layout(tensor, pipeline, virtual, context, expert, sequence)
                layout = fill_data_parallel(layout, num_gpus)
                layers_of_chunks(resolved.model, layout, split_rule)
            except SpecError as error:
                reasons[error.rule] += 1
            else:
                yield layout


def _points_of_layout(resolved: ResolvedSpace, layout: ParallelConfig, reasons: Counter[str]) -> Iterator[SearchPoint]:
    placements = _placements(resolved, layout, reasons)
    axes = resolved.axes
    batches = product(axes.micro_batch_size, axes.recompute, _schedules(resolved, layout))
    for (micro_batch_size, recompute, schedule), placement in product(batches, placements):
        try:
            recipe = _recipe(resolved, micro_batch_size, recompute, schedule)
            check_legal(resolved.model, layout, recipe)
            gpus_per_host = resolved.cluster.node.num_gpus
            check_native(resolved.model, layout, recipe, resolved.stack, gpus_per_host=gpus_per_host)
        except SpecError as error:
            reasons[error.rule] += 1
            continue
        yield SearchPoint(
            num_gpus=layout.num_gpus,
            tensor_parallel=layout.tensor_parallel,
            pipeline_parallel=layout.pipeline_parallel,
            virtual_pipeline=layout.virtual_pipeline,
            context_parallel=layout.context_parallel,
            expert_parallel=layout.expert_parallel,
            micro_batch_size=micro_batch_size,
            recompute=recompute,
            sequence_parallel=layout.sequence_parallel,
            placement=placement,
            schedule=schedule,
        )


def _schedules(resolved: ResolvedSpace, layout: ParallelConfig) -> list[str]:
    """Schedules of the space; what Megatron runs with this layout is `auto`, whatever the space calls it."""
    usual = default_schedule(layout.pipeline_parallel, layout.virtual_pipeline)
    return list(dict.fromkeys("auto" if name == usual else name for name in resolved.axes.schedule))


def _placements(resolved: ResolvedSpace, layout: ParallelConfig, reasons: Counter[str]) -> list[str]:
    """Placements that fit the layout; of several that place all groups alike the first."""
    found: dict[tuple[str, tuple[int, ...]], str] = {}
    for text in resolved.axes.placement:
        placement = parse_placement(text)
        try:
            placement.check_fits(layout, max_gpus=resolved.cluster.max_gpus)
        except SpecError as error:
            reasons[error.rule] += 1
            continue
        found.setdefault((order_that_matters(placement.order, layout), placement.device_of_rank), text)
    return list(found.values())


def _rules(resolved: ResolvedSpace) -> tuple[Expression, ...]:
    some = SearchPoint(num_gpus=1, tensor_parallel=1, pipeline_parallel=1)
    names = rule_names(resolved, some)
    texts = resolved.space.constraints.rules
    return tuple(parse_expression(text, names=names, field=f"constraints.rules[{i}]") for i, text in enumerate(texts))


def _rules_hold(
    resolved: ResolvedSpace, point: SearchPoint, rules: tuple[Expression, ...], reasons: Counter[str]
) -> bool:
    if not rules:
        return True
    values = rule_names(resolved, point)
    for rule in rules:
        if not rule.holds(values):
            reasons[f"the rule {rule.text} does not hold"] += 1
            return False
    return True


def _axes(resolved: ResolvedSpace) -> Axes:
    search, layers = resolved.space.search, resolved.model.num_layers
    divisors = tuple(d for d in range(1, layers + 1) if layers % d == 0)
    pipeline = divisors if search.pipeline_parallel == "divisors" else search.pipeline_parallel
    virtual = divisors if search.virtual_pipeline == "divisors" else search.virtual_pipeline
    sizes = tuple(sorted(set(resolved.space.cluster_size.num_gpus)))
    if not sizes or sizes[0] < 1:
        raise SpecError("cluster_size.num_gpus", str(list(sizes)), "must be 1 or more", "give the GPUs of the job")
    if sizes[-1] > resolved.cluster.max_gpus:
        raise PlacementError(
            "cluster_size.num_gpus",
            sizes[-1],
            f"{resolved.cluster.name} has max_nodes * gpus = {resolved.cluster.max_gpus}",
            "use fewer or raise max_nodes",
        )
    return Axes(
        num_gpus=sizes,
        tensor_parallel=tuple(sorted(search.tensor_parallel)),
        pipeline_parallel=tuple(sorted(pipeline)),
        virtual_pipeline=tuple(sorted(virtual)),
        context_parallel=tuple(sorted(search.context_parallel)),
        expert_parallel=tuple(sorted(search.expert_parallel)),
        micro_batch_size=tuple(sorted(search.micro_batch_size)),
        recompute=tuple(sorted({normal_recompute(name) for name in search.recompute}, key=recompute_number)),
        sequence_parallel=tuple(sorted(search.sequence_parallel)),
        placement=tuple(sorted(search.placement, key=placement_number)),
        schedule=tuple(sorted(search.schedule, key=SEARCHED_SCHEDULES.index)),
    )


def _objectives(resolved: ResolvedSpace) -> tuple[str, ...]:
    names = resolved.space.objective.minimize
    if not names or len(set(names)) != len(names):
        raise SpecError("objective.minimize", str(list(names)), "needs each objective once", 'write ["step_time_s"]')
    for name in names:
        if name not in OBJECTIVES:
            hint = ", ".join(nearest(name, OBJECTIVES))
            raise SpecError("objective.minimize", name, "is not known", f"use {hint}")
    if "cost_usd" in names and resolved.cluster.price is None:
        raise SpecError(
            "objective.minimize",
            "cost_usd",
            f"cluster {resolved.cluster.name} has no price",
            'add price.gpu_hour = "2 USD/h"',
        )
    return names


def describe_axes(
    axes: Axes,
) -> Mapping[str, tuple[int, ...] | tuple[bool, ...] | tuple[str, ...]]:
    """Name to choices of every axis, in the order of `SearchPoint`."""
    return {name: getattr(axes, name) for name in Axes.__dataclass_fields__}
