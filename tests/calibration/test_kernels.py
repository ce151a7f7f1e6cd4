"""`calibrate kernels`: tables, traces and profiles become corrections that predictions use."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_explore.calibration.kernel_fit import fit_kernels, write_corrections
from echo_explore.calibration.kernel_rows import MeasuredKernels, gemm_row, measured_table, stream_row
from echo_explore.calibration.kineto import read_profiler_trace
from echo_explore.compute import RooflineModel, load_calibration, shipped_calibration
from echo_explore.compute.kernel_table import read_kernel_table
from echo_explore.core import SpecError
from echo_explore.graph import DType, OpClass, OpRow, build_graph
from tests.compute.graphs import device, stack

DEVICE = device("h100-ndr")
SHAPES = [(1, m, n, k) for m in (256, 1024, 8192) for n in (1024, 8192) for k in (512, 4096, 16384)]


def _rows() -> list[OpRow]:
    streams = [stream_row(OpClass.NORM, 2048, c, 4.0 * 2048 * c) for c in range(1024, 9216, 1024)]
    return [*(gemm_row(*shape, DType.BF16) for shape in SHAPES), *streams]


def _measured(factor: float, *, clock: str = "isolated") -> MeasuredKernels:
    model = RooflineModel(shipped_calibration(), sustained=clock == "sustained")
    times = model.kernel_times(build_graph(_rows()), DEVICE, stack()).time_s
    return MeasuredKernels(
        rows=tuple(_rows()), time_s=times * factor, measured=clock, source="made up", num_ignored={},  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("clock", ["isolated", "sustained"])
def test_a_uniform_factor_is_found_written_and_used(tmp_path: Path, clock: str) -> None:
    fit = fit_kernels([_measured(1.3, clock=clock)], DEVICE, shipped_calibration())
    assert {c.op_class for c in fit.corrections} == {"gemm", "norm"}
    for correction in fit.corrections:
        np.testing.assert_allclose(correction.factor, 1.3)
        assert correction.measured == clock
    assert max(fit.after) < 1e-6 < 0.2 < min(fit.before)
    path = tmp_path / "mine.toml"
    write_corrections(path, fit)
    mine = RooflineModel(load_calibration(path), sustained=clock == "sustained")
    times = mine.kernel_times(build_graph(_rows()), DEVICE, stack()).time_s
    np.testing.assert_allclose(times, _measured(1.3, clock=clock).time_s, rtol=1e-5)
    assert mine.covers(DEVICE)
    with pytest.raises(SpecError, match="exists, and nothing is overwritten"):
        write_corrections(path, fit)


def test_corrections_cover_a_device_that_had_none(tmp_path: Path) -> None:
    own = DEVICE.model_copy(update={"calibration": "my-gpu", "name": "My GPU"})
    fit = fit_kernels([_measured(1.1)], own, shipped_calibration())
    write_corrections(tmp_path / "mine.toml", fit)
    mine = RooflineModel.from_file(tmp_path / "mine.toml")
    assert mine.covers(own)
    assert not RooflineModel.shipped().covers(own)


def test_a_table_of_one_gpu(tmp_path: Path) -> None:
    lines = ["gpu,dtype,m,n,k,latency_us"]
    lines += [f"H100-SXM5-80GB,bfloat16,{m},{n},{k},{100 + m}" for _, m, n, k in SHAPES]
    lines.append("A100-SXM4-80GB,bfloat16,8,8,8,5")
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines))
    measured = measured_table(read_kernel_table(path), DEVICE)
    assert len(measured.rows) == len(SHAPES)
    assert measured.num_ignored == {"of another GPU": 1}
    assert fit_kernels([measured], DEVICE, shipped_calibration()).skipped == {"of another GPU": 1}
    path.write_text("\n".join([lines[0], "H100-SXM5-80GB,bfloat16,8,8,8,0"]))
    with pytest.raises(SpecError, match="row 2: latency_us = '0': must be above 0"):
        measured_table(read_kernel_table(path), DEVICE)
    path.write_text("\n".join([lines[0], "A100-SXM4-80GB,bfloat16,8,8,8,5"]))
    with pytest.raises(SpecError, match="no row is of H100-SXM5-80GB"):
        measured_table(read_kernel_table(path), DEVICE)


def test_attention_and_elementwise_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "gpu,dtype,batch,heads,kv_heads,seq_q,seq_k,head_dim,causal,pass,latency_us,kernel\n"
        "H100-SXM5-80GB,bfloat16,1,8,8,4096,4096,128,1,bwd,300,cudnn-swa1024\n"
    )
    (row,) = measured_table(read_kernel_table(path), DEVICE).rows
    assert row.dims == (1, 8, 8, 4096, 4096, 128, 1, 1024)
    assert row.phase.name == "BACKWARD"
    head = "gpu,dtype,batch,heads,kv_heads,seq_q,seq_k,head_dim,causal,pass,latency_us\n"
    two = "H100-SXM5-80GB,bfloat16,1,8,8,4096,4096,128,1,fwd+bwd,300\n"
    path.write_text(head + two + two.replace("fwd+bwd", "fwd"))
    measured = measured_table(read_kernel_table(path), DEVICE)
    assert len(measured.rows) == 1
    assert measured.num_ignored == {"of two passes in one time": 1}
    path.write_text(head + two)
    with pytest.raises(SpecError, match="pass = 'fwd\\+bwd': holds two kernels in one time"):
        measured_table(read_kernel_table(path), DEVICE)
    path.write_text("gpu,op,rows,cols,latency_us\nH100-SXM5-80GB,rms_norm,4096,8192,30\n")
    (row,) = measured_table(read_kernel_table(path), DEVICE).rows
    assert (row.op_class, row.bytes_read + row.bytes_written) == (OpClass.NORM, 4.0 * 4096 * 8192)


def test_too_few_measurements_are_no_calibration() -> None:
    few = MeasuredKernels(
        rows=(gemm_row(1, 64, 64, 64, DType.BF16),), time_s=np.ones(1), measured="isolated", source="x", num_ignored={}
    )
    with pytest.raises(SpecError, match="no class has 5 of them"):
        fit_kernels([few], DEVICE, shipped_calibration())


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((1e-3,), "times below the .* us that the GPU takes, and so are 18 of 18 kernels of gemm bf16 isolated"),
        ((1.0, 1e-3), "and so are 9 of 18 kernels .* fix: give all times in microseconds"),
        ((1.0, 1.0, 1e3), "differs from the middle of gemm bf16 isolated by more than 200 times, as 6 of 18"),
    ],
)
def test_times_of_another_unit_are_no_calibration(factors: tuple[float, ...], said: str) -> None:
    good = _measured(1.1)
    times = good.time_s[: len(SHAPES)] * np.resize(factors, len(SHAPES))
    mixed = MeasuredKernels(
        rows=good.rows[: len(SHAPES)], time_s=times, measured="isolated", source="t.csv", num_ignored={}
    )
    with pytest.raises(SpecError, match=said):
        fit_kernels([mixed], DEVICE, shipped_calibration())


def test_kernels_that_the_model_has_no_time_for_are_left_out() -> None:
    bad = [gemm_row(1, 64, 64, 64, DType.FP8)] * 6 + [gemm_row(1, 2**27, 64, 64, DType.BF16)] * 7
    extra = MeasuredKernels(
        rows=tuple(bad), time_s=np.ones(13), measured="isolated", source="x", num_ignored={}
    )  # fmt: skip
    a100 = device("a100-80gb-hdr")
    with pytest.raises(
        SpecError, match=r"6 kernels in fp8, which A100.* has no rate for; 7 kernels of gemm with a size"
    ):
        fit_kernels([extra], a100, shipped_calibration())
    fit = fit_kernels([_measured(1.1), extra], a100, shipped_calibration())
    assert {c.dtype for c in fit.corrections} == {"bf16", "any"}
    assert sum(fit.skipped.values()) == 13


def _operator(key: int, name: str, dims: list[list[int]], concrete: tuple[str, ...] = ()) -> dict[str, Any]:
    arguments = {
        "External id": key, "Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims), "Concrete Inputs": concrete
    }  # fmt: skip
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": key, "dur": 1, "args": arguments}


def _kernel(key: int, duration: float | None) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": key, "dur": duration, "args": {"External id": key}}


def test_kernels_of_a_profiler_trace(tmp_path: Path) -> None:
    four = [1, 32, 4096, 128]
    events = [
        _operator(1, "aten::mm", [[4096, 1024], [1024, 2048]]),
        _operator(2, "aten::addmm", [[2048], [4096, 1024], [1024, 2048]]),
        _operator(3, "aten::bmm", [[8, 512, 64], [8, 64, 256]]),
        _operator(4, "aten::_flash_attention_forward", [[1, 4096, 32, 128], [1, 4096, 8, 128], [1, 4096, 8, 128]],
                  ("", "", "", "True")),
        _operator(5, "aten::_scaled_dot_product_flash_attention_backward", [four] * 4),
        _operator(6, "aten::native_layer_norm", [[4, 512, 1024]]),
        _operator(7, "aten::add", [[64, 64], [64, 64]]),
        _operator(8, "aten::something_else", [[3]]),
        _kernel(1, 80.0), _kernel(2, 60.0), _kernel(2, 30.0), _kernel(3, 9.0), _kernel(4, 200.0), _kernel(5, 500.0),
        _kernel(6, 7.0), _kernel(7, 3.0), _kernel(8, 5.0), _kernel(9, 5.0), _kernel(1, None),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    measured = read_profiler_trace(path)
    assert measured.measured == "sustained"
    assert [row.dims for row in measured.rows[:5]] == [
        (1, 4096, 2048, 1024), (1, 4096, 2048, 1024), (8, 512, 256, 64), (1, 32, 8, 4096, 4096, 128, 1, 0),
        (1, 32, 32, 4096, 4096, 128, 0, 0),
    ]  # fmt: skip
    np.testing.assert_allclose(measured.time_s * 1e6, [80, 90, 9, 200, 500, 7, 3])
    assert measured.rows[5].bytes_read + measured.rows[5].bytes_written == 4.0 * 4 * 512 * 1024
    assert sum(measured.num_ignored.values()) == 3


def test_kernels_of_flash_attn_in_a_trace(tmp_path: Path) -> None:
    query, key = [2, 4096, 32, 128], [2, 4096, 8, 128]
    scalars = ("0.", "0.088", "True", "1023", "0", "0.", "", "True")
    forward, backward = ("",) * 3 + scalars, ("",) * 9 + (*scalars[:2], "False", "-1", "-1", "0.", "", "True")
    events = [
        _operator(1, "flash_attn::_flash_attn_forward", [query, key, key], forward),
        _operator(2, "flash_attn::_flash_attn_backward", [query, query, key, key, query], backward),
        _kernel(1, 100.0), _kernel(2, 300.0),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    rows = read_profiler_trace(path).rows
    assert [row.dims for row in rows] == [(2, 32, 8, 4096, 4096, 128, 1, 1024), (2, 32, 8, 4096, 4096, 128, 0, 0)]
    assert [row.phase.name for row in rows] == ["FORWARD", "BACKWARD"]


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("aten::mm", [[8, 5], [7, 4]]),
        ("aten::mm", [[-1, 5], [5, 4]]),
        ("aten::bmm", [[2, 8, 5], [3, 5, 4]]),
        ("aten::_scaled_dot_product_flash_attention", [[1, 32, 64, 64], [1, 5, 64, 64], [1, 5, 64, 64]]),
        ("aten::native_layer_norm", [[4, 0, 16]]),
    ],
)
def test_operators_whose_shapes_do_not_fit_are_counted(tmp_path: Path, name: str, dims: list[list[int]]) -> None:
    events = [
        _operator(1, "aten::mm", [[64, 64], [64, 64]]),
        _operator(2, name, dims),
        _kernel(1, 5.0),
        _kernel(2, 5.0),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    measured = read_profiler_trace(path)
    assert len(measured.rows) == 1
    assert measured.num_ignored == {"operators of no class, or whose shapes are missing or don't fit together": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            json.dumps({"traceEvents": [_operator(1, "aten::mm", [[8, 8], [8, 8]]), _kernel(1, 0.0)]}),
            "dur = 0.0: must be microseconds above 0",
        ),
        (
            json.dumps({"traceEvents": [_operator(1, "aten::mm", [[8, 8], [8, 8]]), _kernel(1, -2.0)]}),
            "dur = '-2.0': must be microseconds, finite and not negative",
        ),
        ("{}", "traceEvents = '\\(missing\\)': must be a list"),
        ("no json", "is no JSON trace"),
        ('{"traceEvents": []}', "holds no GPU kernels; fix: profile with ProfilerActivity.CUDA"),
        (json.dumps({"traceEvents": [_kernel(1, 2.0)]}), "no kernel belongs to an operator with known shapes"),
    ],
)
def test_traces_that_say_nothing(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=said):
        read_profiler_trace(path)


@pytest.mark.torch
def test_the_profiler_runs_on_the_cpu_and_its_file_is_used(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from echo_explore.calibration.profiler import SMALL_SUITE, profile_kernels

    measured = profile_kernels("cpu")
    expected = len(SMALL_SUITE.products) + len(SMALL_SUITE.attention) + 4 * len(SMALL_SUITE.streams)
    assert len(measured.rows) == expected
    assert (measured.time_s > 0).all()
    assert "CPU" in measured.source
    fit = fit_kernels([measured], DEVICE, shipped_calibration())
    assert {c.op_class for c in fit.corrections} == {"attention", "copy", "elementwise", "gemm", "norm", "softmax"}
    write_corrections(tmp_path / "cpu.toml", fit)
    slow = RooflineModel.from_file(tmp_path / "cpu.toml", sustained=False)
    row = gemm_row(1, 64, 64, 64, DType.FP32)
    assert slow.kernel_times(build_graph([row]), DEVICE, stack()).time_s[0] > 0
    with pytest.raises(SpecError, match="torch-device = 'nonsense': cannot be used"):
        profile_kernels("nonsense")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from echo_explore.cli.main import main

    table, out = tmp_path / "t.csv", tmp_path / "mine.toml"
    rows = [f"H100-SXM5-80GB,bfloat16,{m},{n},{k},{100 + m}" for _, m, n, k in SHAPES]
    table.write_text("\n".join(["gpu,dtype,m,n,k,latency_us", *rows]))
    base = ["echo-explore", "calibrate", "kernels"]
    for arguments, code, said in (
        ([str(table), "--cluster", "h100-ndr", "--out", str(out)], 0, "gemm           bf16   isolated"),
        ([str(table), "--cluster", "h100-ndr", "--out", str(out)], 2, "exists, and nothing is overwritten"),
        ([str(table), "--cluster", "h100-ndr"], 2, "is the calibration file to write"),
        (["--cluster", "h100-ndr", "--out", str(tmp_path / "x.toml")], 2, "there is nothing to fit"),
        ([str(table), "--out", str(tmp_path / "x.toml")], 2, "says which GPU"),
    ):
        monkeypatch.setattr("sys.argv", [*base, *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        shown = capsys.readouterr()
        assert caught.value.code == code
        assert said in shown.out + shown.err
