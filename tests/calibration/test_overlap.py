"""Overlap tables and traces into calibrations: traces give rows, residuals learn what is there and nothing else."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_explore.calibration.overlap import fit_overlap
from echo_explore.calibration.overlap_trace import overlaps_of_trace
from echo_explore.calibration.residual_fit import fit_residual
from echo_explore.core import SpecError
from echo_explore.interference.coefficients import shipped_coefficients, user_coefficients
from echo_explore.interference.measured import MeasuredOverlap, predicted_slowdowns, read_overlaps
from tests.cli.conftest import cli  # noqa: F401
from tests.cli.support import Cli


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a new folder."""
    monkeypatch.chdir(tmp_path)


def kernel(name: str, start_us: float, took_us: float, **arguments: object) -> dict[str, object]:
    """An event of a trace."""
    return {
        "cat": "kernel", "name": name, "ts": start_us, "dur": took_us,
        "args": {"device": 0, "grid": [216, 1, 1], "block": [256, 1, 1]} | arguments,
    }  # fmt: skip


def trace_file(folder: Path, events: list[dict[str, object]]) -> Path:
    """A trace of an A100 with these kernels."""
    path = folder / "trace.json"
    devices = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]
    path.write_text(json.dumps({"deviceProperties": devices, "traceEvents": events}), encoding="utf-8")
    return path


