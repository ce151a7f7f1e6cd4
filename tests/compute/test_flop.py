"""Closed forms of the work of a step against published formulas and counts."""

from dataclasses import replace
from typing import Any

import pytest

from echo_explore.compute import causal_model_flop, executed_flop, layer_forward_flop, model_flop
from echo_explore.compute.flop import (
    attention_core_flop,
    attention_projection_flop,
    feed_forward_flop,
    logits_forward_flop,
    step_flop,
)
from echo_explore.specs import JobOptions, ModelSpec, candidate_of, load_model

GPT3 = {"l": 96, "h": 12288, "s": 2048}


def _gpt3() -> ModelSpec:
    return load_model("gpt3-175b")


def test_full_recompute_is_equation_3_of_megatron() -> None:
    # arXiv 2104.04473 (2021), equation 3: F = 96 B s l h^2 (1 + s/6h + V/16lh), with full recomputation.
    model, batch, vocab = _gpt3(), 64, 51200
    s, l, h = GPT3["s"], GPT3["l"], GPT3["h"]  # noqa: E741
    published = 96 * batch * s * l * h**2 * (1 + s / (6 * h) + vocab / (16 * l * h))
    ours = executed_flop(
        model, sequence_length=s, num_sequences=batch, recompute="full", attention="unfused", padded_vocab_size=vocab
    )
    assert ours == pytest.approx(published, rel=1e-12)


def test_model_flop_is_the_formula_of_selective_recomputation() -> None:
    # arXiv 2205.05198 (2022), appendix A: 72 B s l h^2 (1 + s/6h + V/12lh); selective adds s/6h's forward once more.
    model, batch, vocab = _gpt3(), 64, 51200
    s, l, h = GPT3["s"], GPT3["l"], GPT3["h"]  # noqa: E741
    base = 72 * batch * s * l * h**2
    ours = model_flop(model, sequence_length=s, num_sequences=batch, padded_vocab_size=vocab)
    assert ours == pytest.approx(base * (1 + s / (6 * h) + vocab / (12 * l * h)), rel=1e-12)
    selective = executed_flop(
        model,
        sequence_length=s,
        num_sequences=batch,
        recompute="selective",
        attention="unfused",
        padded_vocab_size=vocab,
    )
    assert selective == pytest.approx(base * (1 + s / (6 * h) * 4 / 3 + vocab / (12 * l * h)), rel=1e-12)


def test_layer_forward_of_the_design() -> None:
    model = _gpt3()
    h, s, b = 12288, 2048, 3
    full = 24 * s * b * h**2 * (1 + s / (6 * h))
    causal = 24 * s * b * h**2 * (1 + s / (12 * h))
    assert layer_forward_flop(model, kind="dense", sequence_length=s, num_tokens=s * b) == pytest.approx(full)
    halved = layer_forward_flop(model, kind="dense", sequence_length=s, num_tokens=s * b, attended_fraction=0.5)
    assert halved == pytest.approx(causal)


def test_conventions_are_ordered() -> None:
    model = load_model("llama3-8b")
    args: dict[str, Any] = {"sequence_length": 8192, "num_sequences": 16}
    flash = executed_flop(model, **args, recompute="none", attention="flash")
    assert flash == causal_model_flop(model, **args)
    assert flash < model_flop(model, **args) == executed_flop(model, **args, recompute="none", attention="unfused")
    assert flash < executed_flop(model, **args, recompute="selective", attention="flash")
    full = executed_flop(model, **args, recompute="full", attention="flash")
    assert flash < full < flash * 4 / 3


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("llama3-8b", 8.03e9),  # arXiv 2407.21783 (2024), table 3: 8B; model card: 8.03 B with both embeddings
        ("mixtral-8x7b", 12.9e9),  # arXiv 2401.04088 (2024), section 1: 13B active; 12.9 B in the announcement
        ("deepseek-v3", 37e9),  # arXiv 2412.19437 (2024), abstract: 37B activated for each token
        ("qwen3-30b-a3b", 3.3e9),  # arXiv 2505.09388 (2025), table 2: 3B; model card: 3.3 B activated
    ],
)
def test_two_flop_for_each_active_parameter(name: str, active: float) -> None:
    model = load_model(name)
    embedding = model.vocab_size * model.hidden_size
    per_token = sum(
        attention_projection_flop(model, num_tokens=1)
        + feed_forward_flop(model, kind="moe" if kind == "moe" else "dense", num_tokens=1)
        for kind in model.layer_kinds
    )
    per_token += 2.0 * embedding
    counted = per_token / 2 + (0 if model.tied_embeddings else embedding)
    assert counted == pytest.approx(active, rel=0.03)


def test_grouped_queries_and_gates_count() -> None:
    model = load_model("llama3-8b")
    h, kv, f = 4096, 1024, 14336
    assert attention_projection_flop(model, num_tokens=1) == 2 * (2 * h * h + 2 * h * kv)
    assert feed_forward_flop(model, kind="dense", num_tokens=1) == 2 * 3 * h * f
    assert attention_core_flop(model, sequence_length=100, num_tokens=1) == 4 * 100 * h
    assert logits_forward_flop(model, num_tokens=2, padded_vocab_size=128256) == 2 * 2 * h * 128256


def test_a_dense_model_has_no_mixture_layer() -> None:
    with pytest.raises(ValueError, match="without experts"):
        feed_forward_flop(load_model("llama3-8b"), kind="moe", num_tokens=1)


def test_a_frozen_model_leaves_out_a_third_of_its_products_and_none_of_attention() -> None:
    plain = JobOptions(
        model="llama2-70b", cluster="h100-ndr", layout="tp=4", global_batch_size=8, micro_batch_size=1,
        sequence_length=4096,
    )  # fmt: skip
    whole = step_flop(candidate_of(plain))
    adapted = step_flop(candidate_of(replace(plain, overrides=("recipe.lora_rank=16",))))
    model, tokens = load_model("llama2-70b"), 8 * 4096
    core = 3 * model.num_layers * attention_core_flop(model, sequence_length=4096, num_tokens=tokens)
    assert adapted.model_flop - core == pytest.approx((whole.model_flop - core) * 2 / 3)
    assert whole.executed_flop - adapted.executed_flop == pytest.approx(whole.model_flop - adapted.model_flop)
