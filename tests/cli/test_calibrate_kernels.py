"""`calibrate kernels`: a profile, a trace or a table of the user's own, and what it does to `predict`."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import Cli, predict

HEADER = "gpu,dtype,m,n,k,latency_us"
BASE = ("calibrate", "kernels", "--cluster", "h800-ndr", "--out", "mine.toml")


def _row(m: int, n: int, k: int, latency_us: float) -> str:
    return f"H800-SXM5-80GB,bfloat16,{m},{n},{k},{latency_us}"


def _table(path: Path, *, flop_per_s: float) -> None:
    shapes = [(m, n, k) for m in (1024, 2048, 4096) for n in (4096, 12288) for k in (4096, 12288)]
    path.write_text("\n".join([HEADER, *(_row(m, n, k, 2e6 * m * n * k / flop_per_s) for m, n, k in shapes)]))


def _trace(path: Path, *, flop_per_s: float, **changes: Any) -> None:
    """Eight products of a step and their kernels, as the PyTorch profiler writes them."""
    events = []
    for key in range(1, 9):
        m, n, k = 1024 * key, 4096, 12288
        arguments = {
            "External id": key, "Input Dims": [[m, k], [k, n]], "Input type": ["c10::BFloat16"] * 2
        } | changes  # fmt: skip
        events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": key, "dur": 1, "args": arguments})
        duration = 2e6 * m * n * k / flop_per_s
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": key, "dur": duration, "args": {"External id": key}}
        events.append(kernel)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def _step_time_s(cli: Cli, *more: str) -> float:
    done = cli(*predict("--json", *more))
    assert done.code == 0, done.err
    return float(json.loads(done.out)["step_time_s"])


@pytest.mark.parametrize("flop_per_s", [50e12, 200e12])
def test_a_trace_of_slow_products_makes_the_step_as_slow(cli: Cli, flop_per_s: float) -> None:
    shipped = _step_time_s(cli)
    _trace(cli.folder / "trace.json.gz", flop_per_s=flop_per_s)
    done = cli(*BASE, "trace.json.gz")
    assert done.code == 0
    assert "gemm           bf16   sustained     8" in done.out
    mine = _step_time_s(cli, "--calibration", "mine.toml")
    # 24 micro-batches of 2,048 tokens, 175e9 parameters, 6 FLOP each, over 96 GPUs: products alone.
    least = 6.0 * 24 * 2048 * 175e9 / 96 / flop_per_s
    assert mine > max(least, 1.5 * shipped)
    assert _step_time_s(cli) == shipped


def test_isolated_products_of_a_table_are_capped_by_the_sustained_rate(cli: Cli) -> None:
    """A table times kernels at high clocks: fast ones change little, slow ones much."""
    shipped = _step_time_s(cli)
    _table(cli.folder / "fast.csv", flop_per_s=900e12)
    assert cli(*BASE[:-1], "fast.toml", "fast.csv").code == 0
    assert _step_time_s(cli, "--calibration", "fast.toml") == pytest.approx(shipped, rel=0.05)
    _table(cli.folder / "slow.csv", flop_per_s=100e12)
    assert cli(*BASE[:-1], "slow.toml", "slow.csv").code == 0
    assert _step_time_s(cli, "--calibration", "slow.toml") > 2 * shipped


@pytest.mark.torch
def test_the_profile_of_a_cpu_goes_the_same_way_and_is_used(cli: Cli) -> None:
    pytest.importorskip("torch")
    done = cli(*BASE, "--profile", "--torch-device", "cpu")
    assert done.code == 0
    assert {line.split()[0] for line in done.out.splitlines()[1:]} >= {"gemm", "attention", "norm", "softmax", "copy"}
    assert "profile of CPU" in (cli.folder / "mine.toml").read_text()
    assert _step_time_s(cli, "--calibration", "mine.toml") != _step_time_s(cli)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        (HEADER + "\n", "has no rows"),
        ("gpu,m,n,k,latency_us\nH800,1,1,1,1\n", "dtype = '(missing)': is a column that a gemm table must have"),
        (f"{HEADER}\n{_row(8, 8, 8, 0)}\n", "row 2: latency_us = '0': must be above 0"),
        (f"{HEADER}\n{_row(8, 8, 8, -3)}\n", "row 2: latency_us = '-3': must be above 0"),
        (f"{HEADER}\n{_row(8, 8, 8, 3)} ms\n", "row 2: latency_us = '3 ms': must be a number of microseconds, no unit"),
        (f"{HEADER},latency_ms\n{_row(8, 8, 8, 3)},0.003\n", "holds times in more than one column"),
        (f"{HEADER}\n{_row(8, 8, 8, 3)}\n", "no class has 5 of them"),
        (f"{HEADER}\nH800,int4,8,8,8,3\n", "dtype = 'int4': is not a data type of the model"),
    ],
)
def test_tables_that_are_refused(cli: Cli, text: str, said: str) -> None:
    (cli.folder / "mine.csv").write_text(text)
    assert said in cli.refuses(*BASE, "mine.csv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"traceEvents": []}', "holds no GPU kernels; fix: profile with ProfilerActivity.CUDA"),
        ("{", "is no JSON trace"),
        ('{"displayTimeUnit": "ms"}', "traceEvents = '(missing)': must be a list"),
    ],
)
def test_traces_that_are_refused(cli: Cli, text: str, said: str) -> None:
    (cli.folder / "trace.json").write_text(text)
    assert said in cli.refuses(*BASE, "trace.json")


def test_a_trace_without_shapes_is_refused(cli: Cli) -> None:
    _trace(cli.folder / "trace.json.gz", flop_per_s=5e14, **{"Input Dims": [], "Input type": []})
    assert "no kernel belongs to an operator with known shapes" in cli.refuses(*BASE, "trace.json.gz")