def test_a_trace_gives_kernels_alone_and_beside_communication(tmp_path: Path) -> None:
    events = [
        kernel("ampere_sgemm_128x64_tn", 0, 100),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_SIMPLE", 200, 150),
        kernel("ampere_sgemm_128x64_tn", 210, 120),
        kernel("vectorized_elementwise_kernel", 400, 10),
        kernel("ampere_sgemm_128x64_tn", 340, 40),  # beside it for a quarter: counts neither way
    ]
    (row,) = overlaps_of_trace(trace_file(tmp_path, events))
    assert row.cells["gpu"] == "NVIDIA A100-SXM4-80GB"
    assert row.cells["compute_class"] == "gemm"
    assert row.alone_s == pytest.approx(100e-6)
    assert row.overlap_fraction == 1.0
    assert row.slowdown == pytest.approx(1.2)
    assert predicted_slowdowns([row], shipped_coefficients())[0] > 1.0


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "holds no GPU kernels"),
        ([kernel("ampere_sgemm", 0, 10)], "no kernel ran both alone and beside communication"),
    ],
)
def test_traces_that_say_nothing(tmp_path: Path, events: list[dict[str, object]], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        overlaps_of_trace(trace_file(tmp_path, events))


def rows_slower_than_physics(factor: float, count: int) -> list[MeasuredOverlap]:
    """Products beside all-reduces, slowed by `factor` more than the physical model says."""
    rng = np.random.default_rng(0)
    cells = {
        "gpu": "NVIDIA A100-SXM4-80GB", "compute_class": "gemm", "compute_kernel": "ampere_sgemm_128x64_tn",
        "comm_kernel": "ncclDevKernel_AllReduce_RING_SIMPLE", "grid": "", "block": "", "n_alone": "20",
        "n_overlap": "20", "source": "made",
    }  # fmt: skip
    return [
        MeasuredOverlap(cells=cells, alone_s=float(t), overlap_fraction=1.0, slowdown=factor * 108 / 84)
        for t in rng.uniform(1e-4, 1e-2, count)
    ]


@pytest.mark.torch
def test_a_residual_learns_what_the_physical_model_misses() -> None:
    pytest.importorskip("torch")
    fit = fit_residual(rows_slower_than_physics(1.25, 60), shipped_coefficients(), source="made")
    (trial,) = fit.trials.values()  # one group and one GPU: only a fifth can be held back
    assert trial.physical == pytest.approx(np.log(1.25), rel=1e-3)
    assert trial.residual < 0.25 * trial.physical
    assert fit.helps


@pytest.mark.torch
def test_of_a_gpu_that_it_has_not_seen_it_says_nothing() -> None:
    """Rows of two GPUs that physics misses in opposite directions: each is learned, neither is taken for the other."""
    pytest.importorskip("torch")
    rows = rows_slower_than_physics(1.2, 60)
    other = [
        replace(row, cells={**row.cells, "gpu": "NVIDIA A100-SXM4-40GB"}, slowdown=row.slowdown / 1.2**2)
        for row in rows_slower_than_physics(1.2, 60)
    ]
    fit = fit_residual(rows + other, shipped_coefficients(), source="made")
    assert set(fit.trials) == {"a fifth", "a group", "a GPU"}
    assert fit.trials["a GPU"].residual == pytest.approx(fit.trials["a GPU"].physical)
    assert fit.helps
    assert "a GPU      physical 0.182, with the residual 0.182" in fit.text()
    wrong = replace(fit.trials["a GPU"], residual=0.3)
    assert not replace(fit, trials={**fit.trials, "a GPU": wrong}).helps


STREAM = (
    "made,A100 (108 SMs),elementwise,vectorized_elementwise,ncclDevKernel_AllReduce_RING_SIMPLE,{us},1.0,20,20,{s}\n"
)


def streams(packets: float) -> str:
    """A table of streaming kernels on a card, slowed as that many packets ahead have it."""
    alone_us = [50 + 20 * i for i in range(8)]
    Path("alone.csv").write_text(HEADER + "".join(STREAM.format(us=us, s=1.0) for us in alone_us), encoding="utf-8")
    shipped = shipped_coefficients()
    made = replace(shipped, sharing=replace(shipped.sharing, packets_ahead=packets))
    slow = predicted_slowdowns(read_overlaps(Path("alone.csv")), made).tolist()
    return HEADER + "".join(STREAM.format(us=us, s=f"{s:.6f}") for us, s in zip(alone_us, slow, strict=True))


@pytest.mark.parametrize("packets", [4.0, 8.0])
def test_packets_ahead_are_found_where_rows_tell(in_tmp: None, packets: float) -> None:
    Path("streams.csv").write_text(streams(packets), encoding="utf-8")
    fit = fit_overlap([Path("streams.csv")], start=shipped_coefficients())
    assert fit.sharing.packets_ahead == pytest.approx(packets, rel=0.05)


def test_packets_ahead_are_the_likely_ones_where_rows_do_not_tell(in_tmp: None) -> None:
    Path("own.csv").write_text(HEADER + GEMM.format(us=900) * 6, encoding="utf-8")
    fit = fit_overlap([Path("own.csv")], start=shipped_coefficients())
    assert fit.sharing.packets_ahead == pytest.approx(2.0)
    assert list(fit.allowed) == pytest.approx([0.25, 16.0])


@pytest.mark.torch
def test_few_rows_teach_nothing() -> None:
    with pytest.raises(SpecError, match="measured = 10: rows that count are fewer than 50"):
        fit_residual(rows_slower_than_physics(1.2, 10), shipped_coefficients(), source="made")


HEADER = "source,gpu,compute_class,compute_kernel,comm_kernel,alone_us,overlap_ratio,n_alone,n_overlap,slowdown\n"
GEMM = "made,NVIDIA A100-SXM4-80GB,gemm,ampere_sgemm_128x64_tn,ncclDevKernel_AllReduce_RING_SIMPLE,{us},1.0,20,20,1.6\n"


def test_validate_overlap_adds_a_column_and_prints_scores(cli: Cli) -> None:  # noqa: F811
    Path("own.csv").write_text(HEADER + GEMM.format(us=900) * 6, encoding="utf-8")
    done = cli("validate", "overlap", "own.csv", "--out", "predicted.csv")
    assert done.code == 0, done.err
    assert "mean over groups: 0.2187" in done.out  # log(1.6 / (108 / 84))
    lines = Path("predicted.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == HEADER.strip() + ",predicted_slowdown"
    assert float(lines[1].rsplit(",", 1)[1]) == pytest.approx(108 / 84, rel=1e-5)


@pytest.mark.torch
def test_calibrate_overlap_writes_what_validate_and_predict_take(cli: Cli) -> None:  # noqa: F811
    pytest.importorskip("torch")
    Path("own.csv").write_text(HEADER + "".join(GEMM.format(us=100 + 10 * i) for i in range(60)), encoding="utf-8")
    done = cli("calibrate", "overlap", "own.csv", "--out", "own.toml")
    assert done.code == 0, done.err
    assert user_coefficients(Path("own.toml")).residual is not None
    done = cli("validate", "overlap", "own.csv", "--out", "predicted.csv", "--calibration", "own.toml")
    assert float(done.out.split("mean over groups: ")[1][:6]) < 0.05


def steps_of_a_profile() -> list[dict[str, object]]:
    """55 products, each alone and beside an all-reduce that makes it 1.6 times as long, six times; and what else a
    profile holds: calls of the host, copies, steps."""
    reduce = "ncclDevKernel_AllReduce_Sum_bf16_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)"
    more = {"stream": 7, "correlation": 1, "est. achieved occupancy %": 31, "registers per thread": 254}
    events: list[dict[str, object]] = [
        {"cat": "user_annotation", "name": "ProfilerStep#4", "ph": "X", "ts": 5.6e9, "dur": 9e6, "args": {}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ph": "X", "ts": 5.6e9, "dur": 4.0, "args": {}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ph": "X", "ts": 5.6e9, "dur": 4.0, "args": {"device": 0}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
    ]
    now_us = 5.6e9
    for i in range(55):
        name, took = f"ampere_bf16_s16816gemm_bf16_128x128_ldg8_{i}_tn", 100.0 + 10.0 * i
        for _ in range(6):
            events.append(kernel(name, now_us, took, **more))
            now_us += took + 5.0
            events.append(kernel(reduce, now_us, 1.6 * took, grid=[24, 1, 1], block=[640, 1, 1], stream=20))
            events.append(kernel(name, now_us, 1.6 * took, **more))
            now_us += 1.6 * took + 5.0
    return events


@pytest.mark.torch
def test_calibrate_overlap_takes_a_profile_from_end_to_end(cli: Cli) -> None:  # noqa: F811
    pytest.importorskip("torch")
    trace_file(Path(), steps_of_a_profile())
    Path("trace.json.gz").write_bytes(gzip.compress(Path("trace.json").read_bytes()))
    done = cli("calibrate", "overlap", "trace.json.gz", "--out", "own.toml")
    assert done.code == 0, done.err
    assert "55 rows; mean" in done.out
    assert user_coefficients(Path("own.toml")).residual is not None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "trace.json.gz"),
        (b"{}", "trace.json.gz"),
        (gzip.compress(b'{"traceEvents": 3}'), "traceEvents"),
        (gzip.compress(b'{"traceEvents": [')[:-9], "trace.json.gz"),
    ],
    # A gzip header holds the time, so the bytes would give each worker of the tests other names.
    ids=["empty", "not gzip", "no list", "cut"],
)
def test_a_broken_profile_is_refused_in_one_line(cli: Cli, data: bytes, message: str) -> None:  # noqa: F811
    Path("trace.json.gz").write_bytes(data)
    done = cli("calibrate", "overlap", "trace.json.gz", "--out", "own.toml")
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not Path("own.toml").exists()


