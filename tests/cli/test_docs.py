"""Commands that the pages print run; every option has its line in docs/predict.md."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from echo_explore.cli.main import app
from echo_explore.specs import JobOptions, ModelSpec, candidate_of
from echo_explore.specs.job_options import FRAMEWORKS
from echo_explore.specs.model import MlaSpec, MoeSpec
from echo_explore.specs.template import template
from tests.cli.support import Cli

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "predict.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    echo-explore (predict (?:.*\\\n)*.*)$", TEXT, re.M)


def commands_of(page: str, name: str) -> list[str]:
    """Commands of that name on a page, without those that stand for several."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(rf"^    echo-explore ({name} (?:.*\\\n)*.*)$", text, re.M)
    return [command for command in found if not re.search(r"\.\.\.|[\[|]|[A-Z]{4}", command)]


OTHERS = [c for page in ("timeline.md", "interference.md", "topology.md") for c in commands_of(page, "predict")]
COMM = commands_of("collectives.md", "comm")


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 4
    assert len(OTHERS) >= 2
    assert len(COMM) >= 2


@pytest.mark.parametrize("command", COMMANDS + OTHERS)
def test_command_of_the_page(cli: Cli, command: str) -> None:
    done = cli(*shlex.split(command.replace("\\\n", " ")))
    assert done.code == 0, done.err
    assert "step time" in done.out


@pytest.mark.parametrize("command", COMM)
def test_command_of_the_page_on_collectives(cli: Cli, command: str) -> None:
    done = cli(*shlex.split(command))
    assert done.code == 0, done.err
    assert "GB/s" in done.out


def test_every_option_is_on_the_page() -> None:
    command = get_command(app).commands["predict"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts} - {"--help"}
    assert options == set(re.findall(r"^\| `(--[a-z-]+)` \|", TEXT, re.M))


PAGE = (DOCS / "tracing.md").read_text(encoding="utf-8")
TRACED = [
    *commands_of("tracing.md", "(?:predict|trace)"),
    *re.findall(r"`echo-explore ((?:predict|trace) [^`]*)`", PAGE),
]


@pytest.mark.parametrize("command", TRACED)
def test_command_of_the_page_on_tracing_describes_a_job(command: str) -> None:
    """Its options exist, none is missing, and the job is legal; nothing is traced."""
    name, *arguments = shlex.split(command.replace("\\\n", " "))
    typed = get_command(app).commands[name].make_context(name, arguments).params  # type: ignore[attr-defined]
    if typed["script"] is not None or typed.get("graph") is not None:
        return
    assert typed["global_batch_size"] is not None
    assert typed["model"] is not None
    if typed["framework"] in FRAMEWORKS:
        given = {item.name: typed[item.name] for item in fields(JobOptions) if item.name in typed}
        candidate_of(JobOptions(**given, overrides=tuple(typed["sets"] or ())))


def test_there_are_commands_on_tracing() -> None:
    assert len(TRACED) >= 12


@pytest.mark.parametrize("spec", [ModelSpec, MoeSpec, MlaSpec])
def test_the_template_of_a_model_shows_every_field(spec: type[ModelSpec]) -> None:
    shown = set(re.findall(r"^(?:# )?\[?([a-z_]+)(?: =|\])", template("models"), re.M))
    wanted = {field.alias or name for name, field in spec.model_fields.items()}
    assert wanted <= shown
