"""The Python entry points."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import echo_explore
from echo_explore.core import SpecError
from echo_explore.simulate import SimulationOptions, parse_what_if
from echo_explore.specs import JobOptions, candidate_of
from tests.cli.support import Handmade

JOB: dict[str, Any] = {"model": "gpt-22b", "cluster": "a100-80gb-hdr", "layout": "tp=8,pp=4", "global_batch_size": 16}


@pytest.fixture(autouse=True)
def _handmade(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("echo_explore.tracing", "echo_explore.search.evaluate"):
        monkeypatch.setattr(f"{module}.CachedTracer", Handmade)


def test_predict_from_options_or_from_a_candidate(tmp_path: Path) -> None:
    prediction = echo_explore.predict(**JOB)
    candidate = candidate_of(JobOptions(**{"micro_batch_size": 1, **JOB}))
    assert echo_explore.predict(candidate).step_time_s == prediction.step_time_s
    half = SimulationOptions(what_if=parse_what_if(["compute=0.5"]))
    assert echo_explore.predict(candidate, options=half).step_time_s < prediction.step_time_s
    timeline = tmp_path / "step.json"
    echo_explore.predict(**JOB, timeline=timeline)
    assert timeline.stat().st_size > 1000


def test_predict_refuses_in_one_line() -> None:
    with pytest.raises(SpecError, match=r"layout\.tp = '0': must be 1 or more"):
        echo_explore.predict(**{**JOB, "layout": "tp=0"})


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(SpecError, match="micro_batch = 2: is not an option; fix: did you mean micro_batch_size"):
        echo_explore.predict(**JOB, micro_batch=2)


def test_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_EXPLORE_HOME", str(tmp_path / "home"))
    space = tmp_path / "tiny.toml"
    space.write_text(
        'schema = 1\nmodel = "gpt-22b"\ncluster = "a100-80gb-hdr"\ncluster_size = { num_gpus = 16 }\n'
        "recipe = { sequence_length = 2048, global_batch_size = 16 }\n"
        "[search]\ntensor_parallel = [8]\npipeline_parallel = [2]\n"
    )
    package: Any = vars(echo_explore)["search"]  # was imported before; it can be called as well
    assert type(package).__name__ == "_CallablePackage"
    result = package(space, address="none")
    assert result.exit_code in (0, 1)
    assert result.counts.num_legal == 1


def test_loaders() -> None:
    assert echo_explore.load_cluster("h800-ndr").name == "h800-ndr"
    assert echo_explore.load_model("gpt3-175b").num_layers == 96


def test_search_is_a_function_until_the_package_is_imported() -> None:
    code = "import sys, echo_explore; print(echo_explore.search.__name__, 'echo_explore.search' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "search False\n"
