"""Tables of overlapped kernels: read, predicted, scored; what is wrong with them is told in one line."""

from pathlib import Path

import pytest

from echo_explore.core import SpecError
from echo_explore.interference.coefficients import load_coefficients, shipped_coefficients
from echo_explore.interference.measured import first_beside, predicted_slowdowns, read_overlaps
from echo_explore.interference.overlap_score import score_overlap

HEADER = "source,gpu,compute_class,compute_kernel,comm_kernel,alone_us,overlap_ratio,n_alone,slowdown\n"
GEMM = "made,NVIDIA A100-SXM4-80GB,gemm,ampere_sgemm_128x64_tn,ncclDevKernel_AllReduce_RING_LL,900,1.0,20,1.03\n"


def table(tmp_path: Path, text: str) -> Path:
    """A file of that text."""
    path = tmp_path / "overlap.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_is_predicted_and_scored(tmp_path: Path) -> None:
    rows = read_overlaps(table(tmp_path, HEADER + GEMM * 6))
    factors = predicted_slowdowns(rows, shipped_coefficients())
    assert factors.shape == (6,)
    assert (factors >= 1.0).all()
    assert (factors < 1.5).all()
    assert "mean over groups" in score_overlap(rows, factors.tolist()).text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu,alone_us\n", "has no column compute_class"),
        (HEADER + GEMM.replace(",1.0,20", ",1.5,20"), "line 2: overlap_ratio = '1.5': must be a share from 0 to 1"),
        (HEADER + GEMM + GEMM.replace(",1.03", ",-1"), "line 3: slowdown = -1.0: must be above 0"),
        (HEADER + GEMM.replace(",900,", ",-900,"), "line 2: alone_us = '-900': must be above 0"),
        (HEADER + GEMM.replace(",900,", f",{'9' * 200_000},"), "cannot be read: field larger than field limit"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_overlaps(table(tmp_path, text))


def test_missing_table(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist; fix: check the path"):
        read_overlaps(tmp_path / "none.csv")


def test_bad_constants(tmp_path: Path) -> None:
    path = tmp_path / "interference.toml"
    path.write_text("schema = 1\n[sharing]\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"interference.toml: sharing.packets_ahead = '\(missing\)'"):
        load_coefficients(path)


NORM = "made,A100 (108 SMs),norm,GammaBetaBackwardCUDAKernel_32x32,ncclAllReduce (2 GPUs),{alone},1.0,1,4.0\n"
BESIDE_NONE = "made,A100 (108 SMs),elementwise,vectorized_elementwise_kernel,ncclAllReduce (2 GPUs),50,0.0,1,1.0\n"


def test_a_weight_gradient_of_a_norm_waits_for_the_burst_of_its_bucket(tmp_path: Path) -> None:
    """Its few blocks stand still while the first chunks go out: what is added is the time of the burst."""
    rows = read_overlaps(
        table(tmp_path, HEADER + BESIDE_NONE + NORM.format(alone=70) + BESIDE_NONE + NORM.format(alone=98))
    )
    short, long = predicted_slowdowns(rows, shipped_coefficients())[[1, 3]]
    burst_s = 2 * 2 * 2**20 / (0.32 * 31.5e9)
    assert (long - 1) * 98e-6 == pytest.approx(burst_s)
    assert 3 < long < short < 8


def test_launches_beside_a_collective_that_waits_are_not_slowed(tmp_path: Path) -> None:
    rows = read_overlaps(table(tmp_path, HEADER + (BESIDE_NONE + NORM.format(alone=70) * 2) * 30))
    first = first_beside(rows)
    assert first[1]
    assert not first[2]


def test_products_lose_the_sms_of_the_channels(tmp_path: Path) -> None:
    """24 channels of 108 SMs: S / (S - k) = 1.286; measured 1.269 [Echo, arXiv 2412.12487, table 2, 2024]."""
    simple = GEMM.replace("RING_LL", "RING_SIMPLE")
    factor = predicted_slowdowns(read_overlaps(table(tmp_path, HEADER + simple)), shipped_coefficients())[0]
    assert factor == pytest.approx(108 / 84)
    assert factor == pytest.approx(1.269, rel=0.02)
