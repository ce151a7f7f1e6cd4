"""`predict`: what it prints and writes."""

import json
import math
from typing import Any

import pytest

from echo_explore.cli.report import CAUSES, PARTS
from tests.cli.support import Cli, predict

CONTRACT = {
    *(
        "step_time_s",
        "step_time_low_s",
        "step_time_high_s",
        "interval_level",
        "tokens_per_s",
        "mfu",
        "mfu_causal",
        "hfu",
    ),
    *("peak_memory_bytes", "memory_capacity_bytes", "fits", "memory", "breakdown", "num_ranks", "num_rank_classes"),
    *("num_simulated_ops", "fidelity", "elapsed_s", "versions", "references", "warnings"),
}
"""Keys that later versions may add to, never take from."""


def _prediction(cli: Cli, *more: str, **changes: str | None) -> dict[str, Any]:
    done = cli(*predict("--json", *more, **changes))
    assert done.code == 0, done.err
    value: dict[str, Any] = json.loads(done.out)
    return value


def test_json(cli: Cli) -> None:
    prediction = _prediction(cli, layout="tp=8,pp=12,sp=1")
    assert set(prediction) >= CONTRACT
    assert set(prediction["elapsed_s"]) == {"trace_s", "price_s", "simulate_s"}
    assert prediction["step_time_low_s"] < prediction["step_time_s"] < prediction["step_time_high_s"]
    assert set(prediction["breakdown"]) == {*CAUSES, *PARTS}
    assert sum(prediction["breakdown"][name] for name in CAUSES) == pytest.approx(prediction["step_time_s"], rel=1e-9)
    assert len(prediction["memory"]) == 12
    assert prediction["num_ranks"] == 96
    assert prediction["fits"] is True
    assert prediction["advice"] == []


def test_text(cli: Cli) -> None:
    done = cli(*predict())
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "gpt3-175b on 96 x H800-SXM5-80GB (h800-ndr), tp8 pp12 dp1"
    assert any(line.split()[:2] == ["step", "time"] for line in lines)
    assert any("waiting for other stages" in line for line in lines)
    assert 8 < len(lines) < 25
    assert all(line.startswith("warning: ") for line in done.err.splitlines())


def test_dry_run_shows_si_values_and_makes_no_trace(cli: Cli) -> None:
    done = cli(*predict("--dry-run", "--set", "cluster.node.nic_bandwidth=200 Gbit/s"))
    assert done.code == 0
    shown = json.loads(done.out)
    assert set(shown) >= {"model", "cluster", "layout", "recipe", "stack", "chunk_layers", "num_gpus", "hash"}
    assert shown["cluster"]["node"]["nic_bandwidth_bytes_per_s"] == 25e9
    assert shown["recipe"]["attention"] == "flash"
    assert shown["layout"]["data_parallel"] == 1
    assert shown["chunk_layers"] == [8] * 12
    assert not cli.home.exists()


def test_options_reach_the_simulator(cli: Cli) -> None:
    plain = _prediction(cli)
    assert _prediction(cli, "--fidelity", "block")["fidelity"] == "block"
    assert _prediction(cli, "--no-fold")["num_simulated_ops"] > plain["num_simulated_ops"]
    assert _prediction(cli, "--what-if", "compute=0.5")["step_time_s"] < plain["step_time_s"]
    assert _prediction(cli, "--what-if", "tensor=0", "--what-if", "host=0")["breakdown"]["tensor_s"] == 0
    assert _prediction(cli, recompute="full")["breakdown"]["recompute_s"] > 0
    assert _prediction(cli, num_gpus="192")["num_ranks"] == 192
    assert _prediction(cli, layout="tp=8,pp=12,dp=2")["num_ranks"] == 192
    assert _prediction(cli, "--set", "cluster.node.link_bandwidth=50 GB/s")["step_time_s"] > plain["step_time_s"]
    assert _prediction(cli, "--set", "stack.nccl_proto=LL")["step_time_s"] > 1.1 * plain["step_time_s"]
    stage = _prediction(cli, layer_split="2,8,8,8,8,8,8,8,8,8,8,14")["memory"]
    assert stage[11]["parameters_bytes"] > 1.5 * stage[1]["parameters_bytes"]


def test_what_does_not_fit(cli: Cli) -> None:
    """It is a result; only --require-fit makes it exit 1; advice says what would fit."""
    tight = {"layout": "tp=8,pp=8", "global_batch_size": "8"}
    prediction = _prediction(cli, **tight)
    assert prediction["fits"] is False
    assert 1 <= len(prediction["advice"]) <= 2
    done = cli(*predict("--require-fit", **tight))
    assert done.code == 1
    assert "DOES NOT FIT" in done.out
    assert "what would make it fit" in done.out
    assert cli(*predict("--require-fit", layout="tp=8,pp=12,sp=1")).code == 0


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_timeline(cli: Cli, name: str) -> None:
    assert cli(*predict("--timeline", name)).code == 0
    assert (cli.folder / name).stat().st_size > 1000


def test_a_device_that_nobody_measured(cli: Cli) -> None:
    unknown = ("--set", "cluster.device.calibration=unknown")
    line = cli(*predict(*unknown)).err
    assert "device.calibration = 'unknown': no coefficients" in line
    assert "--allow-fallback" in line
    assert _prediction(cli, *unknown, "--allow-fallback")["warnings"]


def test_a_gpu_of_the_catalogue_is_priced_from_its_specification(cli: Cli) -> None:
    measured = _prediction(cli)
    found = _prediction(
        cli, "--set", "cluster.device.calibration=h20-96gb", "--set", "cluster.device.peak.bf16=148 TFLOP/s"
    )
    assert "h20-96gb: no coefficients, priced from its specification" in found["warnings"]
    assert found["step_time_s"] > 3 * measured["step_time_s"]
    width, narrow = (math.log(p["step_time_high_s"] / p["step_time_low_s"]) for p in (found, measured))
    assert width > 1.1 * narrow


def test_json_has_no_number_that_json_has_not(cli: Cli) -> None:
    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict | list):
            return [n for inner in (value.values() if isinstance(value, dict) else value) for n in numbers(inner)]
        return [value] if isinstance(value, float) else []

    assert all(math.isfinite(number) for number in numbers(_prediction(cli)))
