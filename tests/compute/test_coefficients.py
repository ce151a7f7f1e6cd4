"""The calibration file: what it must hold, and one line for what is wrong with it."""

import re
from pathlib import Path

import numpy as np
import pytest

from echo_explore.compute import load_calibration, shipped_calibration
from echo_explore.compute.coefficients import STREAM_CLASSES
from echo_explore.compute.gemm import alignment_slowdown, combine, mixed_waves
from echo_explore.core import MissingCalibration, SpecError

SHIPPED = Path(__file__).parents[2] / "echo_explore/_shipped/calibrations/compute.toml"


def test_every_table_says_where_it_comes_from() -> None:
    lines = SHIPPED.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("["):
            assert lines[number - 1].startswith("# "), f"line {number + 1}: {line}"


def test_measured_devices_have_their_own_coefficients() -> None:
    calibration = shipped_calibration()
    for name in ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "gb200", "gb300"):
        own = calibration.devices[name]
        assert own.extra_sigma_log == 0
        assert "bf16" in own.gemm
        assert "bf16" in own.attention
        assert {"elementwise", "norm"} <= set(own.streaming)
        assert own.gemm["bf16"].sustained_rate_fraction <= own.gemm["bf16"].isolated_rate_fraction
    assert set(calibration.generic.streaming) == set(STREAM_CLASSES)


def test_borrowed_devices_say_why_and_are_less_sure() -> None:
    devices = shipped_calibration().devices
    parents = {"h800-sxm5-80gb": "h100-sxm5-80gb", "a100-sxm4-40gb": "a100-sxm4-80gb", "b300-sxm": "gb300"}
    for name, parent in parents.items():
        assert devices[name].gemm["bf16"] is devices[parent].gemm["bf16"]
        assert devices[name].extra_sigma_log > 0
        assert devices[name].note


@pytest.mark.parametrize(
    ("pattern", "text", "message"),
    [
        (r"schema = 1", "schema = 2", "schema = 2: must be 1"),
        (r"tiles = \[[^\]]*\]", "tiles = [3]", "must be a list such as"),
        (r"tile_efficiency_fraction = \[[^\]]*\]", "tile_efficiency_fraction = [0.5]", "needs one value a tile"),
        (r"tile_efficiency_fraction = \[[^\]]*\]", "tile_efficiency_fraction = [1.5]", "at most 1"),
        (r"launch_floor_us = [0-9.]+", 'launch_floor_us = "2 us"', "must be a finite number"),
        (r"bandwidth_fraction = [0-9.]+", "bandwidth_fraction = 1.2", "must lie between"),
        (r"head_dims = \[[^\]]*\]", "head_dims = [128, 64]", "must ascend"),
        (r"\[generic.streaming.norm\]", "[generic.streaming.norms]", "is not such a class"),
        (r"\[generic.gemm.bf16\]", "[generic.gemms.bf16]", "is not a known key"),
        (r'inherits = "[^"]*"', 'inherits = "nothing"', "must name a device above it"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path: Path, pattern: str, text: str, message: str) -> None:
    path = tmp_path / "compute.toml"
    path.write_text(re.sub(pattern, text, SHIPPED.read_text(), count=1))
    with pytest.raises(SpecError, match=message) as error:
        load_calibration(path)
    assert "compute.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_calibration_is_named() -> None:
    with pytest.raises(MissingCalibration, match="'no-such'"):
        shipped_calibration("no-such")


def test_waves() -> None:
    grid = np.array([0.2, 1.0, 1.5, 3.0])
    np.testing.assert_allclose(mixed_waves(grid, 1.0), [1, 1, 2, 3])
    np.testing.assert_allclose(mixed_waves(grid, 0.0), [1, 1, 1.5, 3])


def test_combine_lies_between_the_larger_and_the_sum() -> None:
    a, b = np.array([1.0, 2.0, 0.0]), np.array([1.0, 0.5, 0.0])
    for exponent in (1.0, 2.0, 8.0):
        both = combine(a, b, exponent)
        assert (both >= np.maximum(a, b)).all()
        assert (both <= a + b + 1e-12).all()


def test_alignment() -> None:
    n = np.full(5, 4096.0)
    k = np.array([128.0, 108.0, 150.0, 75.0, 64.0])
    np.testing.assert_allclose(alignment_slowdown(n, k, 2.0, 2.0), [1, 2 ** (1 / 3), 2 ** (2 / 3), 2, 1])
    np.testing.assert_allclose(alignment_slowdown(k, n, 2.0, 2.0), [1, 2 ** (1 / 3), 2 ** (2 / 3), 2, 1])
    assert (alignment_slowdown(n, k, 4.0, 1.0) == 1).all()
