"""The command as a process: exit codes, Ctrl-C, a reader that goes away."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.support import predict

SLOW = """
import sys, time
import echo_explore.tracing
from tests.cli.support import Handmade

class Slow(Handmade):
    def trace(self, request):
        print("tracing", file=sys.stderr, flush=True)
        time.sleep(60)

echo_explore.tracing.CachedTracer = Slow
from echo_explore.cli.main import main
sys.argv = ["echo-explore", *sys.argv[1:]]
main()
"""
ROOT = Path(__file__).resolve().parents[2]


def _environment(home: Path) -> dict[str, str]:
    return os.environ | {"ECHO_EXPLORE_HOME": str(home), "PYTHONPATH": str(ROOT)}


def _run(home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "echo_explore", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=_environment(home), cwd=home)


def test_module(tmp_path: Path) -> None:
    done = _run(tmp_path, "clusters")
    assert (done.returncode, done.stderr) == (0, "")
    assert "h800-ndr" in done.stdout
    bad = _run(tmp_path, *predict(layout="tp=8,,pp=12"))
    assert (bad.returncode, bad.stdout) == (2, "")
    assert len(bad.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_help(tmp_path: Path) -> None:
    done = _run(tmp_path, "predict", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--layer-split", "--what-if", "--require-fit", "--no-fold", "--allow-fallback", "--dry-run"):
        assert option in done.stdout


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(tmp_path: Path, times: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, predict())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(tmp_path),
        cwd=tmp_path,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "tracing\n"
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err == "error: interrupted; what was finished is kept, the same command goes on from there\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m echo_explore models --show gpt3-175b | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env=_environment(tmp_path),
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "#", "")