PLAIN = "gpu,compute_class,compute_kernel,comm_kernel,alone_us,overlap_ratio,slowdown\n"
ROW = "NVIDIA A100-SXM4-80GB,gemm,ampere_sgemm_128x64_tn,ncclDevKernel_AllReduce_RING_SIMPLE,{us},1.0,1.6\n"


@pytest.mark.torch
def test_the_required_columns_are_enough(cli: Cli) -> None:  # noqa: F811
    pytest.importorskip("torch")
    Path("own.csv").write_text(PLAIN + "".join(ROW.format(us=100 + 10 * i) for i in range(60)), encoding="utf-8")
    done = cli("calibrate", "overlap", "own.csv", "--out", "own.toml")
    assert done.code == 0, done.err
    assert "60 rows; mean |log(predicted / measured)|" in done.out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "measured = 'bad.csv': has no row below its header"),
        ("NVIDIA A100,gemm,ampere_sg", "bad.csv: line 2 = '3 cells': the header names 7 columns; fix: complete"),
        (ROW.strip().format(us=90) + ",1,2", "bad.csv: line 2 = '9 cells': the header names 7 columns"),
        (
            ROW.format(us=90).replace(",gemm,", ",gemmm,"),
            "bad.csv: line 2: compute_class = 'gemmm': is no class of kernels; fix: did you mean gemm",
        ),
        (ROW.format(us=0), "bad.csv: line 2: alone_us = '0': must be above 0"),
    ],
)
@pytest.mark.parametrize("command", ["calibrate", "validate"])
def test_a_table_that_cannot_be_is_refused_by_its_line(cli: Cli, command: str, rows: str, message: str) -> None:  # noqa: F811
    Path("bad.csv").write_text(PLAIN + rows, encoding="utf-8")
    done = cli(command, "overlap", "bad.csv", "--out", "out.csv")
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROW.format(us=90) * 3, "measured = 3: rows that count are fewer than 50; fix: measure more kernels"),
        (
            ROW.format(us=9) * 3,
            "measured = 0: rows that count are fewer than 50 (not counted: 3 rows (first row 1): alone_us must be 20",
        ),
        (
            ROW.format(us=90).replace("A100-SXM4-80GB", "T1000").replace("ampere_", "") * 60,
            "measured = 0: rows that count are fewer than 50 (not counted: of GPUs that are not known: NVIDIA T1000)",
        ),
    ],
)
def test_too_few_rows_that_count_are_said_why(cli: Cli, rows: str, message: str) -> None:  # noqa: F811
    Path("few.csv").write_text(PLAIN + rows, encoding="utf-8")
    done = cli("calibrate", "overlap", "few.csv", "--out", "own.toml")
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_validate_overlap_takes_the_shipped_residual(cli: Cli) -> None:  # noqa: F811
    Path("own.csv").write_text(HEADER + GEMM.format(us=900) * 6, encoding="utf-8")
    done = cli("validate", "overlap", "own.csv", "--out", "predicted.csv", "--interference", "learned")
    assert done.code == 0, done.err
    done = cli("validate", "overlap", "own.csv", "--out", "predicted.csv", "--interference", "none")
    assert done.code == 2
    assert "interference = 'none': must be one of physical, learned" in done.err


