"""Hugging Face configs: read as files, refused in one line where a ModelSpec cannot say what they do."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.specs import load_model
from echo_explore.specs.huggingface import model_from_dict
from echo_explore.specs.parameters import count_parameters

LLAMA: dict[str, Any] = {  # meta-llama/Meta-Llama-3-8B config.json (2024)
    "_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
MISTRAL = LLAMA | {  # mistralai/Mistral-7B-v0.1 config.json (2023)
    "_name_or_path": "mistralai/Mistral-7B-v0.1",
    "model_type": "mistral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
MIXTRAL = MISTRAL | {  # mistralai/Mixtral-8x7B-v0.1 config.json (2023)
    "_name_or_path": "mistralai/Mixtral-8x7B-v0.1",
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN2: dict[str, Any] = {  # Qwen/Qwen2.5-7B config.json (2024)
    "_name_or_path": "Qwen/Qwen2.5-7B",
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
QWEN3_MOE: dict[str, Any] = {  # Qwen/Qwen3-30B-A3B config.json (2025)
    "_name_or_path": "Qwen/Qwen3-30B-A3B",
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {  # deepseek-ai/DeepSeek-V3 config.json (2024)
    "_name_or_path": "deepseek-ai/DeepSeek-V3",
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {  # deepseek-ai/DeepSeek-V2-Lite config.json (2024)
    "_name_or_path": "deepseek-ai/DeepSeek-V2-Lite",
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "q_lora_rank": None,
    "num_nextn_predict_layers": None,
}
GPT2: dict[str, Any] = {  # openai-community/gpt2-xl config.json (2019)
    "model_type": "gpt2",
    "n_layer": 48,
    "n_embd": 1600,
    "n_head": 25,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
}
NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 44,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 50432,
    "use_parallel_residual": False,
}
BLOOM: dict[str, Any] = {  # bigscience/bloom config.json (2022)
    "model_type": "bloom",
    "n_layer": 70,
    "hidden_size": 14336,
    "n_head": 112,
    "vocab_size": 250880,
    "seq_length": 2048,
}
GPT_OSS: dict[str, Any] = {  # openai/gpt-oss-120b config.json (Aug 2025)
    "_name_or_path": "openai/gpt-oss-120b",
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "output_router_logits": False,
    "tie_word_embeddings": False,
}
PUBLISHED = [
    # config, parameters of the safetensors index on the Hugging Face hub
    (LLAMA, 8_030_261_248),
    (MISTRAL, 7_241_732_096),
    (MIXTRAL, 46_702_792_704),
    (QWEN2, 7_615_616_512),
    (QWEN3_MOE, 30_532_122_624),
    (DEEPSEEK_V2_LITE, 15_706_484_224),
    (GPT2, 1_557_611_200),
    (BLOOM, 176_247_271_424),
    (GPT_OSS, 116_829_156_672),
]


@pytest.mark.parametrize(
    ("config", "published"), PUBLISHED, ids=lambda v: v["model_type"] if isinstance(v, dict) else ""
)
def test_parameters_equal_the_published_count(config: dict[str, Any], published: int) -> None:
    assert count_parameters(model_from_dict(config, name="x")).total == published


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama3-8b"),
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (GPT_OSS, "gpt-oss-120b"),
    ],
)
def test_config_means_the_same_as_the_shipped_model(config: dict[str, Any], name: str) -> None:
    assert model_from_dict(config, name="x").model_copy(update={"name": name}) == load_model(name)


def test_file_and_name(tmp_path: Path) -> None:
    path = tmp_path / "My model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({k: v for k, v in LLAMA.items() if k != "_name_or_path"}))
    assert load_model(str(path)).name == "My-model"
    path.write_text(json.dumps(LLAMA))
    assert load_model(str(path)).name == "Meta-Llama-3-8B"


def test_window_of_mistral_and_none_of_qwen() -> None:
    assert model_from_dict(MISTRAL, name="x").attention_window == 4096
    assert model_from_dict(QWEN2, name="x").attention_window == 0


def test_the_auxiliary_loss_of_gpt_oss_needs_its_logits() -> None:
    model = model_from_dict(GPT_OSS | {"output_router_logits": True}, name="x")
    assert model.moe is not None
    assert model.moe.balancing_loss == "batch"


def test_neox_without_parallel_residual() -> None:
    model = model_from_dict(NEOX, name="x")
    assert (model.position_embedding, model.tied_embeddings, model.linear_bias) == ("rope", False, True)


UNABLE = "; fix: a ModelSpec cannot represent it; choose another model"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA | {"model_type": "mamba"},
            "config.json: model_type = 'mamba': is not a family that is read; fix: nearest are ",
        ),
        ({}, "config.json: model_type = '(missing)': must be given as text; fix: add model_type"),
        (LLAMA | {"model_type": 3}, "config.json: model_type = 3: must be given as text; fix: add model_type"),
        (
            LLAMA | {"attention_bias": True},
            f"config.json: attention_bias = True: puts biases on all projections of attention{UNABLE}",
        ),
        (LLAMA | {"hidden_act": "gelu"}, "config.json: hidden_act = 'gelu': gates with another function than SiLU"),
        (NEOX | {"use_parallel_residual": True}, f"config.json: use_parallel_residual = 'true': runs attention and "
         f"feed-forward side by side{UNABLE}"),
        ({"model_type": "gemma2"}, "config.json: model_type = 'gemma2': soft-caps attention, alternates windows"),
        ({"model_type": "gemma"}, "config.json: model_type = 'gemma': gates with GELU (hidden_activation)"),
        ({"model_type": "phi"}, "config.json: model_type = 'phi': runs attention and feed-forward side by side"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "config.json: mlp_only_layers = '[0]': makes some layers dense"),
        (
            {k: v for k, v in LLAMA.items() if k != "hidden_size"},
            "config.json: hidden_size = '(missing)': must be given; fix: add hidden_size",
        ),
        (GPT_OSS | {"swiglu_alpha": 1.0}, "config.json: swiglu_alpha = 1.0: is not quick-GELU's 1.702"),
        (GPT_OSS | {"layer_types": ["full_attention"] * 36}, "config.json: layer_types = '(given)': gives windows to"),
        (GPT_OSS | {"layer_types": 3}, "config.json: layer_types = '(given)': gives windows to"),
        (GPT_OSS | {"swiglu_limit": True}, "config.json: activation_func_clamp_value = True: must be a"),
        (GPT_OSS | {"attention_bias": False}, "config.json: attention_bias = 'false': puts biases on router and"),
        (LLAMA | {"hidden_size": 4096.5}, "config.json: hidden_size = 4096.5: must be a whole number; fix: "),
        (LLAMA | {"num_hidden_layers": 0}, "config.json: num_layers = 0: must be 1 or more; fix: "),
        (LLAMA | {"num_attention_heads": 7}, "config.json: hidden_size = 4096: is not divisible by num_attention"),
        (LLAMA | {"tie_word_embeddings": "no"}, "config.json: tie_word_embeddings = 'no': must be true or false;"),
        (LLAMA | {"head_dim": "128"}, "config.json: head_dim = '128': must be a whole number; fix: "),
    ],
)  # fmt: skip
def test_refusals(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        model_from_dict(config, name="x")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"model_type": NaN'])
def test_files_that_are_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"config\.json = '\(JSON\)': (cannot be read as JSON|must hold one object)"):
        load_model(str(path))


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10**6), st.floats(), st.text(max_size=5), st.lists(st.integers())
)


@given(
    family=st.sampled_from([LLAMA, MIXTRAL, QWEN2, QWEN3_MOE, DEEPSEEK_V3, GPT2, NEOX, BLOOM, GPT_OSS]), data=st.data()
)
def test_a_changed_config_is_read_or_refused_but_never_crashes(family: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(family)))
    with contextlib.suppress(SpecError):
        model_from_dict(family | {key: data.draw(VALUES)}, name="x")
