"""The load of experts from a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from echo_explore.core import SpecError
from echo_explore.specs import JobOptions, candidate_of
from echo_explore.specs.routing_file import read_load


def test_lines_commas_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("# of layer 12\n1, 2.5\n0.5  # the rest\n\n3e-1 4\n", encoding="utf-8")
    assert read_load(path) == (1.0, 2.5, 0.5, 0.3, 4.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no number"), ("1\ntwo\n", "routing, line 2 = 'two': is not a number"), ("1\n" * 2**20, "1 MiB")],
)
def test_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "load.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=message):
        read_load(path)
    with pytest.raises(SpecError, match="can be read"):
        read_load(tmp_path)


def _options(model: str, routing: Path) -> JobOptions:
    return JobOptions(
        model=model, cluster="h100-ndr", layout="tp=1,ep=8,dp=8", global_batch_size=64, micro_batch_size=1,
        sequence_length=4096, routing=str(routing),
    )  # fmt: skip


def test_it_is_the_recipes_load(tmp_path: Path) -> None:
    path = tmp_path / "load.txt"
    path.write_text("2\n" + "1\n" * 7, encoding="utf-8")
    assert candidate_of(_options("mixtral-8x7b", path)).recipe.expert_load == (2.0, *(1.0,) * 7)
    path.write_text("1\n" * 7, encoding="utf-8")
    with pytest.raises(SpecError, match=r"needs one entry an expert, moe.num_experts = 8"):
        candidate_of(_options("mixtral-8x7b", path))
    with pytest.raises(SpecError, match="has no experts"):
        candidate_of(replace(_options("llama2-7b", path), layout="tp=1,dp=8"))
