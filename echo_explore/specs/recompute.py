"""What is run again in the backward: nothing, whole layers, or named parts of layers, in one normal form."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator

from echo_explore.core import SpecError
from echo_explore.specs.model import ModelSpec

KINDS = ("none", "selective", "full")
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Parts of a layer that megatron-core runs again by name (0.16.1, 2026, transformer_config.py, recompute_modules)."""
_PREFIX = "selective:"
_LAYERS = re.compile(r"full:(block|uniform|every):([1-9][0-9]{0,4})")
"""Megatron's recompute_method and recompute_num_layers beside full recomputation; `every` is torchtitan's."""
_MOST_LAYERS = 100_000  # above the largest count that _LAYERS takes


def normal_recompute(text: str, *, field: str = "recompute") -> str:
    """`none`, `selective` (core attention), `full`, `full:` with method and count, or `selective:` and sorted modules.

    `full:block:N`: the first N layers of each chunk run again, one by one. `full:uniform:N`: all do, N together from
    the input of the first. `full:every:N`: every N-th layer does. `full` is also `full:uniform:1` and `full:every:1`,
    `selective:core_attn` is `selective`; messages name `field`.

    Raises:
        SpecError: another word, or a module that Megatron does not know.
    """
    if text in KINDS:
        return text
    if _LAYERS.fullmatch(text):
        return "full" if text in ("full:uniform:1", "full:every:1") else text
    if text.startswith("full:"):
        rule = "is not full:block:N, full:uniform:N or full:every:N with N layers, at least 1"
        raise SpecError(field, text, rule, "write for example full:block:4, or full for all layers")
    rule = f"is not one of {', '.join(KINDS)}, full:block:N, full:uniform:N or selective:MODULE,..."
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


def recomputes_layers(recompute: str) -> bool:
    """Whether whole layers run again: all of them, or some."""
    return recompute.split(":")[0] == "full"


def recomputed_groups(recompute: str, num_layers: int) -> tuple[int, ...]:
    """Of each layer of a chunk: 0 if it is kept, else how many layers run again together with it, itself included.

    Empty where all layers do the same, each for itself (`none`, `selective`, `full`). As megatron-core 0.16.1 does it
    (transformer_block.py, _checkpointed_forward, 2026-12-01), `every` as torchtitan 0.2.2 (2025,
    distributed/activation_checkpoint.py, selective_ac_option, a number).
    """
    found = _LAYERS.fullmatch(recompute)
    if not found:
        return ()
    count = int(found[2])
    if found[1] == "uniform":
        return (count,) * num_layers
    if found[1] == "every":
        return tuple(int((layer + 1) % count == 0) for layer in range(num_layers))
    return (1,) * min(count, num_layers) + (0,) * (num_layers - count)


def recomputed_every(recompute: str) -> int:
    """N of `full:every:N`; 0 for every other form."""
    found = _LAYERS.fullmatch(recompute)
    return int(found[2]) if found and found[1] == "every" else 0


def recompute_of_layers(recompute: str, num_layers: int) -> tuple[str, ...]:
    """What each layer of a chunk does: `none`, `full`, or the named modules of all."""
    groups = recomputed_groups(recompute, num_layers)
    return tuple("full" if group else "none" for group in groups) if groups else (recompute,) * num_layers


def traced_form(recompute: str) -> str:
    """What a trace of pieces is made with: layers that are kept and layers that run again, however many of them."""
    return "full:block" if _LAYERS.fullmatch(recompute) else recompute


def recompute_number(recompute: str) -> int:
    """A number for each normal form: none lowest, then sets of modules, some layers, all, and groups of layers."""
    base = 1 << len(MODULES)
    if found := _LAYERS.fullmatch(recompute):
        count = int(found[2])
        return base + {"block": count, "uniform": 2 * _MOST_LAYERS + count, "every": 4 * _MOST_LAYERS - count}[found[1]]
    if recompute == "full":
        return base + _MOST_LAYERS
    return sum(1 << MODULES.index(name) for name in modules_of(recompute))


def check_recompute(model: ModelSpec, recompute: str, *, overlap_shared_experts: bool) -> None:
    """Refuse modules that the model has not, and what megatron-core refuses (0.16.1, transformer_config.py, 2026).

    Raises:
        SpecError: names the module.
    """
    if model.multi_token_prediction_layers and ":uniform:" in recompute:
        rule = "megatron-core takes groups of 1 layer beside multi-token prediction"
        raise SpecError("recompute", recompute, rule, "use full, or full:block:N")
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


def check_recomputed_groups(recompute: str, chunk_layers: Sequence[int]) -> None:
    """Refuse groups that do not divide the layers of a chunk: megatron-core 0.16.1 looks for more behind its end.

    Raises:
        SpecError: names the chunk's layers.
    """
    for layers in chunk_layers:
        group = max(recomputed_groups(recompute, layers), default=1) if ":uniform:" in recompute else 1
        if layers % group:
            rule = f"must divide the {layers} layers of every chunk into groups of {group}"
            raise SpecError("recompute", recompute, rule, "change the count, the layout or the split of layers")
