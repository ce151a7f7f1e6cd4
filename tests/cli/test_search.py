"""`search` and `dashboard` over the real simulator and handmade traces, in this process."""

import json
from pathlib import Path

import pytest

from tests.cli.support import Cli

SPACE = """
schema = 1
model = "gpt-22b"
cluster = "a100-80gb-hdr"
[cluster_size]
num_gpus = 16
[recipe]
sequence_length = 2048
global_batch_size = 16
[search]
tensor_parallel = [4, 8]
pipeline_parallel = [1, 2, 4]
micro_batch_size = [1, 2]
recompute = ["none", "full"]
"""


@pytest.fixture
def space(cli: Cli) -> Path:
    path = cli.folder / "small.toml"
    path.write_text(SPACE)
    return path


def _search(cli: Cli, space: Path, *more: str) -> dict[str, object]:
    done = cli("search", space, "--study", "mine", "--address", "none", "--json", *more)
    assert done.code == 0, done.err
    value: dict[str, object] = json.loads(done.out)
    return value


def test_a_study_is_made_continued_and_guarded(cli: Cli, space: Path) -> None:
    first = _search(cli, space)
    assert first["certified"] is True
    assert first["ending"] == "exhausted"
    folder = Path(str(first["folder"]))
    assert folder == cli.home / "studies/mine"
    ledger = (folder / "ledger.jsonl").read_bytes()
    assert _search(cli, space) == first  # a finished study is printed, not made again
    assert (folder / "ledger.jsonl").read_bytes() == ledger
    text = cli("search", space, "--study", "mine", "--address", "none")
    assert text.code == 0
    assert str(folder) in text.out
    other = cli.folder / "other.toml"
    other.write_text(SPACE.replace("[1, 2, 4]", "[1, 2]"))
    line = cli.refuses("search", other, "--study", "mine", "--address", "none")
    assert line.startswith("study mine: space_hash = ")
    assert "give another name with --study" in line


def test_nothing_feasible_exits_1(cli: Cli) -> None:
    path = cli.folder / "huge.toml"
    path.write_text(SPACE.replace("gpt-22b", "gpt-1t").replace("[1, 2, 4]", "[1, 2]"))
    done = cli("search", path, "--address", "none")
    assert done.code == 1
    assert "no layout fits" in done.out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[search]", "[search", "is not valid TOML"),
        ("num_gpus = 16", "num_gpus = 99999999", "max_nodes"),
        ('"gpt-22b"', '"gpt-23b"', "did you mean gpt-22b, "),
        ("tensor_parallel", "tensor_paralel", "is not a known key; fix: did you mean tensor_parallel, "),
        (
            "[search]",
            '[constraints]\nrules = ["__import__(1)"]\n[search]',
            "constraints.rules[0] = '__import__(1)': Call is not",
        ),
    ],
)
def test_a_wrong_space(cli: Cli, space: Path, old: str, new: str, message: str) -> None:
    space.write_text(SPACE.replace(old, new, 1))
    assert message in cli.refuses("search", space, "--address", "none")


def test_dashboard_names_the_studies_there_are(cli: Cli, space: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, str, int]] = []
    monkeypatch.setattr(
        "echo_explore.search.study.dashboard.serve", lambda where, *, host, port: served.append((where, host, port))
    )
    _search(cli, space)
    assert "did you mean mine?" in cli.refuses("dashboard", "--study", "mien")
    done = cli("dashboard")
    assert done.code == 0
    assert served == [(str(cli.home / "studies/mine/study.log"), "127.0.0.1", 8080)]
    assert "warning" not in done.err
    assert "warning: 0.0.0.0 can be reached by others" in cli("dashboard", "--host", "0.0.0.0").err


def test_the_interference_model_is_part_of_the_study(cli: Cli, space: Path) -> None:
    plain = cli("search", space, "--address", "none", "--json")
    other = cli("search", space, "--address", "none", "--json", "--interference", "none")
    first, second = (json.loads(done.out) for done in (plain, other))
    assert first["study"] != second["study"]
    assert second["best"][0]["step_time_s"] <= first["best"][0]["step_time_s"]
    _search(cli, space)
    refused = cli("search", space, "--study", "mine", "--address", "none", "--interference", "none")
    assert refused.code == 2
    assert refused.err.startswith("error: study mine: identity = ")
    wrong = cli("search", space, "--address", "none", "--interference", "some")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "interference = 'some': must be one of none, constant, physical, learned" in wrong.err


def test_schedules_are_searched(cli: Cli, space: Path) -> None:
    space.write_text(SPACE.replace("[search]", '[search]\nschedule = ["auto", "zb-h1"]'))
    points = [row["label"] for row in json.loads(cli("search", space, "--address", "none", "--json").out)["best"]]
    assert any(label.endswith("zb-h1") for label in points)
    assert any(label.endswith("sp") or "recompute" in label.split()[-1] for label in points)
