"""`validate kernels`: tables of measured kernels, what is declined, and the scores."""

import csv
from pathlib import Path

import pytest

from echo_explore.compute import shipped_calibration
from echo_explore.compute.chip import chip_of
from echo_explore.compute.kernel_table import read_kernel_table
from echo_explore.core import SpecError
from echo_explore.specs import load_cluster
from echo_explore.validation import KernelScores, validate_kernels

GEMM = "gpu,dtype,batch,m,n,k,latency_us,source\n"
ATTENTION = "gpu,dtype,kv_dtype,batch,heads,kv_heads,seq_q,seq_k,head_dim,causal,pass,latency_us,kernel,source\n"
STREAM = "gpu,op,dtype,rows,cols,pass,latency_us,approx_bytes,kernel\n"


def _run(tmp_path: Path, text: str, *, allow_fallback: bool = False) -> tuple[KernelScores, list[dict[str, str]]]:
    measured, out = tmp_path / "measured.csv", tmp_path / "predicted.csv"
    measured.write_text(text)
    scores = validate_kernels(measured, out, shipped_calibration(), allow_fallback=allow_fallback)
    with out.open() as file:
        return scores, list(csv.DictReader(file))


def test_products_are_predicted_and_what_no_gpu_computes_is_declined(tmp_path: Path) -> None:
    text = GEMM + (
        "A100-SXM4-80GB,bfloat16,1,4096,4096,4096,600,\n"
        "A100-SXM4-80GB,fp8,1,4096,4096,4096,600,\n"
        "H100-SXM5-80GB,fp8,1,4096,4096,4096,100,\n"
        "Abacus,bfloat16,1,4096,4096,4096,100,\n"
        "A100-SXM4-80GB,bfloat16,1,16,32,32,0,\n"
    )
    scores, rows = _run(tmp_path, text)
    assert [bool(row["predicted_us"]) for row in rows] == [True, False, True, False, True]
    assert "fp8: a100-sxm4-80gb has no such rate" in rows[1]["reason"]
    assert "is not in the catalogue of GPUs" in rows[3]["reason"]
    assert rows[0]["m"] == "4096"
    assert (scores.num_rows, scores.num_short, scores.num_declined) == (5, 0, 2)
    assert list(scores.untimed) == [6]
    declined = scores.groups["A100-SXM4-80GB fp8"]
    assert (declined.coverage_fraction, declined.mean) == (0.0, 1.0)
    assert scores.groups["A100-SXM4-80GB bfloat16"].num_rows == 1
    assert scores.groups["A100-SXM4-80GB bfloat16"].mean < 0.1
    assert "declined 1: fp8" in scores.text()


def test_rows_of_another_card_than_they_name_are_priced_as_what_ran_them(tmp_path: Path) -> None:
    """vidur's A100 stops at the bandwidth of a PCIe card (gpus.toml); SGLang's, of SXM cards, is faster."""
    shape = "float16,1,8192,8192,8192,4700"
    text = GEMM + "".join(
        f"{gpu},{shape},{source}\n"
        for gpu, source in (
            ("A100-SXM4-80GB", "vidur/mlp_up_proj"), ("A100-PCIE-80GB", "vidur/mlp_up_proj"),
            ("A100-SXM4-80GB", "aic012/sglang-0.5.10"),
        )
    )  # fmt: skip
    _, rows = _run(tmp_path, text)
    named, card, sxm = (float(row["predicted_us"]) for row in rows)
    assert named == card
    assert sxm < 0.97 * card


def test_a_fallback_is_counted(tmp_path: Path) -> None:
    scores, rows = _run(tmp_path, GEMM + "A100-SXM4-80GB,fp8,1,4096,4096,4096,600,\n", allow_fallback=True)
    assert scores.num_fallbacks == 1
    assert float(rows[0]["predicted_us"]) > 2 * 4096**3 / 312e6


