"""The other build of torch (CUDA beside CPU, or CPU beside CUDA) in an environment of its own, made on first use.

Only torch and what it needs are installed there; everything else comes from the environment that runs the tests.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch

CUDA_BUILD = "torch==2.14.1"
"""What PyPI serves for Linux on x86-64 (2026-12-01)."""
CPU_BUILD = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDED_BYTES = 8 * 2**30
"""Of disk: 5.4 GB when installed (2026-12-01), and what pip unpacks meanwhile."""


def other_python() -> Path:
    """The Python of the environment; skips the test, saying why, where it can't be had."""
    wanted = CUDA_BUILD if torch.version.cuda is None else CPU_BUILD
    folder = _cache_folder() / f"{wanted.replace('==', '-')}-python{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.is_file():  # not made yet, or not to its end
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < NEEDED_BYTES:
            pytest.skip(f"{wanted} needs 8 GiB of disk in {folder.parent}, {free / 2**30:.1f} are free")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        _install(python, wanted)
        stamp.touch()
    # Last on its path, so that its own torch comes first; written anew, because the project may have moved.
    Path(_site_packages(python), "rest.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.access(base, os.W_OK) and not os.access(Path(base).parent, os.W_OK):
        base = tempfile.gettempdir()
    return Path(base, "echo-explore", "torch")


def _install(python: Path, wanted: str) -> None:
    index = [] if wanted == CUDA_BUILD else ["--extra-index-url", CPU_INDEX]
    command = [str(python), "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", *index, wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
    pytest.skip(f"pip can't install {wanted} from the package registry: {'; '.join(errors)}")


def _site_packages(python: Path) -> str:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.strip()
