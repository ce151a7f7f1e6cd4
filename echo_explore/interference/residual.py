"""A small network on top of the physical model, trained on measured kernels and evaluated in numpy.

s = max(1, physical s * exp(LIMIT * tanh(sum_j w_j exp(-|z - c_j|^2 / (2 r_j^2))))), z the features less their means
over their spreads: radial units, each of which says something of kernels and collectives near its centre alone, so that
far from all of them the physical model stands. A kernel that no collective slows stays as it is.

References:
    Broomhead and Lowe, Multivariable functional interpolation and adaptive networks, Complex Systems 2 (1988).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_explore.core import SpecError
from echo_explore.interference.loads import Chip, Floats, KernelLoads, Traffic

LIMIT = 0.7
"""Most that it moves the log of a slowdown: a factor of two."""
FEATURES = (
    "log10 of the time in us",
    "share of memory",
    "share of arithmetic",
    "log10 of blocks over those that fit at once",
    "share of SMs taken",
    "log10 of 1 + burst over time",
    "share of memory of the traffic's link bytes",
    "log of the physical slowdown",
)
_LAYERS = (("mean", 1), ("spread", 1), ("centre", 2), ("radius", 1), ("out", 1))


def features(factor: Floats, loads: KernelLoads, traffic: Traffic, chip: Chip) -> Floats:
    """(num_kernels, 8) what the network sees of each kernel beside the traffic; see FEATURES."""
    time_s = np.where(np.isfinite(loads.time_s), np.maximum(loads.time_s, 1e-7), 1.0)
    n = time_s.shape[0]
    columns = (
        np.log10(time_s * 1e6),
        loads.memory_fraction,
        loads.arithmetic_fraction,
        np.log10(loads.num_blocks / (loads.blocks_per_sm * chip.num_sms)),
        np.full(n, min(traffic.num_channels, chip.num_sms) / chip.num_sms),
        np.log10(1.0 + traffic.moving_fraction * traffic.burst_s / time_s),
        np.full(n, traffic.moving_fraction * traffic.link_bytes_per_s / chip.memory_bandwidth_bytes_per_s),
        np.log(factor),
    )
    return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residual:
    """The network.

    Attributes:
        mean: (8,) of the features.
        spread: (8,) of the features, above 0.
        centre: (num_units, 8) in spreads from the mean.
        radius: (num_units,) in spreads, above 0.
        out: (num_units,) weights.
        source: what it was trained on.
    """

    mean: Floats
    spread: Floats
    centre: Floats
    radius: Floats
    out: Floats
    source: str

    def log_correction(self, inputs: Floats) -> Floats:
        """(num_kernels,) what is added to the log of the physical slowdown; nothing far from what it was trained on."""
        z = (inputs - self.mean) / self.spread
        distance = ((z[:, None, :] - self.centre[None, :, :]) ** 2).sum(axis=2)
        return np.asarray(LIMIT * np.tanh(np.exp(-distance / (2.0 * self.radius**2)) @ self.out))

    def applied(self, factor: Floats, loads: KernelLoads, traffic: Traffic, chip: Chip) -> Floats:
        """(num_kernels,) corrected factors, at least 1."""
        moved = factor * np.exp(self.log_correction(features(factor, loads, traffic, chip)))
        return np.asarray(np.where(factor > 1.0, np.maximum(1.0, moved), factor))

    def to_toml(self) -> dict[str, Any]:
        """Lists for a calibration file."""
        arrays = {name: np.round(getattr(self, name), 6).tolist() for name, _ in _LAYERS}
        return {"source": self.source, **arrays}


def read_residual(table: Mapping[str, Any], where: str) -> Residual:
    """The network of a table of a calibration file.

    Raises:
        SpecError: a key is missing, unknown, of the wrong shape, or holds something that is no number.
    """
    arrays: dict[str, Floats] = {}
    for name in table:
        if name not in ("source", *(n for n, _ in _LAYERS)):
            raise SpecError(f"{where}.{name}", table[name], "is not a known key", "remove it")
    for name, rank in _LAYERS:
        if name not in table:
            raise SpecError(f"{where}.{name}", "(missing)", "must be given", "train it again")
        try:
            array = np.asarray(table[name], dtype=np.float64)
        except (ValueError, TypeError):
            array = np.full((1,) * (rank + 1), np.nan)
        if array.ndim != rank or not np.isfinite(array).all():
            raise SpecError(
                f"{where}.{name}", "(array)", f"must hold finite numbers in {rank} dimensions", "train it again"
            )
        arrays[name] = array
    units, inputs = arrays["centre"].shape
    shapes = {"mean": (inputs,), "spread": (inputs,), "radius": (units,), "out": (units,)}
    if inputs != len(FEATURES):
        raise SpecError(f"{where}.centre", inputs, f"must have {len(FEATURES)} columns", "train it again")
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise SpecError(f"{where}.{name}", arrays[name].shape, f"must have the shape {shape}", "train it again")
    for name in ("spread", "radius"):
        if (arrays[name] <= 0).any():
            raise SpecError(f"{where}.{name}", "(array)", "must be above 0", "train it again")
    return Residual(source=str(table.get("source", "")), **arrays)
