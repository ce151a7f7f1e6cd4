"""A small learned residual over physical features: log t = log base + r(features, categories).

    h1 = silu(W1 x + sum of category columns + b1);  h2 = silu(W2 h1 + b2);  r = clip(w3 . h2 + b3, low, high)

x are features scaled to zero mean and unit spread and held inside the range of the tables, so that outside of it the
physical base alone decides. A category is a text such as `device:gb200` or `source:vidur`; one that the fit has not
seen counts as the mean of its field. Weights are fitted by scripts/fit_compute.py and shipped as plain text.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError
from echo_explore.specs.base import read_toml

Singles = npt.NDArray[np.float32]
CHUNK = 8192
"""Rows evaluated at once: the activations of one chunk stay in the cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualNetwork:
    """One fitted residual.

    Attributes:
        features: names of the inputs, in order.
        categories: names of the category inputs, `field:value`.
        low, high: (num_features,) range of the tables.
        mean, scale: (num_features,) of the fit.
        first, first_bias: (num_features + num_categories, width) and (width,).
        second, second_bias: (width, width) and (width,).
        third, third_bias: (width,) and a number.
        residual_low, residual_high: range that r is held in.
        ceiling_base_s: (num_knots,) bases at which `ceiling` holds; empty: no ceiling.
        ceiling: by device, `*` for any other: (num_knots,) largest r at such a base, linear in the log of the base
            between, constant outside; base times e^ceiling never falls with the base.
        base_exponent: p of the physical base that it was fitted over; see gemm_features.
        sigma_log: spread of log(measured / predicted) on rows held back, by device; `*` for any other.
        facts: source, date, sample size, errors.
    """

    features: tuple[str, ...]
    categories: tuple[str, ...]
    low: Singles
    high: Singles
    mean: Singles
    scale: Singles
    first: Singles
    first_bias: Singles
    second: Singles
    second_bias: Singles
    third: Singles
    third_bias: float
    residual_low: float
    residual_high: float
    ceiling_base_s: npt.NDArray[np.float64]
    ceiling: Mapping[str, npt.NDArray[np.float64]]
    base_exponent: float
    sigma_log: Mapping[str, float]
    facts: Mapping[str, Any]

    @cached_property
    def _columns(self) -> Mapping[str, Singles]:
        start = len(self.features)
        return {name: self.first[start + i] for i, name in enumerate(self.categories)}

    def highest(self, base_s: npt.NDArray[np.float64], device: str) -> npt.NDArray[np.float64]:
        """(num_rows,) largest residual of a device at a base."""
        if self.ceiling_base_s.size == 0:
            return np.full(base_s.shape, self.residual_high)
        return np.interp(np.log(base_s), np.log(self.ceiling_base_s), self.ceiling.get(device, self.ceiling["*"]))

    def names(self, field: str) -> list[str]:
        """Values of a field of categories that the fit has seen."""
        found = (category.partition(":") for category in self.categories)
        return [value for name, _, value in found if name == field and value != "*"]

    def knows(self, category: str) -> bool:
        """Whether the fit has seen it."""
        return category in self._columns

    def knows_field(self, field: str) -> bool:
        """Whether a field is an input at all."""
        return any(name.startswith(f"{field}:") for name in self.categories)

    def offset(self, categories: Iterable[str]) -> Singles:
        """(width,) what the categories add to the first layer."""
        total = self.first_bias.copy()
        for name in categories:
            field = name.partition(":")[0]
            column = self._columns.get(name)
            if column is None:
                like = [c for n, c in self._columns.items() if n.startswith(f"{field}:")]
                column = np.mean(like, axis=0) if like else np.zeros_like(total)
            total += column
        return total

    def residual(self, features: npt.NDArray[np.float64], categories: Iterable[str]) -> npt.NDArray[np.float64]:
        """(num_rows,) r for rows that share their categories.

        Args:
            features: (num_rows, num_features).
            categories: one text a field.
        """
        offset = self.offset(categories)
        weights = self.first[: len(self.features)]
        out = np.empty(features.shape[0], dtype=np.float64)
        for start in range(0, features.shape[0], CHUNK):
            x = features[start : start + CHUNK].astype(np.float32)
            np.clip(x, self.low, self.high, out=x)
            x -= self.mean
            x /= self.scale
            hidden = _silu(x @ weights + offset)
            hidden = _silu(hidden @ self.second + self.second_bias)
            out[start : start + CHUNK] = hidden @ self.third
        return np.clip(out + self.third_bias, self.residual_low, self.residual_high)


def _silu(x: Singles) -> Singles:
    half = np.float32(0.5) * x
    return np.asarray(half * (np.float32(1.0) + np.tanh(half)), dtype=np.float32)  # no overflow, unlike x / (1 + e^-x)


def _numbers(table: Mapping[str, Any], key: str, shape: tuple[int, ...], where: str) -> Singles:
    text = table.get(key)
    if not isinstance(text, str):
        raise SpecError(f"{where}.{key}", text, "must be a text of numbers", "fit it again")
    try:
        values = np.array(text.split(), dtype=np.float32)
    except ValueError:
        raise SpecError(f"{where}.{key}", text[:40], "must hold numbers only", "fit it again") from None
    if values.size != int(np.prod(shape)) or not np.isfinite(values).all():
        raise SpecError(f"{where}.{key}", values.size, f"must hold {shape} finite numbers", "fit it again")
    return values.reshape(shape)


def load_networks(path: Path) -> dict[str, ResidualNetwork]:
    """The networks of a file by name.

    Raises:
        SpecError: the file or a value in it is wrong.
    """
    data = read_toml(path)
    if data.get("schema") != 1:
        raise SpecError(f"{path.name}: schema", data.get("schema"), "must be 1", "fit it again")
    found = {}
    for name, table in data.get("network", {}).items():
        where = f"{path.name}: network.{name}"
        features, categories = tuple(table["features"]), tuple(table["categories"])
        width, inputs = int(table["width"]), len(features)
        found[name] = ResidualNetwork(
            features=features,
            categories=categories,
            low=_numbers(table, "low", (inputs,), where),
            high=_numbers(table, "high", (inputs,), where),
            mean=_numbers(table, "mean", (inputs,), where),
            scale=_numbers(table, "scale", (inputs,), where),
            first=_numbers(table, "first", (inputs + len(categories), width), where),
            first_bias=_numbers(table, "first_bias", (width,), where),
            second=_numbers(table, "second", (width, width), where),
            second_bias=_numbers(table, "second_bias", (width,), where),
            third=_numbers(table, "third", (width,), where),
            third_bias=float(table["third_bias"]),
            residual_low=float(table["residual_low"]),
            residual_high=float(table["residual_high"]),
            ceiling_base_s=np.array(table.get("ceiling_base_us", ()), dtype=np.float64) * 1e-6,
            ceiling={k: np.array(v, dtype=np.float64) for k, v in table.get("ceiling", {}).items()},
            base_exponent=float(table.get("base_exponent", math.inf)),
            sigma_log={str(k): float(v) for k, v in table["sigma_log"].items()},
            facts={k: table[k] for k in ("source", "fitted_on", "num_rows", "held_back") if k in table},
        )
    return found
