"""What a measured row's columns do not say of a model that has a file of its own.

A row whose name, but for case and punctuation, and whose dimensions are those of a model file takes from it what no
column says: biases, norms of queries and keys, stretched positions, sinks, and which gate the activation has.
"""

import re

from echo_explore.core.home import list_data_files
from echo_explore.specs import ModelSpec, load_model

DIMENSIONS = (
    "num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "gated",
)  # fmt: skip
"""Fields that must be equal."""
EXPERT_DIMENSIONS = ("num_experts", "experts_per_token", "ffn_hidden_size", "shared_ffn_hidden_size")
"""Fields of a mixture that must be equal; of a dense model its ffn_hidden_size."""
TAKEN = (
    "linear_bias", "qkv_bias", "qk_norm", "yarn_scaling_factor", "attention_sink", "activation",
    "activation_func_clamp_value", "glu_linear_offset",
)  # fmt: skip
"""Fields that follow the file."""


def plain_name(name: str) -> str:
    """The letters and digits of a name in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def file_of(model: ModelSpec) -> ModelSpec | None:
    """The model file with the name and the dimensions of `model`; None where there is none."""
    names = [name for name in list_data_files("models") if plain_name(name) == plain_name(model.name)]
    files = [load_model(name) for name in names]
    return next((file for file in files if _dimensions(file) == _dimensions(model)), None)


def completed(model: ModelSpec) -> ModelSpec:
    """`model` with the fields `TAKEN` of its file, if it has one."""
    file = file_of(model)
    return model if file is None else model.model_copy(update={name: getattr(file, name) for name in TAKEN})


def assumed(model: ModelSpec) -> str:
    """The fields that `completed` changes, as text: `linear_bias = True of gpt-oss-120b; ...`; empty for none."""
    file = file_of(model)
    if file is None:
        return ""
    changed = [name for name in TAKEN if getattr(file, name) != getattr(model, name)]
    return "; ".join(f"{name} = {getattr(file, name)} of {file.name}" for name in changed)


def _dimensions(model: ModelSpec) -> tuple[object, ...]:
    inner = (
        (model.ffn_hidden_size,) if model.moe is None else tuple(getattr(model.moe, name) for name in EXPERT_DIMENSIONS)
    )
    return (*(getattr(model, name) for name in DIMENSIONS), *inner)
