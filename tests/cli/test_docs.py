"""Commands that the pages print run; every option has its line in docs/predict.md."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from echo_explore.cli.main import app
from tests.cli.support import Cli

TEXT = (Path(__file__).parents[2] / "docs/predict.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    echo-explore (predict (?:.*\\\n)*.*)$", TEXT, re.M)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_page(cli: Cli, command: str) -> None:
    done = cli(*shlex.split(command.replace("\\\n", " ")))
    assert done.code == 0, done.err
    assert "step time" in done.out


def test_every_option_is_on_the_page() -> None:
    command = get_command(app).commands["predict"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts} - {"--help"}
    assert options == set(re.findall(r"^\| `(--[a-z-]+)` \|", TEXT, re.M))
