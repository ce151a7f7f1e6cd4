"""Which layouts a framework accepts. Legal = what megatron-core's config, model building and schedule accept."""

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs.layout import ParallelConfig
from echo_explore.specs.model import ModelSpec
from echo_explore.specs.recipe import TrainingRecipe


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
    if 0 < model.attention_window < recipe.sequence_length:
        raise SpecError(
            "sequence_length",
            recipe.sequence_length,
            f"{model.name} looks back {model.attention_window} tokens only, which is not modelled",
            f"use at most {model.attention_window}",
        )
    _check_experts(model, layout)
    _check_batch(layout, recipe)


def _check_experts(model: ModelSpec, layout: ParallelConfig) -> None:
    expert, split, moe = layout.expert_parallel, layout.expert_tensor_ranks, model.moe
    if moe is None:
        for key, degree in (("ep", expert), ("etp", layout.expert_tensor_parallel)):
            if degree > 1:
                raise PlacementError(f"layout.{key}", degree, f"{model.name} has no experts", f"leave {key} out")
        return
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        rule = "experts beside tensor parallelism need sequence parallelism (megatron-core, moe_layer.py)"
        raise PlacementError("layout.sp", 0, rule, "add sp=1")
    if expert == 1 and split != layout.tensor_parallel:
        rule = f"without expert parallelism experts are split as dense layers are, over tp = {layout.tensor_parallel}"
        raise PlacementError("layout.etp", split, rule, "leave etp out")
    if moe.num_experts % expert:
        raise PlacementError("layout.ep", expert, f"must divide num_experts = {moe.num_experts}", "change ep")
    if moe.ffn_hidden_size % split:
        rule = f"must divide moe.ffn_hidden_size = {moe.ffn_hidden_size}"
        raise PlacementError("layout.etp", split, rule, "change etp")
    if moe.shared_ffn_hidden_size % layout.tensor_parallel:
        rule = f"must divide moe.shared_ffn_hidden_size = {moe.shared_ffn_hidden_size}"
        raise PlacementError("layout.tp", layout.tensor_parallel, rule, "change tp")
    spread = layout.tensor_parallel * layout.context_parallel * layout.data_parallel
    if spread % layout.expert_gpus:
        raise PlacementError(
            "layout.ep", expert, f"etp*ep = {layout.expert_gpus} must divide tp*cp*dp = {spread}", "change ep or dp"
        )


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
    if layout.virtual_pipeline > 1 and num_micro_batches % layout.pipeline_parallel:
        raise PlacementError(
            "layout.vpp",
            layout.virtual_pipeline,
            f"{num_micro_batches} micro-batches: interleaving needs multiples of pp = {layout.pipeline_parallel}",
            "change vpp, pp, micro_batch_size or global_batch_size",
        )
    wanted = (
        "no-pipelining" if layout.pipeline_parallel == 1 else "interleaved" if layout.virtual_pipeline > 1 else "1f1b"
    )
    if recipe.schedule not in ("auto", wanted):
        raise PlacementError(
            "schedule", recipe.schedule, f"pp and vpp of the layout mean {wanted}", "leave --schedule out"
        )


def _divisors(number: int, limit: int) -> str:
    return ", ".join(str(d) for d in range(1, limit + 1) if number % d == 0)
