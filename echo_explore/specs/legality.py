"""Which layouts a framework accepts. Legal = what megatron-core's config, model building and schedule accept."""

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs.expert_legality import check_experts
from echo_explore.specs.layout import ParallelConfig
from echo_explore.specs.model import ModelSpec
from echo_explore.specs.recipe import TrainingRecipe
from echo_explore.specs.recompute import check_recompute
from echo_explore.specs.schedules import build_schedule, resolved_schedule


def check_legal(model: ModelSpec, layout: ParallelConfig, recipe: TrainingRecipe) -> None:
    """Refuse what the framework would refuse; the split of layers is checked by `layers_of_chunks`.

    Raises:
        PlacementError: a degree does not divide what it splits.
        SpecError: the batch or the sequence does not fit the layout.
    """
    tensor, context = layout.tensor_parallel, layout.context_parallel
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    if heads % tensor:
        raise PlacementError(
            "layout.tp", tensor, f"must divide num_attention_heads = {heads}", f"use {_divisors(heads, 64)}"
        )
    if groups % tensor and tensor % groups:
        raise PlacementError(
            "layout.tp", tensor, f"must divide num_key_value_heads = {groups} or be a multiple", "change tp"
        )
    if model.ffn_hidden_size % tensor:
        raise PlacementError("layout.tp", tensor, f"must divide ffn_hidden_size = {model.ffn_hidden_size}", "change tp")
    if layout.sequence_parallel and (recipe.sequence_length // context) % tensor:
        raise PlacementError(
            "layout.sp", 1, f"sequence_length / cp must be divisible by tp = {tensor}", "use sp=0 or change tp"
        )
    if context > 1 and recipe.sequence_length % (2 * context):
        raise PlacementError(
            "layout.cp", context, f"sequence_length must be divisible by 2*cp = {2 * context}", "change cp"
        )
    if model.position_embedding == "learned" and recipe.sequence_length > model.max_sequence_length:
        raise SpecError(
            "sequence_length",
            recipe.sequence_length,
            f"{model.name} has {model.max_sequence_length} learned positions",
            f"use at most {model.max_sequence_length}",
        )
    if recipe.lora_targets is not None and recipe.lora_rank == 0:
        raise SpecError("recipe.lora_targets", "(given)", "needs recipe.lora_rank", "give lora_rank, or leave it out")
    _check_offload(model, layout, recipe)
    check_experts(model, layout, recipe)
    check_recompute(model, recipe.recompute, overlap_shared_experts=bool(recipe.overlap_shared_experts))
    _check_batch(layout, recipe)


def _check_offload(model: ModelSpec, layout: ParallelConfig, recipe: TrainingRecipe) -> None:
    """What megatron-core 0.16.1 refuses beside cpu_offloading (transformer_config.py, 2026-12-01)."""
    count = recipe.offload_layers
    for wrong, rule, fix in (
        (count >= model.num_layers, f"must be below num_layers = {model.num_layers}", "move fewer layers"),
        (layout.pipeline_parallel > 1, "does not go with pipeline stages", "use pp=1"),
        (recipe.recompute != "none", "does not go with recomputation", "use --recompute none"),
    ):
        if count and wrong:
            raise SpecError("recipe.offload_layers", count, rule, fix)


def _check_batch(layout: ParallelConfig, recipe: TrainingRecipe) -> None:
    unit = recipe.micro_batch_size * layout.data_parallel
    if recipe.global_batch_size % unit:
        near = max(1, recipe.global_batch_size // unit) * unit
        raise SpecError(
            "global_batch_size",
            recipe.global_batch_size,
            f"must be divisible by micro_batch_size * dp = {recipe.micro_batch_size} * {layout.data_parallel} = {unit}",
            f"use for example {near}",
        )
    num_micro_batches = recipe.global_batch_size // unit
    schedule = resolved_schedule(recipe.schedule, layout.pipeline_parallel, layout.virtual_pipeline)
    if schedule == "interleaved" and num_micro_batches % layout.pipeline_parallel:
        raise PlacementError(
            "layout.vpp",
            layout.virtual_pipeline,
            f"{num_micro_batches} micro-batches: interleaving needs multiples of pp = {layout.pipeline_parallel}",
            "change vpp, pp, micro_batch_size or global_batch_size",
        )
    build_schedule(
        schedule,
        pipeline_parallel=layout.pipeline_parallel,
        virtual_pipeline=layout.virtual_pipeline,
        num_micro_batches=num_micro_batches,
        lines=recipe.schedule_lines,
    )


def _divisors(number: int, limit: int) -> str:
    return ", ".join(str(d) for d in range(1, limit + 1) if number % d == 0)
