"""The calibration file as text; used by scripts/fit_compute.py."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_explore.compute.attention import AttentionCoefficients
from echo_explore.compute.gemm import GemmCoefficients


class Writer:
    """Collects the lines of the calibration file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def table(self, name: str, comment: str, values: Mapping[str, Any]) -> None:
        """One table: a comment line with source, sample and spread, then its keys."""
        self.lines += ["", f"# {comment}", f"[{name}]"]
        self.lines += [f"{key} = {_toml(value)}" for key, value in values.items()]

    def text(self) -> str:
        """The file."""
        return "\n".join(self.lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', "'") + '"'
    if isinstance(value, list | tuple | np.ndarray):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, int) or float(value).is_integer():
        return str(int(value))
    return f"{value:.4g}"


def gemm_table(c: GemmCoefficients) -> dict[str, Any]:
    """The keys of one GEMM table."""
    return {
        "tiles": [f"{a:.0f}x{b:.0f}" for a, b in zip(c.tile_rows, c.tile_columns, strict=True)],
        "tile_efficiency_fraction": list(c.tile_efficiency_fraction),
        "launch_floor_us": c.launch_floor_s * 1e6,
        "wave_overhead_us": c.wave_overhead_s * 1e6,
        "wave_quantisation_fraction": c.wave_quantisation_fraction,
        "split_overhead_us": c.split_overhead_s * 1e6,
        "split_traffic_factor": c.split_traffic_factor,
        "memory_efficiency_fraction": c.memory_efficiency_fraction,
        "combine_exponent": c.combine_exponent,
        "isolated_rate_fraction": c.isolated_rate_fraction,
        "sustained_rate_fraction": c.sustained_rate_fraction,
        "unaligned_slowdown": c.unaligned_slowdown,
        "sigma_log": c.sigma_log,
    }


def attention_table(c: AttentionCoefficients) -> dict[str, Any]:
    """The keys of one attention table."""
    return {
        "head_dims": list(c.head_dims),
        "efficiency_fraction": list(c.efficiency_fraction),
        "launch_floor_us": c.launch_floor_s * 1e6,
        "block_overhead_us": c.block_overhead_s * 1e6,
        "wave_quantisation_fraction": c.wave_quantisation_fraction,
        "memory_efficiency_fraction": c.memory_efficiency_fraction,
        "backward_ratio": c.backward_ratio,
        "sigma_log": c.sigma_log,
        "backward_sigma_log": c.backward_sigma_log,
    }
