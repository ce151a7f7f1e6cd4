"""A model from a Hugging Face `config.json`: the file only, no hub access, no transformers.

A family is a function from the keys of its config to the fields of a ModelSpec. What a ModelSpec cannot say (parallel
residuals, gated GELU, biases on some projections only, soft-capped attention) is refused in one line.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echo_explore.core import SpecError, nearest
from echo_explore.specs.base import read_json, validate
from echo_explore.specs.model import ModelSpec

_PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "squared-relu",
}
QUICK_GELU_SLOPE = 1.702
"""a of the gate x sigmoid(a x) [megatron-core 0.16.1 (2026), fusions/fused_bias_geglu.py, quick_gelu]."""


def model_from_config(path: Path) -> ModelSpec:
    """The model that a `config.json` describes.

    Raises:
        SpecError: no such file, not JSON, a family or a feature that a ModelSpec cannot represent, a missing key.
    """
    return model_from_dict(
        read_json(path), name=path.stem if path.stem != "config" else path.resolve().parent.name, where=path.name
    )


def model_from_dict(config: dict[str, Any], *, name: str, where: str = "config.json") -> ModelSpec:
    """The model that the keys of a Hugging Face config describe.

    Args:
        config: its keys.
        name: used when the config names no repository (`_name_or_path`).
        where: names the file in messages.

    Raises:
        SpecError: see `model_from_config`.
    """
    keys = _Keys(config, where)
    family = keys.text("model_type")
    if family not in _FAMILIES:
        near = ", ".join(nearest(family, _FAMILIES))
        raise SpecError(
            f"{where}: model_type", family, "is not a family that is read", f"nearest are {near}; or write a TOML model"
        )
    full = str(config.get("_name_or_path") or name).rstrip("/").rsplit("/", 1)[-1]
    fields = {"name": re.sub(r"[^A-Za-z0-9._-]", "-", full)[:80] or family} | _FAMILIES[family](keys)
    return validate(ModelSpec, {k: v for k, v in fields.items() if v is not None}, where=f"{where}: ")


class _Keys:
    """Typed look-ups in a config; every complaint names file and key."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def get(self, key: str, default: object = None) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    def number(self, *aliases: str, default: int | None = None) -> int:
        for key in aliases:
            value = self._config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise SpecError(f"{self._where}: {key}", value, "must be a whole number", "correct the config")
            return value
        if default is None:
            raise SpecError(f"{self._where}: {aliases[0]}", "(missing)", "must be given", f"add {aliases[0]}")
        return default

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise SpecError(f"{self._where}: {key}", value, "must be true or false", "correct the config")
        return value

    def text(self, key: str) -> str:
        value = self._config.get(key)
        if not isinstance(value, str):
            shown = "(missing)" if value is None else value
            raise SpecError(f"{self._where}: {key}", shown, "must be given as text", f"add {key}")
        return value

    def refuse(self, key: str, value: object, rule: str) -> SpecError:
        return SpecError(f"{self._where}: {key}", value, rule, "a ModelSpec cannot represent it; choose another model")

    def must_be_off(self, key: str, rule: str, *, default: object = False) -> None:
        """Refuse a feature that is on."""
        value = self.get(key, default)
        if value not in (False, None, 0):
            raise self.refuse(key, value, rule)

    def gated(self) -> str:
        """`swiglu`, the only activation gated with SiLU."""
        value = self.get("hidden_activation", self.get("hidden_act", "silu"))
        if value not in ("silu", "swish"):
            raise self.refuse("hidden_act", value, "gates with another function than SiLU")
        return "swiglu"

    def plain(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in _PLAIN:
            raise self.refuse(key, value, "is not a plain activation that is known")
        return _PLAIN[value]


def _llama_like(keys: _Keys, *, architecture: str = "llama", window: int | None = None) -> dict[str, Any]:
    keys.must_be_off("attention_bias", "puts biases on all projections of attention")
    keys.must_be_off("mlp_bias", "puts biases on the feed-forward only")
    return {
        "architecture": architecture,
        "num_layers": keys.number("num_hidden_layers"),
        "hidden_size": keys.number("hidden_size"),
        "ffn_hidden_size": keys.number("intermediate_size"),
        "num_attention_heads": keys.number("num_attention_heads"),
        "num_key_value_heads": keys.number("num_key_value_heads", "num_attention_heads"),
        "head_dim": keys.get("head_dim"),
        "vocab_size": keys.number("vocab_size"),
        "max_sequence_length": keys.number("max_position_embeddings"),
        "attention_window": window,
        "normalization": "rmsnorm",
        "activation": keys.gated(),
        "position_embedding": "rope",
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
        "linear_bias": False,
    }


def _mistral(keys: _Keys) -> dict[str, Any]:
    return _llama_like(keys, window=keys.number("sliding_window", default=0) or None)


def _qwen_window(keys: _Keys) -> int | None:
    return keys.number("sliding_window") if keys.flag("use_sliding_window", default=False) else None


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return _llama_like(keys, window=_qwen_window(keys)) | {"qkv_bias": True}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return _llama_like(keys, architecture="qwen3", window=_qwen_window(keys)) | {"qk_norm": True}


def _mixtral(keys: _Keys) -> dict[str, Any]:
    moe = {
        "num_experts": keys.number("num_local_experts"),
        "experts_per_token": keys.number("num_experts_per_tok"),
        "ffn_hidden_size": keys.number("intermediate_size"),
    }
    window = keys.number("sliding_window", default=0) or None
    return _llama_like(keys, architecture="mixtral", window=window) | {"moe": moe}


def _alternating(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[number % 2] for number in range(layers)]


def _gpt_oss(keys: _Keys) -> dict[str, Any]:
    """GPT-OSS: biases everywhere, sinks, every second layer with a window, a clamped gate (transformers 5.24, 2026)."""
    if not keys.flag("attention_bias", default=True):
        raise keys.refuse("attention_bias", "false", "puts biases on router and experts only")
    slope, layers = keys.get("swiglu_alpha", QUICK_GELU_SLOPE), keys.number("num_hidden_layers")
    if slope != QUICK_GELU_SLOPE:
        raise keys.refuse("swiglu_alpha", slope, f"is not quick-GELU's {QUICK_GELU_SLOPE}")
    keys.gated()
    kinds = keys.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers or kinds != _alternating(layers)):
        raise keys.refuse("layer_types", "(given)", "gives windows to other layers than every second")
    window, inner = keys.number("sliding_window", default=0), keys.number("intermediate_size")
    limit = keys.get("swiglu_limit", 7.0)  # transformers 5.24 (2026), configuration_gpt_oss.py
    return {
        "architecture": "gpt-oss",
        "num_layers": layers,
        "hidden_size": keys.number("hidden_size"),
        "ffn_hidden_size": inner,
        "num_attention_heads": keys.number("num_attention_heads"),
        "num_key_value_heads": keys.number("num_key_value_heads", "num_attention_heads"),
        "head_dim": keys.get("head_dim"),
        "vocab_size": keys.number("vocab_size"),
        "max_sequence_length": keys.number("max_position_embeddings"),
        "attention_window": window,
        "full_attention_every": 2 if window else 0,
        "attention_sink": True,
        "normalization": "rmsnorm",
        "activation": "quick-geglu",
        "activation_func_clamp_value": float(limit) if type(limit) is int else limit,
        "glu_linear_offset": 1.0,  # transformers 5.24 (2026), modeling_gpt_oss.py: (up + 1) * glu
        "position_embedding": "rope",
        "yarn_scaling_factor": _yarn_factor(keys),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
        "linear_bias": True,
        "moe": {
            "num_experts": keys.number("num_local_experts"),
            "experts_per_token": keys.number("num_experts_per_tok", "experts_per_token"),
            "ffn_hidden_size": inner,
            "balancing_loss": "batch" if keys.flag("output_router_logits", default=False) else "none",
        },
    }


