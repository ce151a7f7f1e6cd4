"""Which layouts PyTorch's own parallelism takes: FSDP2 with DTensor's tensor parallelism, and DDP."""

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs.layout import ParallelConfig
from echo_explore.specs.model import ModelSpec
from echo_explore.specs.recipe import StackProfile, TrainingRecipe
from echo_explore.specs.recompute import names_modules
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
        ("cp", layout.context_parallel),
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
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        raise PlacementError(
            "layout.sp", 0, "DTensor plans of fsdp2 split the sequence between tensor-parallel layers", "add sp=1"
        )
    shards = shard_ranks(
        stack.sharding,
        data_parallel=layout.data_parallel,
        tensor_parallel=layout.tensor_parallel,
        gpus_per_host=gpus_per_host,
    )
    if stack.framework == "fsdp2" and layout.data_parallel % shards:
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
        rule = f"{stack.framework} runs all layers again or none"
        raise SpecError("recompute", recipe.recompute, rule, "use full")
    if names_modules(recipe.recompute):
        rule = f"{stack.framework} has no modules to recompute by name"
        raise SpecError("recompute", recipe.recompute, rule, "use none, selective or full")
    if stack.framework == "ddp" and recipe.recompute == "selective":
        raise SpecError("recompute", "selective", "is traced for fsdp2 only", "use none or full")
    for name, value in (("model.moe", model.moe), ("model.mla", model.mla)):
        if value is not None:
            raise SpecError(name, model.name, f"is not traced for {stack.framework}", "use --framework megatron")
    if stack.framework == "ddp" and recipe.precision not in ("fp32", "bf16", "fp16"):
        raise SpecError("precision", recipe.precision, "is not traced for ddp", "use bf16, fp16 or fp32")
