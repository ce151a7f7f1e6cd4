"""`echo-explore trace --script`: what it prints, and how it refuses."""

from pathlib import Path

import pytest

from echo_explore.graph import load_graph
from tests.cli.support import Cli

pytestmark = pytest.mark.torch
EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_step.py"
ROOT = ["trace", "--script"]


def test_the_graph_of_a_script_is_written(cli: Cli) -> None:
    result = cli(*ROOT, f"{EXAMPLE}:build", "--world", "16", "--rank", "3", "--out", "step.npz")
    assert result.code == 0
    assert "2 collectives" in result.out
    assert load_graph(Path("step.npz")).is_collective.sum() == 2


def test_a_raising_script_shows_its_traceback(cli: Cli) -> None:
    Path("mine.py").write_text("def build():\n    raise ValueError('boom')\n", encoding="utf-8")
    result = cli(*ROOT, "mine.py:build", "--world", "16", "--rank", "3", "--out", "step.npz")
    assert result.code == 2
    assert "ValueError: boom" in result.err
    assert result.err.splitlines()[-1].startswith("error: script = mine.py:build: raised ValueError as rank 3 of 16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py", "--world", "8"], "script = 'mine.py': must be FILE.py:function"),
        (["no.py:build", "--world", "8"], "script = 'no.py': does not exist"),
        ([f"{EXAMPLE}:build"], "world = '(missing)': must be 1 or more"),
        ([f"{EXAMPLE}:build", "--world", "8", "--model", "gpt3-175b"], "model = 'gpt3-175b': says nothing beside"),
    ],
)
def test_bad_input(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli(*ROOT, *arguments, "--rank", "0", "--out", "step.npz")
    assert result.code == 2
    assert message in result.err


def test_a_job_needs_a_model(cli: Cli) -> None:
    result = cli("trace", "--rank", "0", "--out", "step.npz")
    assert (result.code, "model = '(missing)': must be given" in result.err) == (2, True)
