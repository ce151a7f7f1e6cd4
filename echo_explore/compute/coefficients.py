"""The calibration file of the compute model: coefficients by device, op class and data type, from TOML.

The file is written by `scripts/fit_compute.py`; docs/compute_model.md explains its keys. Times in the file are in
microseconds (`_us`), everything else is a share (`_fraction`), a ratio or a count.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from echo_explore.compute.attention import AttentionCoefficients
from echo_explore.compute.corrections import CORRECTIONS, Correction, read_corrections
from echo_explore.compute.gemm import Floats, GemmCoefficients
from echo_explore.compute.streaming import StreamCoefficients
from echo_explore.core import MissingCalibration, SpecError
from echo_explore.core.hashing import file_hash
from echo_explore.core.home import find_data_file
from echo_explore.specs.base import read_toml

STREAM_CLASSES = (
    "elementwise", "copy", "rope", "norm", "softmax", "reduction", "embedding", "cross_entropy", "optimizer", "permute",
    "batch_norm", "quantise",
)  # fmt: skip
"""Op classes, in lower case, that `streaming` prices."""
SUBSTITUTES: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16", "fp16"),
    "fp16": ("fp16", "bf16"),
    "tf32": ("tf32", "bf16"),
    "fp32": ("fp32",),
    "fp8": ("fp8", "bf16"),
    "mxfp8": ("mxfp8", "fp8", "bf16"),
    "nvfp4": ("nvfp4", "fp8", "bf16"),
}
"""Data types whose table serves when the own one is missing, best first; the peak is always that of the type itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCoefficients:
    """All coefficients of one device.

    Attributes:
        name: key in the file.
        extra_sigma_log: uncertainty of borrowing from another device, 0 for a measured one.
        gemm: by data type.
        attention: by data type.
        streaming: by op class in lower case.
        note: why coefficients of another device apply, empty for a measured one.
    """

    name: str
    extra_sigma_log: float
    gemm: Mapping[str, GemmCoefficients]
    attention: Mapping[str, AttentionCoefficients]
    streaming: Mapping[str, StreamCoefficients]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The whole file.

    Attributes:
        reference: where the coefficients come from.
        source_hash: content hash of the file.
        devices: by name.
        generic: shares that hold for no device in particular, with their wider spread.
        largest_extent: largest m, n or k of the tables.
        longest_sequence: longest sequence of the attention tables.
        learned: whether products in 16 bits come from the learned networks; false for a file of coefficients alone.
        corrections: factors that a user measured, applied last.
    """

    reference: str
    source_hash: str
    devices: Mapping[str, DeviceCoefficients]
    generic: DeviceCoefficients
    largest_extent: int
    longest_sequence: int
    learned: bool = False
    corrections: tuple[Correction, ...] = ()


class _Table:
    """One table of the file; wrong values name their place."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def number(self, key: str, *, low: float = 0.0, high: float = math.inf, above: bool = False) -> float:
        """The number under `key`, within [low, high], or above low."""
        value = self.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SpecError(f"{self.where}.{key}", value, "must be a finite number", "fit it again or correct the file")
        if value > high or value < low or (above and value == low):
            raise SpecError(f"{self.where}.{key}", value, f"must lie between {low} and {high}", "correct the file")
        return float(value)

    def seconds(self, key: str) -> float:
        """The time under `key` + `_us`, in seconds."""
        return self.number(f"{key}_us") * 1e-6

    def share(self, key: str) -> float:
        """The share under `key`, above 0 and at most 1."""
        return self.number(key, high=1.0, above=True)

    def array(self, key: str, *, high: float = math.inf) -> Floats:
        """The list of positive numbers under `key`."""
        values = self.data.get(key)
        if not isinstance(values, list) or not values:
            raise SpecError(f"{self.where}.{key}", values, "must be a list of numbers", "correct the file")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
                raise SpecError(
                    f"{self.where}.{key}", value, f"must be a number above 0 and at most {high}", "correct it"
                )
        return np.array(values, dtype=np.float64)


def _gemm(table: _Table) -> GemmCoefficients:
    tiles = table.data.get("tiles")
    try:
        rows, columns = zip(*((float(a), float(b)) for a, b in (str(t).split("x") for t in tiles or ())), strict=True)
    except ValueError:
        raise SpecError(
            f"{table.where}.tiles", tiles, 'must be a list such as ["256x128"]', "correct the file"
        ) from None
    efficiency = table.array("tile_efficiency_fraction", high=1.0)
    if efficiency.shape != (len(rows),):
        raise SpecError(
            f"{table.where}.tile_efficiency_fraction", len(efficiency), "needs one value a tile", "correct it"
        )
    return GemmCoefficients(
        tile_rows=np.array(rows),
        tile_columns=np.array(columns),
        tile_efficiency_fraction=efficiency,
        launch_floor_s=table.seconds("launch_floor"),
        wave_overhead_s=table.seconds("wave_overhead"),
        wave_quantisation_fraction=table.number("wave_quantisation_fraction", high=1.0),
        split_overhead_s=table.seconds("split_overhead"),
        split_traffic_factor=table.number("split_traffic_factor"),
        memory_efficiency_fraction=table.share("memory_efficiency_fraction"),
        combine_exponent=table.number("combine_exponent", low=1.0),
        isolated_rate_fraction=table.share("isolated_rate_fraction"),
        sustained_rate_fraction=table.share("sustained_rate_fraction"),
        unaligned_slowdown=table.number("unaligned_slowdown", low=1.0),
        sigma_log=table.number("sigma_log", above=True),
    )


