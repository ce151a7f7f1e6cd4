"""The wheel works where nothing but the wheel and what its metadata asks for is installed, from an empty folder.

The environments here hold hard links to the files of the distributions that the wheel's metadata names, each taken from
the environment that runs the tests, with what those name in turn: what `pip install -c constraints.txt` would put
there, without the network. A dependency that the metadata forgets is missing.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "echo_explore", "clusters", "search_spaces")
PREDICT = (
    *("predict", "--model", "gpt3-175b", "--cluster", "h800-ndr", "--layout", "tp=8,pp=12", "--json"),
    *("--global-batch-size", "192", "--micro-batch-size", "1", "--sequence-length", "2048", "--precision", "bf16"),
)

# All on one worker, so that the wheel is built once; and the trace, which is slow, is made once.
pytestmark = pytest.mark.torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment with the wheel in it, and an empty folder to run from."""

    python: Path
    folder: Path
    distributions: frozenset[str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The finished `echo-explore` command: nothing of this checkout or its environment is visible to it."""
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")
        clean = {name: value for name, value in os.environ.items() if name not in hidden}
        clean["ECHO_EXPLORE_HOME"] = str(self.folder / "home")
        (self.folder / "empty").mkdir(exist_ok=True)
        command = [str(self.python.with_name("echo-explore")), *arguments]
        return subprocess.run(
            command, cwd=self.folder / "empty", env=clean, capture_output=True, text=True, timeout=240
        )


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _required(wheel: Distribution, extras: Sequence[str]) -> dict[str, Distribution]:
    """Every distribution that the wheel with these extras needs, by name."""
    found: dict[str, Distribution] = {}
    asked: list[tuple[Distribution, str]] = [(wheel, extra) for extra in ("", *extras)]
    done: set[tuple[str, str]] = set()
    while asked:
        owner, extra = asked.pop()
        for line in owner.requires or []:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            found[name] = distribution(name)
            assert requirement.specifier.contains(found[name].version.partition("+")[0], prereleases=True), line
            for wanted in ("", *requirement.extras):
                if (name, wanted) not in done:
                    done.add((name, wanted))
                    asked.append((found[name], wanted))
    return found


def _link_files(source: Distribution, site_packages: Path) -> None:
    for file in source.files or []:
        if ".." in file.parts:  # a script or manual page outside site-packages
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.locate(), target)
        except OSError:  # another file system
            shutil.copy2(str(file.locate()), target)


def _environment(folder: Path, wheel: Path, *extras: str) -> Environment:
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv/bin/python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    site_packages = folder / f"venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    installed = PathDistribution(next(site_packages.glob("echo_explore-*.dist-info")))
    required = _required(installed, extras)
    for source in required.values():
        _link_files(source, site_packages)
    return Environment(python=python, folder=folder, distributions=frozenset(required))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive, built from a copy of this tree."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "out", folder)
    return next((folder / "out").glob("*.whl"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return _environment(tmp_path_factory.mktemp("base"), wheel)


@pytest.fixture(scope="module")
def with_trace(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return _environment(tmp_path_factory.mktemp("trace"), wheel, "trace")


def test_wheel_carries_every_data_file_and_source(wheel: Path) -> None:
    package = ROOT / "echo_explore"
    expected = {f"echo_explore/{path.relative_to(package)}" for path in package.rglob("*") if path.is_file()}
    for kind in ("clusters", "search_spaces"):
        names = [path.name for path in (ROOT / kind).glob("*.toml")]
        assert names, kind
        expected |= {f"echo_explore/_shipped/{kind}/{name}" for name in names}
    expected = {name for name in expected if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert carried == expected


def test_base_environment_has_no_heavy_library(base: Environment) -> None:
    assert base.distributions.isdisjoint(
        {"torch", "ray", "optuna", "pandas", "transformers", "megatron-core", "plotly"}
    )
    assert {"numpy", "numba", "pydantic", "scipy"} <= base.distributions


@pytest.mark.parametrize(
    ("command", "name"), [("clusters", "h800-ndr"), ("models", "gpt3-175b"), ("spaces", "gpt3_175b_h800")]
)
def test_base_lists_what_the_wheel_carries(base: Environment, command: str, name: str) -> None:
    done = base.run(command)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [(PREDICT, "trace"), (("search", "gpt3_175b_h800"), "search")],
    ids=["predict", "search"],
)
def test_base_names_the_missing_extra_in_one_line(base: Environment, command: Sequence[str], extra: str) -> None:
    done = base.run(*command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"pip install 'echo-explore[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_predict_from_an_empty_folder(with_trace: Environment) -> None:
    done = with_trace.run(*PREDICT)
    assert done.returncode == 0, done.stderr
    prediction = json.loads(done.stdout)
    assert prediction["num_ranks"] == 96
    assert prediction["step_time_low_s"] < prediction["step_time_s"] < prediction["step_time_high_s"]
    assert list((with_trace.folder / "empty").iterdir()) == []
