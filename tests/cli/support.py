"""Run the real command inside the test process, and see that a refusal is one line that changes nothing."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from echo_explore.cli.main import main
from echo_explore.testing.traces import HandmadeTracer

JOB: Mapping[str, str] = {
    "model": "gpt3-175b",
    "cluster": "h800-ndr",
    "layout": "tp=8,pp=12",
    "global-batch-size": "24",
    "micro-batch-size": "1",
}


class Handmade(HandmadeTracer):
    """Takes the place of CachedTracer: the same manners, no torch."""

    def __init__(self, cache_folder: Path | None = None) -> None:
        self.cache_folder = cache_folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cli:
    """Runs commands in an empty folder, with an empty state folder."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    @property
    def home(self) -> Path:
        """The state folder; it does not exist at first."""
        return self.folder / "home"

    def __call__(self, *arguments: str | Path) -> Done:
        """The command with these arguments."""
        self.monkeypatch.setattr(sys, "argv", ["echo-explore", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        shown = self.capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return Done(code=stop.value.code, out=shown.out, err=shown.err)

    def refuses(self, *arguments: str | Path) -> str:
        """The one line in which the command refuses its input, having changed nothing."""
        before = self.files()
        done = self(*arguments)
        assert done.code == 2, done
        assert done.out == ""
        (line,) = done.err.splitlines()
        assert line.startswith("error: ")
        assert " = " in line
        assert "; fix: " in line
        assert self.files() == before
        return line.removeprefix("error: ")

    def files(self) -> dict[Path, bytes]:
        """Every file below the folder with what it holds."""
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


def predict(*more: str | Path, **changes: str | None) -> list[str | Path]:
    """Arguments of `predict` for a job; None leaves an option out, underscores stand for dashes."""
    options = {**JOB, **{name.replace("_", "-"): value for name, value in changes.items()}}
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", value)]
    return ["predict", *given, *more]
