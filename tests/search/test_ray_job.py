"""`ray job submit` from a checkout's copy: traces in the job, keeps its results outside, and finds them again."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.search.support import ROOT, write_space
from tests.search.test_evaluate import SPACE

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RAY = str(Path(sys.executable).with_name("ray"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short folder: Ray's sockets lie in it."""
    made = Path(tempfile.mkdtemp(prefix="eej-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """A head that was started by hand, with a home of its own; what was started is found by that home, and ended."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    clean |= {"HOME": str(folder / "home"), "ECHO_EXPLORE_HOME": str(folder / "state"), "RAY_AUTH_MODE": "disabled"}
    (folder / "home").mkdir()
    dashboard = _free_port()
    command = [RAY, "start", "--head", "--node-ip-address=127.0.0.1", f"--port={_free_port()}", "--num-cpus=2"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={folder / 'ray'}"]
    command += ["--disable-usage-stats", f"--object-store-memory={150 * 2**20}"]
    try:
        done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield clean | {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    finally:
        _end_all(f"HOME={folder / 'home'}")


def _end_all(setting: str) -> None:
    """Kill what has this setting in its environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _checkout(folder: Path) -> Path:
    """What a clean checkout holds of the program, without what git ignores."""
    copy = folder / "checkout"
    for name in ("echo_explore", "clusters", "search_spaces", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".rayignore", copy)
    return copy


def _submit(checkout: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", "submit", "--working-dir", ".", "--", sys.executable, "scripts/search.py", *arguments]
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_job_from_a_clean_checkout(folder: Path, environment: dict[str, str]) -> None:
    checkout = _checkout(folder)
    write_space(checkout / "search_spaces", SPACE, "tiny")
    first = _submit(checkout, environment, "search_spaces/tiny.toml", "--study", "job")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "legal points" in first.stdout
    study = folder / "state/studies/job"
    assert json.loads((study / "ledger.jsonl").read_text().splitlines()[-1])["end"]["ending"] == "exhausted"
    assert list((folder / "state/traces").glob("*.npz"))
    again = _submit(checkout, environment, "search_spaces/tiny.toml", "--study", "job")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "searching" not in again.stdout + again.stderr
    assert not (folder / "home/.ray").exists()


def test_home_inside_the_copy_of_the_job_is_refused(folder: Path, environment: dict[str, str]) -> None:
    checkout = folder / "checkout"
    settings = json.dumps({"env_vars": {"ECHO_EXPLORE_HOME": "state"}})
    command = [RAY, "job", "submit", "--working-dir", ".", "--runtime-env-json", settings, "--", sys.executable]
    command += ["scripts/search.py", "gpt3_175b_h800"]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "lies in the copy of the working folder that Ray deletes after the job" in done.stdout + done.stderr
