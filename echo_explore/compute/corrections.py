"""Corrections of kernel times that a user measured on a GPU: a factor by op class, data type and length of the kernel.

    t' = t f(t),  log f linear in log t between the knots and constant outside

A factor whose logarithm falls faster than log t rises would make longer kernels shorter; such a file is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError

Floats = npt.NDArray[np.float64]
CORRECTIONS = "kernel-corrections"
"""`kind` of such a file."""
FEWEST = 5
"""Measurements that a class needs to be corrected; fewer say too little about the spread."""
OP_CLASSES = (
    "gemm", "attention", "elementwise", "copy", "rope", "norm", "softmax", "reduction", "embedding", "cross_entropy",
    "optimizer", "permute", "batch_norm", "quantise",
)  # fmt: skip
"""Classes that the model corrects: products, attention, and those that only move bytes."""
MATRIX_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "any")
"""Data types of products and attention in a correction."""
Clock = Literal["isolated", "sustained"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """What was measured of one op class in one data type on one GPU.

    Attributes:
        device: calibration key or name of the GPU, in lower case.
        op_class: lower-case name.
        dtype: lower-case name of the data type, or `any`.
        measured: `isolated` kernels at high clocks, or `sustained` ones inside training steps.
        time_s: (num_knots,) predicted times, ascending.
        factor: (num_knots,) measured over predicted.
        sigma_log: spread of log(measured / corrected).
        num_rows: measurements behind it.
    """

    device: str
    op_class: str
    dtype: str
    measured: Clock
    time_s: Floats
    factor: Floats
    sigma_log: float
    num_rows: int

    def applied(self, time_s: Floats) -> Floats:
        """(num_rows,) corrected seconds; 0 stays 0."""
        log = np.interp(np.log(np.maximum(time_s, 1e-12)), np.log(self.time_s), np.log(self.factor))
        return time_s * np.exp(log)


def read_corrections(data: Mapping[str, Any], where: str) -> tuple[Correction, ...]:
    """The corrections of a parsed file.

    Raises:
        SpecError: wrong schema, a missing key, a value out of range.
    """
    if data.get("schema") != 1:
        raise SpecError(f"{where}: schema", data.get("schema"), "must be 1, the only version so far", "calibrate again")
    tables = data.get("correction")
    if not isinstance(tables, list) or not tables:
        raise SpecError(f"{where}: correction", tables, "must be at least one [[correction]]", "calibrate again")
    return tuple(_correction(table, f"{where}: correction[{i}]") for i, table in enumerate(tables))


def _correction(table: Mapping[str, Any], where: str) -> Correction:
    def numbers(key: str) -> Floats:
        values = table.get(key)
        if not isinstance(values, list) or not values:
            raise SpecError(f"{where}.{key}", values, "must be a list of numbers", "calibrate again")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise SpecError(f"{where}.{key}", value, "must be a finite number above 0", "correct it")
        return np.array(values, dtype=np.float64)

    def text(key: str) -> str:
        value = table.get(key)
        if not isinstance(value, str) or not value:
            raise SpecError(f"{where}.{key}", value, "must be a text", "correct it")
        return value.lower()

    time_s, factor = numbers("time_us") * 1e-6, numbers("factor")
    if time_s.shape != factor.shape or np.any(np.diff(time_s) <= 0):
        raise SpecError(f"{where}.time_us", table["time_us"], "must ascend, one factor each", "calibrate again")
    if np.any(np.diff(np.log(factor)) < -np.diff(np.log(time_s))):
        raise SpecError(f"{where}.factor", table["factor"], "makes a longer kernel shorter", "calibrate again")
    measured = text("measured")
    if measured not in ("isolated", "sustained"):
        raise SpecError(f"{where}.measured", measured, "must be isolated or sustained", "correct it")
    op_class = text("op_class")
    if op_class not in OP_CLASSES:
        raise SpecError(f"{where}.op_class", op_class, "is no class that is corrected", f"use {', '.join(OP_CLASSES)}")
    dtype = text("dtype")
    allowed = MATRIX_DTYPES if op_class in ("gemm", "attention") else ("any",)
    if dtype not in allowed:
        raise SpecError(f"{where}.dtype", dtype, f"is no data type of {op_class}", f"use {', '.join(allowed)}")
    num_rows = table.get("num_rows")
    if isinstance(num_rows, bool) or not isinstance(num_rows, int) or num_rows < FEWEST:
        raise SpecError(f"{where}.num_rows", num_rows, f"must be {FEWEST} measurements or more", "measure more kernels")
    sigma = table.get("sigma_log")
    if isinstance(sigma, bool) or not isinstance(sigma, int | float) or not 0 < sigma < math.inf:
        raise SpecError(f"{where}.sigma_log", sigma, "must be a finite number above 0", "calibrate again")
    return Correction(
        device=text("device"),
        op_class=op_class,
        dtype=dtype,
        measured="isolated" if measured == "isolated" else "sustained",
        time_s=time_s,
        factor=factor,
        sigma_log=float(sigma),
        num_rows=num_rows,
    )
