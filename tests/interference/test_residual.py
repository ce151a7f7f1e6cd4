"""The learned residual: bounded, never below 1, silent where physics sees nothing; bad arrays are named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.calibration.overlap import write_user_calibration
from echo_explore.core import SpecError
from echo_explore.interference.coefficients import (
    learned_coefficients,
    shipped_coefficients,
    shipped_residual,
    user_coefficients,
    with_residual,
)
from echo_explore.interference.residual import FEATURES, LIMIT, Residual, read_residual
from tests.interference.test_contention import CHIP, RING, kernels


def residual(weight: float, radius: float = 100.0) -> Residual:
    """One unit at the mean of what it was trained on; so wide, it adds nearly the same to every kernel."""
    width = len(FEATURES)
    return Residual(
        mean=np.zeros(width), spread=np.ones(width), centre=np.zeros((1, width)), radius=np.array([radius]),
        out=np.array([weight]), source="made",
    )  # fmt: skip


@given(st.floats(-50, 50), st.floats(1.0, 20.0))
def test_it_is_bounded_and_never_a_speed_up(bias: float, factor: float) -> None:
    moved = residual(bias).applied(np.array([factor]), kernels(0.3, 0.0, 24.0), RING, CHIP)[0]
    assert moved >= 1.0
    assert abs(np.log(moved / factor)) <= LIMIT + 1e-9


def test_far_from_its_training_it_is_silent() -> None:
    """Trained beside two channels, it says nothing of 24."""
    made = residual(1.0, radius=0.5)
    inputs = np.zeros((1, len(FEATURES)))
    assert made.log_correction(inputs)[0] == pytest.approx(LIMIT * np.tanh(1.0))
    assert made.log_correction(inputs + 2.0)[0] == pytest.approx(0.0, abs=1e-9)
    assert 0.0 < made.log_correction(inputs + 0.2)[0] < made.log_correction(inputs)[0]


def test_what_is_not_slowed_stays_so() -> None:
    assert residual(3.0).applied(np.array([1.0]), kernels(0.3, 0.0, 24.0), RING, CHIP) == pytest.approx([1.0])


def test_a_calibration_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    shipped = shipped_coefficients()
    write_user_calibration(path, shipped, residual(0.5))
    read = user_coefficients(path)
    assert read.sharing == shipped.sharing
    assert read.num_channels == dict(shipped.num_channels)
    assert read.residual is not None
    inputs = np.ones((2, len(FEATURES)))  # well inside
    assert read.residual.log_correction(inputs) == pytest.approx(residual(0.5).log_correction(inputs), abs=1e-5)
    with pytest.raises(SpecError, match="exists, and nothing is overwritten"):
        write_user_calibration(path, shipped, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spread": [0.0] * len(FEATURES)}, r"residual.spread = .*must be above 0"),
        ({"mean": [1.0]}, r"residual.mean = \(1,\): must have the shape \(8,\)"),
        ({"out": "no"}, "residual.out = .*must hold finite numbers in 1 dimensions"),
        ({"centre": [[1.0]]}, "residual.centre = 1: must have 8 columns"),
        ({"radius": [0.0]}, r"residual.radius = .*must be above 0"),
        ({"weights": []}, "residual.weights = .*is not a known key"),
    ],
)
def test_bad_arrays(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_residual(residual(0.0).to_toml() | change, "own.toml: residual")


def test_the_shipped_residual_is_silent_far_from_its_training() -> None:
    shipped = shipped_residual()
    inputs = shipped.mean + shipped.spread * shipped.centre
    assert np.abs(shipped.log_correction(inputs)).max() > 0.01
    assert shipped.log_correction(inputs + 20.0 * shipped.spread) == pytest.approx(np.zeros(len(inputs)), abs=1e-9)
    assert learned_coefficients().sharing == shipped_coefficients().sharing


def test_a_residual_of_ones_own_comes_before_the_shipped_one() -> None:
    own = replace(shipped_coefficients(), residual=residual(0.5))
    assert with_residual(own).residual is own.residual
    assert with_residual(shipped_coefficients()).residual is shipped_residual()


def test_a_missing_array() -> None:
    table = residual(0.0).to_toml()
    del table["out"]
    with pytest.raises(SpecError, match=r"residual.out = '\(missing\)'"):
        read_residual(table, "own.toml: residual")