def test_attention_knows_kernels_passes_and_two_widths(tmp_path: Path) -> None:
    shape = "2,64,8,8192,8192,128,1"
    text = ATTENTION + (
        f"GB300,bfloat16,,{shape},fwd,1185,cudnn,\n"  # cudnn-frontend benchmarks (NVIDIA, MIT, 2026)
        f"GB300,bfloat16,,{shape},bwd,3700,cudnn,\n"
        f"GB300,bfloat16,,{shape},fwd+bwd,4900,cudnn,\n"
        "GB300,bfloat16,,2,128,128,4096,4096,192/128,0,fwd,1419,cudnn,\n"
        "GB300,bfloat16,,2,128,128,4096,4096,64,1,fwd,202,cudnn-swa128,\n"
        "H100-SXM5-80GB,bfloat16,bfloat16,1,32,8,4096,4096,128,1,bwd,600,fa3,\n"
        "H100-SXM5-80GB,bfloat16,bfloat16,1,32,8,4096,4096,128,1,fwd,200,fa3,\n"
    )
    _, rows = _run(tmp_path, text)
    forward, backward, both, wide, windowed, hopper_backward, hopper = (float(row["predicted_us"]) for row in rows)
    assert forward == pytest.approx(1185, rel=0.15)
    assert both == pytest.approx(forward + backward, rel=1e-4)
    assert 2 < backward / forward < 5
    assert wide == pytest.approx(1419, rel=0.15)
    assert windowed == pytest.approx(202, rel=0.25)
    assert hopper_backward / hopper == pytest.approx(2.968, rel=1e-3)  # the shipped ratio, from pairs of H200


def test_streams_need_no_bytes_column(tmp_path: Path) -> None:
    with_bytes = "A100-SXM4-80GB,add,float16,8192,8192,fwd,250,402653184,vllm/sarathi\n"
    without = "A100-SXM4-80GB,add,float16,8192,8192,fwd,250,,vllm/sarathi\n"
    _, rows = _run(tmp_path, STREAM + with_bytes + without)
    assert rows[0]["predicted_us"] == rows[1]["predicted_us"]


def test_a_gpu_of_ones_own(tmp_path: Path) -> None:
    measured = tmp_path / "measured.csv"
    measured.write_text(GEMM + "mine,bfloat16,1,4096,4096,4096,200,\n")
    chips = {"mine": chip_of(load_cluster("h100-ndr").device)}
    scores = validate_kernels(measured, tmp_path / "out.csv", shipped_calibration(), chips=chips)
    assert scores.num_declined == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        (GEMM, "has no rows"),
        ("a,b\n1,2\n", "is no table of gemm, attention or elementwise kernels"),
        ("gpu,m,n,k,latency_us\nx,1,1,1,1\n", "dtype = '\\(missing\\)': is a column that a gemm table must have"),
        ("gpu,dtype,m,n,k,latency_ms\nx,bf16,1,1,1,1\n", "latency_us .*latency_ms is not read"),
        ("gpu,dtype,m,n,k,latency_us,latency_ms\nx,bf16,1,1,1,1,1\n", "holds times in more than one column"),
        (GEMM + "A100-SXM4-80GB,bfloat16,1,8,8,8,3 ms,\n", "row 2: latency_us = '3 ms': must be a number of microsec"),
        (GEMM + "A100-SXM4-80GB,bfloat16,1,8,8,8,0,\n", "no row has a measured time above 0"),
        (GEMM + "A100-SXM4-80GB,bfloat16,1,8.5,8,8,3,\n", "row 2: m = '8.5': must be a whole number from 1 up"),
        (GEMM + "A100-SXM4-80GB,bfloat16,1,8\n", "row 2 = 4: has not 8 cells"),
        (ATTENTION + "GB300,bfloat16,,1,1,1,512,512,x,1,fwd,9,cudnn,\n", "head_dim = 'x'"),
        (
            ATTENTION + "GB300,bfloat16,,1,32,5,512,512,64,1,fwd,9,cudnn,\n",
            "row 2: kv_heads = '5': must divide heads = 32",
        ),
        (
            STREAM + "A100-SXM4-80GB,add,float16,8,8,fwd,25,nan,\n",
            "row 2: approx_bytes = 'nan': must be a number from 0",
        ),
        (ATTENTION + "GB300,bfloat16,,1,1,1,512,512,64,1,sideways,9,cudnn,\n", "pass = 'sideways': must be fwd or bwd"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        _run(tmp_path, text)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "predicted.csv").write_text("mine")
    with pytest.raises(SpecError, match="exists, and nothing is overwritten"):
        _run(tmp_path, GEMM + "A100-SXM4-80GB,bfloat16,1,8,8,8,3,\n")
    with pytest.raises(SpecError, match="does not exist"):
        read_kernel_table(tmp_path / "nowhere.csv")
    (tmp_path / "long.csv").write_text(GEMM + "A100-SXM4-80GB,bfloat16,1,8,8,8," + "3" * 200_000 + ",\n")
    with pytest.raises(SpecError, match="cannot be read as CSV: field larger than field limit"):
        read_kernel_table(tmp_path / "long.csv")