def _yarn_factor(keys: _Keys) -> float:
    """By which YaRN stretches positions; 1.0 where another way or none does (transformers 5 calls them parameters)."""
    key = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    scaling = keys.get(key, {})
    if not isinstance(scaling, dict):
        raise keys.refuse(key, str(scaling), "is no object")
    factor = scaling.get("factor", 1.0)
    if scaling.get("rope_type") != "yarn":
        return 1.0
    if type(factor) not in (int, float):
        raise keys.refuse(f"{key}.factor", str(factor), "is no number")
    return float(factor)


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    if keys.get("mlp_only_layers", []):
        raise keys.refuse("mlp_only_layers", str(keys.get("mlp_only_layers")), "makes some layers dense by number")
    if keys.number("decoder_sparse_step", default=1) != 1:
        raise keys.refuse(
            "decoder_sparse_step", keys.get("decoder_sparse_step"), "starts with a dense layer and skips some"
        )
    moe = {
        "num_experts": keys.number("num_experts", "num_local_experts"),
        "experts_per_token": keys.number("num_experts_per_tok"),
        "ffn_hidden_size": keys.number("moe_intermediate_size"),
    }
    return _llama_like(keys, architecture="qwen3-moe", window=_qwen_window(keys)) | {"qk_norm": True, "moe": moe}


