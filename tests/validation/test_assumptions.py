"""What a prediction of a measured run takes for granted is listed."""

import pytest

from echo_explore.validation.assumptions import assumed_of
from echo_explore.validation.mapping import Declined, map_row
from echo_explore.validation.rows import parse_row
from tests.validation.tables import CELLS

FULL = CELLS | {
    "num_gpus": "32", "global_batch": "64", "dp": "8", "gpus_per_node": "8", "ffn_hidden_size": "16384",
    "num_kv_heads": "32", "activation": "gelu", "sequence_parallel": "False", "distributed_optimizer": "True",
    "recompute": "none", "flash_attention": "True", "overlap_flags": "grad reduce overlap",
    "inter_node_fabric": "HDR InfiniBand",
}  # fmt: skip
"""A run on four hosts that leaves nothing out."""


def _assumed(**cells: str) -> str:
    row = parse_row(FULL | cells, where="test")
    mapped = map_row(row)
    assert not isinstance(mapped, Declined)
    return assumed_of(row, mapped)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("recompute", "recompute = none"),
        ("num_kv_heads", "num_kv_heads = "),
        ("overlap_flags", "overlap_flags = overlap_grad_reduce "),
        ("inter_node_fabric", "inter_node_fabric = a100-80gb-hdr: "),
    ],
)
def test_an_empty_column_is_listed_with_what_stands_in(column: str, text: str) -> None:
    said = _assumed(**{column: ""})
    assert text in said
    assert said.count(f"{column} = ") == 1


def test_a_run_that_leaves_nothing_out_assumes_nothing() -> None:
    assert _assumed() == ""


def test_a_run_on_one_host_needs_no_fabric() -> None:
    one = {"num_gpus": "8", "dp": "2", "inter_node_fabric": ""}
    assert "inter_node_fabric" not in _assumed(**one)


def test_what_is_declined_lists_what_its_model_takes() -> None:
    assert assumed_of(parse_row(CELLS, where="test"), None) == ""


def test_checks_of_collectives_are_listed_where_the_stack_stands_for_a_silent_source() -> None:
    swept = {"framework": "nanotron", "notes": "pp engine fixed=True"}
    assert _assumed(**swept) == "collective_checks = true of nanotron-2025-multi-host"
    assert _assumed(**swept, overlap_flags="TORCH_DISTRIBUTED_DEBUG=DETAIL") == ""


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ({"flash_attention": "maybe"}, "flash_attention = as megatron-core for 'maybe'"),
        ({"zero_stage_or_fsdp": "7"}, "zero_stage_or_fsdp = as megatron-core for '7'"),
        ({"gpu": "A100-SXM4-80GB"}, "gpu = A100-80GB-SXM for 'A100-SXM4-80GB'"),
        ({"gpu": "H100-80GB-SXM", "inter_node_fabric": "pigeons"}, "inter_node_fabric = h100-ndr: "),
    ],
)
def test_words_that_say_nothing_known_are_listed(cells: dict[str, str], text: str) -> None:
    assert text in _assumed(**cells)