@pytest.mark.parametrize("allow_fallback", [False, True])
@pytest.mark.parametrize(
    ("head", "good", "bad"),
    [
        (GEMM, "A100-SXM4-80GB,bfloat16,1,4096,4096,4096,600,\n", "A100-SXM4-80GB,int4,1,4096,4096,4096,600,\n"),
        (STREAM, "A100-SXM4-80GB,add,float16,8192,8192,fwd,250,,\n", "A100-SXM4-80GB,add,int4,8192,8192,fwd,250,,\n"),
    ],
)
def test_a_data_type_that_nobody_knows_costs_its_row_only(
    tmp_path: Path, head: str, good: str, bad: str, allow_fallback: bool
) -> None:
    scores, rows = _run(tmp_path, head + good + bad, allow_fallback=allow_fallback)
    assert [bool(row["predicted_us"]) for row in rows] == [True, False]
    assert "dtype = 'int4': is not a data type of the model" in rows[1]["reason"]
    assert (scores.num_declined, scores.num_fallbacks) == (1, 0)


@pytest.mark.parametrize(
    ("head", "good", "bad", "said"),
    [
        (GEMM, "H100-SXM5-80GB,bfloat16,1,4096,4096,4096,250,\n",
         "H100-SXM5-80GB,bfloat16,1,100000000,4096,4096,250,\n",
         "size = 100000000: is beyond 67108864"),
        (STREAM, "A100-SXM4-80GB,add,float16,8192,8192,fwd,250,,\n",
         "A100-SXM4-80GB,frob,float16,8192,8192,fwd,250,,\n",
         "op = 'frob': is no operation that the model knows"),
    ],
)  # fmt: skip
def test_rows_outside_the_domain_are_declined_or_fall_back(
    tmp_path: Path, head: str, good: str, bad: str, said: str
) -> None:
    _, rows = _run(tmp_path, head + good + bad)
    assert [bool(row["predicted_us"]) for row in rows] == [True, False]
    assert said in rows[1]["reason"]
    (tmp_path / "predicted.csv").unlink()
    scores, rows = _run(tmp_path, head + good + bad, allow_fallback=True)
    assert scores.num_fallbacks == 1
    assert float(rows[1]["predicted_us"]) > 0


def test_rows_without_a_time_or_in_another_unit_are_named(tmp_path: Path) -> None:
    row = "A100-SXM4-80GB,bfloat16,1,4096,4096,4096,{},\n"
    text = _run(tmp_path, GEMM + "".join(row.format(time) for time in ("600", "0.6", "", "-3")))[0].text()
    assert "4 rows, 1 below 10 us, 2 without a time" in text
    assert "not above 0 in 2 rows (row 4, 5)" in text
    assert "more than 20 times off the prediction in 1 rows (row 3): all times must be in microseconds" in text


def test_a_table_of_short_kernels_has_no_score(tmp_path: Path) -> None:
    text = _run(tmp_path, GEMM + "A100-SXM4-80GB,bfloat16,1,8,8,8,3,\n")[0].text()
    assert "nan" not in text
    assert "no score: no row has a time of 10 us or more" in text