def _deepseek(keys: _Keys) -> dict[str, Any]:
    inner = keys.number("moe_intermediate_size")
    moe = {
        "num_experts": keys.number("n_routed_experts", "num_local_experts"),
        "experts_per_token": keys.number("num_experts_per_tok"),
        "ffn_hidden_size": inner,
        "shared_ffn_hidden_size": keys.number("n_shared_experts", default=0) * inner,
        "first_dense_layers": keys.number("first_k_dense_replace", default=0),
        "layer_frequency": keys.number("moe_layer_freq", default=1),
    } | _deepseek_router(keys)
    mla = {
        "q_lora_rank": keys.number("q_lora_rank", default=0),
        "kv_lora_rank": keys.number("kv_lora_rank"),
        "qk_nope_head_dim": keys.number("qk_nope_head_dim"),
        "qk_rope_head_dim": keys.number("qk_rope_head_dim"),
        "v_head_dim": keys.number("v_head_dim"),
    }
    extra = {
        "moe": moe,
        "mla": mla,
        "multi_token_prediction_layers": keys.number("num_nextn_predict_layers", default=0),
    }
    width = mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]
    return _llama_like(keys, architecture="deepseek-v3") | extra | {"head_dim": width}


def _deepseek_router(keys: _Keys) -> dict[str, Any]:
    """Scores, groups and bias of the router; DeepSeek-V3 calls a bias without auxiliary loss `noaux_tc`."""
    method, groups = keys.get("topk_method", "greedy"), keys.number("n_group", default=1)
    router: dict[str, Any] = {"score_function": keys.get("scoring_func", "softmax"), "balancing_loss": "sequence"}
    if method != "greedy" and groups > 1:
        router |= {"num_groups": groups, "groups_per_token": keys.number("topk_group")}
    if method == "noaux_tc":
        router["selection_bias"] = True
    return router


def _gpt2(keys: _Keys) -> dict[str, Any]:
    hidden = keys.number("n_embd", "hidden_size")
    return {
        "num_layers": keys.number("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": keys.number("n_inner", default=4 * hidden),
        "num_attention_heads": keys.number("n_head", "num_attention_heads"),
        "vocab_size": keys.number("vocab_size"),
        "max_sequence_length": keys.number("n_positions", "n_ctx"),
        "activation": keys.plain("activation_function", "gelu_new"),
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True),
    }


def _gpt_neox(keys: _Keys) -> dict[str, Any]:
    if keys.flag("use_parallel_residual", default=True):
        raise keys.refuse("use_parallel_residual", "true", "runs attention and feed-forward side by side")
    if not keys.flag("attention_bias", default=True):
        raise keys.refuse("attention_bias", "false", "puts biases on the feed-forward only")
    return {
        "num_layers": keys.number("num_hidden_layers"),
        "hidden_size": keys.number("hidden_size"),
        "ffn_hidden_size": keys.number("intermediate_size"),
        "num_attention_heads": keys.number("num_attention_heads"),
        "vocab_size": keys.number("vocab_size"),
        "max_sequence_length": keys.number("max_position_embeddings"),
        "activation": keys.plain("hidden_act", "gelu"),
        "position_embedding": "rope",
        "tied_embeddings": keys.flag("tie_word_embeddings", default=False),
    }


def _bloom(keys: _Keys) -> dict[str, Any]:
    keys.must_be_off("apply_residual_connection_post_layernorm", "adds the residual after the norm")
    hidden = keys.number("hidden_size", "n_embed")
    return {
        "num_layers": keys.number("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": keys.number("n_head", "num_attention_heads"),
        "vocab_size": keys.number("vocab_size"),
        "max_sequence_length": keys.number("seq_length", default=2048),  # bigscience/bloom config.json (2022)
        "position_embedding": "alibi",
        "embedding_norm": True,
        "tied_embeddings": keys.flag("tie_word_embeddings", default=True),
    }


def _refused(key: str, why: str) -> Callable[[_Keys], dict[str, Any]]:
    def refuse(keys: _Keys) -> dict[str, Any]:
        raise keys.refuse("model_type", keys.text("model_type"), f"{why} ({key})")

    return refuse


_FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "bloom": _bloom,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _refused("hidden_activation", "gates with GELU"),
    "gemma2": _refused("attn_logit_softcapping", "soft-caps attention, alternates windows and has four norms a layer"),
    "gemma3_text": _refused("layer_types", "alternates windows and has four norms a layer"),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "llama": _llama_like,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi": _refused("PhiDecoderLayer", "runs attention and feed-forward side by side"),
    "phi3": _mistral,
    "qwen2": _qwen2,
    "qwen2_moe": _refused("shared_expert_gate", "gates its shared expert"),
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