def test_validate_overlap_without_rows_that_count_says_so(cli: Cli) -> None:  # noqa: F811
    Path("few.csv").write_text(PLAIN + ROW.format(us=9) * 3, encoding="utf-8")
    done = cli("validate", "overlap", "few.csv", "--out", "predicted.csv")
    assert done.code == 0, done.err
    assert "nan" not in done.out
    assert "no score: no group of GPU and class has 5 rows that count (3 rows (first row 1): alone_us" in done.out


@pytest.mark.parametrize("command", ["calibrate", "validate"])
def test_a_folder_that_is_not_there_is_refused_before_any_work(cli: Cli, command: str) -> None:  # noqa: F811
    done = cli(command, "overlap", "nothing.csv", "--out", "nofolder/own.toml")
    assert done.code == 2
    assert "out = 'nofolder/own.toml': its folder does not exist" in done.err


def test_calibrate_overlap_refuses_what_it_cannot_use(cli: Cli) -> None:  # noqa: F811
    Path("bad.csv").write_text(HEADER + GEMM.format(us="fast"), encoding="utf-8")
    done = cli("calibrate", "overlap", "bad.csv", "--out", "own.toml")
    assert done.code == 2
    assert "bad.csv: line 2: alone_us = 'fast': must be a finite number" in done.err
