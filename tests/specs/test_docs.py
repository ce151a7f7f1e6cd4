"""What the documents say of files and names is true."""

import re
from pathlib import Path

import pytest

from echo_explore.core.home import list_data_files
from echo_explore.specs import load_cluster, load_model, load_stack
from echo_explore.specs.huggingface import _FAMILIES
from echo_explore.specs.parameters import count_parameters

DOCS = Path(__file__).parents[2] / "docs"


def test_cluster_of_the_walk_through_loads(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (DOCS / "add_a_cluster.md").read_text(encoding="utf-8"), re.S)
    path = tmp_path / "my_cluster.toml"
    path.write_text(block, encoding="utf-8")
    assert load_cluster(str(path)).max_gpus == 128


@pytest.mark.parametrize("name", list_data_files("models"))
def test_table_of_models(name: str) -> None:
    count = count_parameters(load_model(name))
    row = next(line for line in (DOCS / "models.md").read_text(encoding="utf-8").splitlines() if f"`{name}`" in line)
    assert row.endswith(f"| {count.total:,} | {count.active:,} |")


@pytest.mark.parametrize("name", list_data_files("stacks"))
def test_table_of_stacks(name: str) -> None:
    assert f"| `{name}` | {load_stack(name).description} |" in (DOCS / "stacks.md").read_text(encoding="utf-8")


def test_families_of_configs_are_named() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    assert [family for family in _FAMILIES if f"`{family}`" not in text] == []
