"""Rows of a model that has a file take from it what their columns do not say, and nothing else."""

from pathlib import Path

import pytest

from echo_explore.specs import Candidate, load_model
from echo_explore.validation import map_row
from echo_explore.validation.mapping import model_of, taken_from_file
from echo_explore.validation.model_files import TAKEN
from echo_explore.validation.rows import MeasuredRow, parse_row
from echo_explore.validation.steps import validate_steps
from tests.validation.tables import CELLS, write_table
from tests.validation.test_steps import constant

OSS = {
    "framework": "megatron-bridge", "model_name": "GPT OSS 120B", "num_layers": "36", "hidden_size": "2880",
    "ffn_hidden_size": "2880", "num_heads": "64", "num_kv_heads": "8", "vocab_size": "201088", "seq_len": "4096",
    "activation": "swiglu", "moe_experts": "128", "moe_topk": "4", "moe_ffn_hidden": "2880",
    "attn_extra": "head_dim64; alternating 128-token sliding window", "num_gpus": "64", "tp": "1", "pp": "1", "ep": "8",
    "micro_batch": "1", "global_batch": "64",
}  # fmt: skip


def row(**cells: str) -> MeasuredRow:
    return parse_row(CELLS | OSS | cells, where="test")


@pytest.mark.parametrize("name", ["GPT OSS 120B", "gpt-oss-120b", "GPT_OSS_120b"])
def test_a_row_takes_what_its_columns_do_not_say(name: str) -> None:
    model, file = model_of(row(model_name=name)), load_model("gpt-oss-120b")
    assert all(getattr(model, field) == getattr(file, field) for field in TAKEN)
    assert (model.attention_window, model.max_sequence_length, model.name[0]) == (128, 4096, name[0])  # the row's own
    assert taken_from_file(row()) == (
        "linear_bias = True of gpt-oss-120b; yarn_scaling_factor = 32.0 of gpt-oss-120b; "
        "attention_sink = True of gpt-oss-120b; "
        "activation = quick-geglu of gpt-oss-120b; activation_func_clamp_value = 7.0 of gpt-oss-120b; "
        "glu_linear_offset = 1.0 of gpt-oss-120b"
    )


@pytest.mark.parametrize(
    "cells",
    [
        {"model_name": "GPT OSS 120B finetune"},
        {"num_layers": "35"},
        {"moe_experts": "64"},
        {"vocab_size": "201216"},
        {"activation": "gelu"},
        {"model_name": ""},
    ],
)
def test_another_name_or_another_dimension_takes_nothing(cells: dict[str, str]) -> None:
    model = model_of(row(**cells))
    assert (model.attention_sink, model.glu_linear_offset) == (False, 0.0)
    assert taken_from_file(row(**cells)) == ""


def test_the_row_is_predicted_with_it() -> None:
    candidate = map_row(row())
    assert isinstance(candidate, Candidate), candidate
    assert candidate.model.linear_bias


def test_the_table_says_what_was_assumed(tmp_path: Path) -> None:
    measured = write_table(tmp_path / "m.csv", [OSS, {}])
    out = tmp_path / "p.csv"
    validate_steps(measured, out, constant, supported=lambda candidate: None)
    lines = out.read_text(encoding="utf-8").splitlines()
    assert "linear_bias = True of gpt-oss-120b" in lines[1]
    assert "gpt-oss" not in lines[2]


def test_norms_of_queries_and_keys_come_with_the_file() -> None:
    qwen = {
        "model_name": "Qwen3_30B_a3B", "num_layers": "48", "hidden_size": "2048", "ffn_hidden_size": "6144",
        "num_heads": "32", "num_kv_heads": "4", "vocab_size": "151936", "moe_topk": "8", "moe_ffn_hidden": "768",
        "attn_extra": "head_dim128",
    }  # fmt: skip
    assert model_of(row(**qwen)).qk_norm
    assert "qk_norm = True of qwen3-30b-a3b" in taken_from_file(row(**qwen))
    assert not model_of(row(**qwen | {"model_name": "another"})).qk_norm
