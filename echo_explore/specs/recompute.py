"""What is run again in the backward: nothing, whole layers, or named parts of layers, in one normal form."""

from typing import Annotated

from pydantic import AfterValidator

from echo_explore.core import SpecError
from echo_explore.specs.model import ModelSpec

KINDS = ("none", "selective", "full")
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Parts of a layer that megatron-core runs again by name (0.16.1, 2026, transformer_config.py, recompute_modules)."""
_PREFIX = "selective:"


def normal_recompute(text: str, *, field: str = "recompute") -> str:
    """`none`, `selective` (core attention), `full`, or `selective:` and sorted modules, each once.

    `selective:core_attn` is `selective`; messages name `field`.

    Raises:
        SpecError: another word, or a module that Megatron does not know.
    """
    if text in KINDS:
        return text
    rule = f"is not one of {', '.join(KINDS)} or selective:MODULE,..."
    if not text.startswith(_PREFIX):
        raise SpecError(field, text, rule, f"use {', '.join(KINDS)} or selective: with {', '.join(MODULES)}")
    modules = sorted({name.strip() for name in text.removeprefix(_PREFIX).split(",")})
    for name in modules:
        if name not in MODULES:
            raise SpecError(field, text, f"{name!r} is not a module of a layer", f"use {', '.join(MODULES)}")
    return "selective" if modules == ["core_attn"] else _PREFIX + ",".join(modules)


Recompute = Annotated[str, AfterValidator(lambda text: normal_recompute(text))]
"""A recipe's `recompute`; see `normal_recompute`."""


def modules_of(recompute: str) -> tuple[str, ...]:
    """The parts of a layer that a normal form runs again by name; none for `none` and `full`."""
    if recompute == "selective":
        return ("core_attn",)
    return tuple(recompute.removeprefix(_PREFIX).split(",")) if recompute.startswith(_PREFIX) else ()


def names_modules(recompute: str) -> bool:
    """Whether the form lists modules, which only Megatron has."""
    return recompute.startswith(_PREFIX)


def recompute_number(recompute: str) -> int:
    """A number for each normal form: none lowest, then sets of modules, full highest."""
    if recompute == "full":
        return 1 << len(MODULES)
    return sum(1 << MODULES.index(name) for name in modules_of(recompute))


def check_recompute(model: ModelSpec, recompute: str, *, overlap_shared_experts: bool) -> None:
    """Refuse modules that the model has not, and what megatron-core refuses (0.16.1, transformer_config.py, 2026).

    Raises:
        SpecError: names the module.
    """
    moe = model.moe
    lacking = {
        "mla_up_proj": (model.mla is None, "multi-latent attention"),
        "moe": (moe is None, "experts"),
        "moe_act": (moe is None, "experts"),
        "shared_experts": (moe is None or not moe.shared_ffn_hidden_size, "shared experts"),
    }
    for name in modules_of(recompute):
        wrong, what = lacking.get(name, (False, ""))
        if wrong:
            raise SpecError("recompute", recompute, f"{model.name} has no {what} for {name}", f"leave {name} out")
        if name == "shared_experts" and overlap_shared_experts:
            rule = "shared experts that run beside the exchange of tokens cannot run again"
            raise SpecError("recompute", recompute, rule, "use overlap_shared_experts = false or leave them out")
