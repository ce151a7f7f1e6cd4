"""docs/outputs.md names exactly the keys and columns that the commands write."""

import csv
import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest

from echo_explore.timeline import BREAKDOWN_KEYS
from echo_explore.validation.steps import COLUMNS
from tests.cli.support import Cli, predict
from tests.validation.tables import write_table

DOCS = Path(__file__).parents[2] / "docs"
SPACE = """
schema = 1
model = "gpt3-175b"
cluster = "a100-80gb-hdr"
cluster_size = { num_gpus = 64 }
recipe = { sequence_length = 2048, global_batch_size = 64 }
[search]
tensor_parallel = [4, 8]
pipeline_parallel = [1, 4]
recompute = ["none", "full"]
"""


def _documented(heading: str) -> set[str]:
    """Names in the first column of the tables under a heading."""
    text = (DOCS / "outputs.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    names = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    assert len(names) == len(set(names))
    return set(names)


def _keys(value: Any, prefix: str = "") -> set[str]:
    """Names of all values inside a JSON value, as the page writes them."""
    if isinstance(value, dict) and value:
        return {name for key, inner in value.items() for name in _keys(inner, f"{prefix}.{key}" if prefix else key)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {name for inner in value for name in _keys(inner, f"{prefix}[]")}
    return {prefix}


def _compare(found: set[str], documented: set[str], *, sometimes: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    patterns = {name: re.compile(fnmatch.translate(name.replace("[]", "[[]]"))) for name in documented}
    assert {name for name in found if not any(p.fullmatch(name) for p in patterns.values())} == set()
    unused = {name for name, p in patterns.items() if not any(p.fullmatch(key) for key in found)}
    assert unused <= sometimes


def test_predict(cli: Cli) -> None:
    documented = _documented("`predict --json`")
    done = cli(*predict("--json", "--explain", "--what-if", "tensor=0.5"))
    _compare(_keys(json.loads(done.out)), documented)
    plain = json.loads(cli(*predict("--json")).out)
    _compare(_keys(plain), documented, sometimes={n for n in documented if n.startswith(("what_if.", "explanation."))})
    compared = json.loads(done.out)["what_if"]
    assert compared["given"] == ["tensor=0.5"]
    assert compared["baseline_step_time_s"] == plain["step_time_s"]
    assert json.loads(done.out)["step_time_s"] - plain["step_time_s"] == compared["change_s"] < 0


def test_a_what_if_is_printed_beside_the_step_without_it(cli: Cli) -> None:
    first, second = cli(*predict("--what-if", "tensor=0.5")).out.splitlines()[:2]
    assert second.startswith("  what if     tensor=0.5: "), first
    assert " instead of " in second


def test_no_name_is_no_interference_model(cli: Cli) -> None:
    assert "interference = ''" in cli.refuses(*predict("--interference", ""))


def test_search(cli: Cli) -> None:
    (cli.folder / "space.toml").write_text(SPACE)
    done = cli("search", "space.toml", "--address", "none", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["best"]
    _compare(_keys(result), _documented("`search --json`"))
    folder = Path(result["folder"])
    assert json.loads((folder / "best.json").read_text()) == result["best"]
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert {line.get("state") for line in lines} >= {"evaluated", "bounded"}
    _compare({name for line in lines for name in _keys(line)}, _documented("The ledger: `ledger.jsonl`"))


def test_validate_steps(cli: Cli) -> None:
    documented = _documented("`validate steps`: columns of the table of predictions")
    assert documented == {*COLUMNS, *BREAKDOWN_KEYS}
    write_table(cli.folder / "measured.csv", [{}])
    done = cli("validate", "steps", "measured.csv", "--out", "predicted.csv")
    assert done.code == 0, done.err
    with (cli.folder / "predicted.csv").open(newline="") as file:
        header = next(csv.reader(file))
    assert header == [*COLUMNS, *sorted(BREAKDOWN_KEYS)]


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_index_links_every_page(page: str) -> None:
    assert page == "index.md" or f"]({page})" in (DOCS / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(path.name for path in [*DOCS.glob("*.md"), *DOCS.parent.glob("*.md")]))
def test_links_lead_somewhere(page: str) -> None:
    path = next(folder / page for folder in (DOCS, DOCS.parent) if (folder / page).is_file())
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert broken == []
