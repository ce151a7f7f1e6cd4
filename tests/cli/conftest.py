"""The fixture of all tests of commands."""

from pathlib import Path

import pytest

from tests.cli.support import Cli, Handmade


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command over handmade traces, in an empty folder."""
    for module in ("echo_explore.tracing", "echo_explore.search.evaluate"):
        monkeypatch.setattr(f"{module}.CachedTracer", Handmade)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHO_EXPLORE_HOME", str(tmp_path / "home"))
    return Cli(folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
