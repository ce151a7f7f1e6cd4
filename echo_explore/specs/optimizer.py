"""Which optimizer updates the weights, and where Megatron takes it."""

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs.layout import ParallelConfig
from echo_explore.specs.model import ModelSpec
from echo_explore.specs.recipe import MUON_DEFAULTS, NOT_WITH_MUON, StackProfile, TrainingRecipe

_NARROW: tuple[str, ...] = ("fp8", "mxfp8")


def check_optimizer(model: ModelSpec, layout: ParallelConfig, recipe: TrainingRecipe, stack: StackProfile) -> None:
    """Refuse what goes with Adam only.

    megatron-core 0.16.1, optimizer/muon.py: no distributed optimizer, no fp16, whole query groups on a rank.
    Megatron-LM of the same time, training/arguments.py: gradients reduced behind the backward, parameters gathered in
    8 bits with the distributed optimizer only (2026-12-01). The recipe is resolved by the stack.

    Raises:
        PlacementError: a rank holds a part of a query group.
        SpecError: a setting that does not go with Muon, or one of Muon without it.
    """
    if recipe.optimizer != "muon":
        for name in MUON_DEFAULTS:
            if getattr(recipe, name) is not None:
                rule = f"does not go with recipe.optimizer = {recipe.optimizer}"
                raise SpecError(f"recipe.{name}", getattr(recipe, name), rule, "leave it out, or set optimizer to muon")
        return
    if stack.framework != "megatron":
        raise SpecError("recipe.optimizer", "muon", f"is not known for {stack.framework}", "use --framework megatron")
    if recipe.lora_rank:
        raise SpecError("recipe.optimizer", "muon", "is not modelled with adapters", "leave lora_rank out, or use adam")
    for refused in NOT_WITH_MUON:
        if getattr(recipe, refused):
            raise SpecError(
                f"recipe.{refused}", True, "Megatron refuses it beside muon", "set it to false, or use adam"
            )
    if recipe.precision == "fp16":
        raise SpecError("precision", "fp16", "Megatron's muon takes no loss scaling", "use bf16, or adam")
    if recipe.precision in _NARROW and stack.narrow_parameters:
        rule = "weights in 8 bits only need the distributed optimizer, which muon has not"
        raise SpecError("recipe.optimizer", "muon", rule, "add --set stack.narrow_parameters=false, or use adam")
    if recipe.muon_split_qkv and model.mla is None and model.num_key_value_heads % layout.tensor_parallel:
        raise PlacementError(
            "layout.tp",
            layout.tensor_parallel,
            f"muon splits queries, keys and values by whole groups of {model.num_key_value_heads}",
            "use a smaller tp, or --set recipe.muon_split_qkv=false",
        )
