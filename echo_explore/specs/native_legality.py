"""Which layouts PyTorch's own parallelism takes: FSDP2 with DTensor's tensor parallelism, torchtitan, and DDP."""

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs.layout import ParallelConfig
from echo_explore.specs.model import ModelSpec
from echo_explore.specs.recipe import StackProfile, TrainingRecipe
from echo_explore.specs.recompute import names_modules, recomputed_every
from echo_explore.specs.sharding import shard_ranks


def check_native(
    model: ModelSpec, layout: ParallelConfig, recipe: TrainingRecipe, stack: StackProfile, *, gpus_per_host: int
) -> None:
    """Refuse what a stack on FSDP2 or DDP does not do, or what is not traced for it yet.

    Raises:
        PlacementError: a degree that it does not have.
        SpecError: a kind of model or precision.
    """
    if stack.framework == "megatron":
        if recipe.recompute.startswith("full:every:"):
            rule = "Megatron runs the first layers of a chunk again, not every N-th"
            raise SpecError("recompute", recipe.recompute, rule, "use full:block:N, or a stack on fsdp2")
        if recipe.reshard_after_forward is not None:
            raise SpecError(
                "recipe.reshard_after_forward",
                recipe.reshard_after_forward,
                "Megatron keeps its parameters whole",
                "leave it out, or use a stack on fsdp2",
            )
        return
    for name, degree in (
        ("pp", layout.pipeline_parallel),
        ("cp", layout.context_parallel if stack.framework != "torchtitan" else 1),
        ("ep", layout.expert_parallel),
        ("etp", layout.expert_tensor_parallel),
        ("tp", layout.tensor_parallel if stack.framework == "ddp" else 1),
    ):
        if degree > 1:
            raise PlacementError(
                f"layout.{name}",
                degree,
                f"is not traced for {stack.framework}",
                f"use {name}=1 or --framework megatron",
            )
    if stack.framework == "torchtitan":
        _check_torchtitan(model, layout, recipe)
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        raise PlacementError(
            "layout.sp", 0, "DTensor plans split the sequence between tensor-parallel layers", "add sp=1"
        )
    shards = shard_ranks(
        stack.sharding,
        replicas=layout.data_parallel * layout.context_parallel,
        tensor_parallel=layout.tensor_parallel,
        gpus_per_host=gpus_per_host,
    )
    if stack.fully_sharded and layout.data_parallel * layout.context_parallel % shards:
        raise PlacementError(
            "layout.dp", layout.data_parallel, f"hybrid sharding needs a multiple of {shards}", "fill whole hosts"
        )
    if layout.tensor_parallel > model.num_key_value_heads:
        raise PlacementError(
            "layout.tp",
            layout.tensor_parallel,
            f"DTensor splits num_key_value_heads = {model.num_key_value_heads}",
            "use a smaller tp",
        )
    if layout.tensor_parallel > 1 and model.position_embedding == "learned":
        raise PlacementError(
            "layout.tp", layout.tensor_parallel, "learned positions are not split by DTensor plans", "use tp=1"
        )
    if recipe.recompute.startswith("full:"):
        if stack.framework == "torchtitan" and not recomputed_every(recipe.recompute):
            rule = "torchtitan runs all layers again, or every N-th (selective_ac_option)"
            raise SpecError("recompute", recipe.recompute, rule, "use full, full:every:N or selective")
        if ":uniform:" in recipe.recompute:
            rule = f"{stack.framework} runs layers again one by one"
            raise SpecError("recompute", recipe.recompute, rule, "use full, full:block:N or full:every:N")
    if names_modules(recipe.recompute):
        rule = f"{stack.framework} has no modules to recompute by name"
        raise SpecError("recompute", recipe.recompute, rule, "use none, selective or full")
    if stack.framework == "ddp" and recipe.offload_layers:
        raise SpecError("recipe.offload_layers", recipe.offload_layers, "is not modelled for ddp", "leave it out")
    if stack.framework == "ddp" and recipe.recompute == "selective":
        raise SpecError("recompute", "selective", "is traced for fsdp2 and torchtitan only", "use none or full")
    for name, value in (("model.moe", model.moe), ("model.mla", model.mla)):
        if value is not None:
            raise SpecError(name, model.name, f"is not traced for {stack.framework}", "use --framework megatron")
    if model.activation == "quick-geglu":
        rule = f"is not traced for {stack.framework}"
        raise SpecError("model.activation", model.activation, rule, "use --framework megatron")
    if stack.framework == "ddp" and recipe.precision not in ("fp32", "bf16", "fp16"):
        raise SpecError("precision", recipe.precision, "is not traced for ddp", "use bf16, fp16 or fp32")


def _check_torchtitan(model: ModelSpec, layout: ParallelConfig, recipe: TrainingRecipe) -> None:
    """Refuse what torchtitan's Llama 3 is not (0.2.2, 2026, models/llama3).

    Raises:
        SpecError: the model, attention or dropout is another.
        PlacementError: its sequence does not divide.
    """
    for name, wrong in differences_from_llama(model, recipe.sequence_length):
        if wrong:
            value = getattr(model, name)
            shown = value if isinstance(value, str | int | float) else model.name
            raise SpecError(f"model.{name}", shown, "is not torchtitan's Llama 3", "use --framework fsdp2 or megatron")
    if recipe.precision not in ("fp32", "bf16", "fp16", "fp8"):
        raise SpecError("precision", recipe.precision, "is not traced for torchtitan", "use bf16 or fp8")
    if layout.context_parallel > 1 and recipe.context_exchange == "a2a":
        raise SpecError(
            "recipe.context_exchange", "a2a", "PyTorch's context parallelism has no such", "use p2p or all_gather"
        )
    if recipe.attention == "unfused":
        raise SpecError("attention", "unfused", "torchtitan runs a fused kernel", "use flash, or --framework fsdp2")
    if recipe.dropout:
        raise SpecError("recipe.dropout", recipe.dropout, "torchtitan's Llama 3 has none", "use 0")
    parts = layout.tensor_parallel * (2 * layout.context_parallel if layout.context_parallel > 1 else 1)
    if recipe.sequence_length % parts:
        raise PlacementError(
            "sequence_length", recipe.sequence_length, f"torchtitan wants a multiple of {parts}", "change tp or cp"
        )


def differences_from_llama(model: ModelSpec, sequence_length: int) -> tuple[tuple[str, bool], ...]:
    """Fields of a model, and whether each differs from torchtitan's Llama 3."""
    return (
        ("normalization", model.normalization != "rmsnorm"),
        ("activation", model.activation != "swiglu"),
        ("position_embedding", model.position_embedding != "rope"),
        ("linear_bias", model.linear_bias),
        ("qkv_bias", model.qkv_bias),
        ("qk_norm", model.qk_norm),
        ("moe", model.moe is not None),
        ("mla", model.mla is not None),
        ("attention_window", 0 < model.attention_window < sequence_length),
        ("attention_sink", model.attention_sink),
        ("multi_token_prediction_layers", model.multi_token_prediction_layers > 0),
        ("tied_embeddings", model.tied_embeddings),
        ("embedding_norm", model.embedding_norm),
        ("head_dim", model.head_dim * model.num_attention_heads != model.hidden_size),
    )
