"""Which optimizer updates the weights, in which types it keeps its states, and where Megatron takes it."""

from dataclasses import dataclass
from typing import Final

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs.layout import ParallelConfig
from echo_explore.specs.model import ModelSpec
from echo_explore.specs.recipe import MUON_DEFAULTS, NOT_WITH_MUON, StackProfile, TrainingRecipe

_NARROW: tuple[str, ...] = ("fp8", "mxfp8")
STATE_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
_OF_STATES: Final = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStates:
    """In which types Adam keeps its states, and who holds the main weights.

    Attributes:
        moments: types of the first and the second moment.
        main: type of main weights.
        holds_main: Adam holds the main weights, reads gradients as they add up and writes the weights; else Megatron
            casts gradients to fp32 ahead of it and main weights behind it.
        completes: main weights of fp32 are the weights in bf16 and the 16 bits that those have not.
    """

    moments: tuple[str, str] = ("fp32", "fp32")
    main: str = "fp32"
    holds_main: bool = False
    completes: bool = False

    @property
    def main_bytes(self) -> float:
        """Of one main weight beside the weight itself."""
        return 2.0 if self.completes else STATE_BYTES[self.main]

    @property
    def moment_bytes(self) -> float:
        """Of both moments of a weight."""
        return sum(STATE_BYTES[kind] for kind in self.moments)

    @property
    def widened(self) -> tuple[str, ...]:
        """Types of the states that are cast to fp32 while Adam runs."""
        states = (*self.moments, *((self.main,) if self.holds_main else ()))
        return tuple(kind for kind in states if kind != "fp32")


def adam_states(recipe: TrainingRecipe, stack: StackProfile) -> AdamStates:
    """What a recipe and its stack make of Adam's states.

    In 8 bits but those of delayed scaling Megatron keeps main weights of fp32 itself (megatron-core 0.16.1,
    optimizer_config.py, use_precision_aware_optimizer_no_fp8_or_ds_fp8; 2026-12-01). A silent recipe has fp32.
    """
    if not recipe.precision_aware_optimizer:
        return AdamStates()
    main = recipe.main_params_dtype or "fp32"
    delayed = recipe.precision == "fp8" and stack.fp8_scales == "known"
    holds = main != "fp32" or delayed or recipe.precision not in _NARROW
    return AdamStates(
        moments=(recipe.exp_avg_dtype or "fp32", recipe.exp_avg_sq_dtype or "fp32"),
        main=main,
        holds_main=holds,
        completes=holds and main == "fp32" and recipe.precision != "fp16",
    )


def check_optimizer(model: ModelSpec, layout: ParallelConfig, recipe: TrainingRecipe, stack: StackProfile) -> None:
    """Refuse what goes with Adam only.

    megatron-core 0.16.1, optimizer/muon.py: no distributed optimizer, no fp16, whole query groups on a rank.
    Megatron-LM of the same time, training/arguments.py: gradients reduced behind the backward, parameters gathered in
    8 bits with the distributed optimizer only (2026-12-01). The recipe is resolved by the stack.

    Raises:
        PlacementError: a rank holds a part of a query group.
        SpecError: a setting that does not go with Muon, or one of Muon without it; the same of a precision-aware Adam.
    """
    _check_states(recipe, stack)
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


def _check_states(recipe: TrainingRecipe, stack: StackProfile) -> None:
    """Refuse what a precision-aware Adam does not take.

    megatron-core 0.16.1, optimizer_config.py: Adam with the distributed optimizer; clip_grads.py: gradients in fp32 or
    bf16 (2026-12-01). Transformer Engine's kernel for weights in 8 bits alone takes main weights as a whole.
    """
    if not recipe.precision_aware_optimizer:
        for name in _OF_STATES:
            if getattr(recipe, name) is not None:
                fix = "add --set recipe.precision_aware_optimizer=true, or leave it out"
                raise SpecError(f"recipe.{name}", getattr(recipe, name), "needs a precision-aware optimizer", fix)
        return
    name, states = "recipe.precision_aware_optimizer", adam_states(recipe, stack)
    narrow = stack.narrow_parameters and recipe.precision in _NARROW
    for wrong, rule, fix in (
        (stack.framework != "megatron", f"is not known for {stack.framework}", "use --framework megatron"),
        (recipe.optimizer != "adam", "Megatron takes it with adam only", "use adam, or leave it out"),
        (not recipe.distributed_optimizer, "needs the distributed optimizer", "set recipe.distributed_optimizer=true"),
        (recipe.precision == "fp32", "there are no main weights in fp32", "use bf16, or leave it out"),
        (
            stack.main_gradient_dtype(recipe.precision) == "fp16" and states.holds_main,
            "takes gradients in fp32 or bf16",
            "add --set stack.gradient_dtype=fp32",
        ),
        (
            narrow and states.holds_main,
            "is not modelled with weights in 8 bits only and main weights in Adam",
            "add --set stack.narrow_parameters=false, or leave it out",
        ),
    ):
        if wrong:
            raise SpecError(name, True, rule, fix)
