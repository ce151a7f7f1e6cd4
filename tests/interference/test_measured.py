"""Tables of overlapped kernels: read, predicted, scored; what is wrong with them is told in one line."""

from pathlib import Path

import pytest

from echo_explore.core import SpecError
from echo_explore.interference.coefficients import load_coefficients, shipped_coefficients
from echo_explore.interference.measured import predicted_slowdowns, read_overlaps
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
        (HEADER + GEMM.replace(",1.0,20", ",1.5,20"), "row 1: overlap_ratio = '1.5': must be a share from 0 to 1"),
        (HEADER + GEMM.replace(",900,", ",-900,"), "row 1: alone_us = -900.0: must not be negative"),
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
    with pytest.raises(SpecError, match=r"interference.toml: sharing.polling_path_fraction = '\(missing\)'"):
        load_coefficients(path)