def _attention(table: _Table) -> AttentionCoefficients:
    dims, efficiency = table.array("head_dims"), table.array("efficiency_fraction", high=1.0)
    if dims.shape != efficiency.shape or np.any(np.diff(dims) <= 0):
        raise SpecError(f"{table.where}.head_dims", list(dims), "must ascend, one efficiency each", "correct the file")
    return AttentionCoefficients(
        head_dims=dims,
        efficiency_fraction=efficiency,
        launch_floor_s=table.seconds("launch_floor"),
        block_overhead_s=table.seconds("block_overhead"),
        wave_quantisation_fraction=table.number("wave_quantisation_fraction", high=1.0),
        memory_efficiency_fraction=table.share("memory_efficiency_fraction"),
        backward_ratio=table.number("backward_ratio", low=1.0),
        sigma_log=table.number("sigma_log", above=True),
        backward_sigma_log=table.number("backward_sigma_log", above=True),
    )


def _stream(table: _Table) -> StreamCoefficients:
    return StreamCoefficients(
        launch_floor_s=table.seconds("launch_floor"),
        bandwidth_fraction=table.share("bandwidth_fraction"),
        backward_bandwidth_fraction=table.share("backward_bandwidth_fraction"),
        sigma_log=table.number("sigma_log", above=True),
    )


def _section(data: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise SpecError(f"{where}.{name}", str(value)[:60], "must be a table of tables", "correct the file")
    return value


def _device(
    name: str, data: Mapping[str, Any], where: str, known: Mapping[str, DeviceCoefficients]
) -> DeviceCoefficients:
    allowed = {"gemm", "attention", "streaming", "inherits", "because", "extra_sigma_log"}
    if unknown := set(data) - allowed:
        raise SpecError(f"{where}.{min(unknown)}", "(key)", "is not a known key", f"use {', '.join(sorted(allowed))}")
    parent = None
    if "inherits" in data:
        parent = known.get(data["inherits"])
        if parent is None:
            raise SpecError(f"{where}.inherits", data["inherits"], "must name a device above it", "move or correct it")
    gemm = {k: _gemm(_Table(v, f"{where}.gemm.{k}")) for k, v in _section(data, "gemm", where).items()}
    attention = {
        k: _attention(_Table(v, f"{where}.attention.{k}")) for k, v in _section(data, "attention", where).items()
    }
    streaming = {k: _stream(_Table(v, f"{where}.streaming.{k}")) for k, v in _section(data, "streaming", where).items()}
    if unknown := set(streaming) - set(STREAM_CLASSES):
        raise SpecError(f"{where}.streaming", min(unknown), "is not such a class", f"use {', '.join(STREAM_CLASSES)}")
    return DeviceCoefficients(
        name=name,
        extra_sigma_log=_Table(data, where).number("extra_sigma_log") if "extra_sigma_log" in data else 0.0,
        gemm={**(parent.gemm if parent else {}), **gemm},
        attention={**(parent.attention if parent else {}), **attention},
        streaming={**(parent.streaming if parent else {}), **streaming},
        note=str(data.get("because", "")),
    )


def load_calibration(path: Path) -> Calibration:
    """The calibration in a TOML file.

    Raises:
        SpecError: the file or a value in it is wrong.
    """
    data = read_toml(path)
    if data.get("kind") == CORRECTIONS:
        shipped = shipped_calibration()
        return replace(
            shipped,
            corrections=read_corrections(data, path.name),
            source_hash=file_hash(path),
            reference=f"{shipped.reference}, corrected by {data.get('reference', path.name)}",
        )
    if data.get("schema") != 1:
        raise SpecError(
            f"{path.name}: schema", data.get("schema"), "must be 1, the only version so far", "fit it again"
        )
    generic = _device("generic", data.get("generic", {}), f"{path.name}: generic", {})
    if missing := [c for c in STREAM_CLASSES if c not in generic.streaming]:
        raise SpecError(f"{path.name}: generic.streaming", missing[0], "is missing", "add the table")
    for section, table in (("gemm", generic.gemm), ("attention", generic.attention)):
        if "bf16" not in table:
            raise SpecError(f"{path.name}: generic.{section}", "bf16", "is missing", "add the table")
    devices: dict[str, DeviceCoefficients] = {}
    for name, table in _section(data, "device", path.name).items():
        devices[name] = _device(name, table, f"{path.name}: device.{name}", devices)
    root = _Table(data, f"{path.name}")
    return Calibration(
        reference=str(data.get("reference", path.name)),
        source_hash=file_hash(path),
        devices=devices,
        generic=generic,
        largest_extent=int(root.number("largest_extent", low=1)),
        longest_sequence=int(root.number("longest_sequence", low=1)),
        learned=data.get("learned") is True,
    )


def shipped_calibration(name: str = "compute") -> Calibration:
    """The calibration `name` of the state folder, else the one that the package ships.

    Raises:
        MissingCalibration: there is none.
    """
    path = find_data_file("calibrations", name)
    if path is None:
        raise MissingCalibration(
            f"calibration {name!r} is in no folder of calibrations; fix: install the package again"
        )
    return load_calibration(path)
