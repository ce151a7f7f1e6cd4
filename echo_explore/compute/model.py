"""The first compute model: a roofline with measured efficiencies by op class, vectorised over the rows of a graph."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from echo_explore.compute.attention import AttentionCoefficients, attention_bytes, attention_flop, attention_time_s
from echo_explore.compute.coefficients import (
    SUBSTITUTES,
    Calibration,
    DeviceCoefficients,
    load_calibration,
    shipped_calibration,
)
from echo_explore.compute.gemm import Floats, GemmCoefficients, Machine, gemm_time_s
from echo_explore.compute.streaming import StreamCoefficients, stream_time_s
from echo_explore.compute.times import KernelTimes
from echo_explore.core import MissingCalibration, SpecError
from echo_explore.graph import DTYPE_BYTES, DType, ExecutionGraph, OpClass, Phase
from echo_explore.specs import DeviceSpec, StackProfile

Bools = npt.NDArray[np.bool_]
OTHER_RATE_FRACTION = 0.5
"""Share of the peak that a kernel of no known class is priced at; a guess, reported as extrapolated (2026-11-30)."""
MATRIX_DTYPES = {
    DType.FP32: "fp32",
    DType.TF32: "tf32",
    DType.BF16: "bf16",
    DType.FP16: "fp16",
    DType.FP8: "fp8",
    DType.MXFP8: "mxfp8",
    DType.NVFP4: "nvfp4",
}
"""Names of the data types that matrix units compute in."""
_STREAMS = {
    OpClass.NORM: "norm",
    OpClass.SOFTMAX: "softmax",
    OpClass.ELEMENTWISE: "elementwise",
    OpClass.REDUCTION: "reduction",
    OpClass.EMBEDDING: "embedding",
    OpClass.CROSS_ENTROPY: "cross_entropy",
    OpClass.COPY: "copy",
    OpClass.OPTIMIZER: "optimizer",
    OpClass.ROPE: "rope",
    OpClass.PERMUTE: "permute",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Signatures:
    """Distinct kernels of a graph: what their price depends on, and which rows are which."""

    op_class: npt.NDArray[np.int64]
    dtype: npt.NDArray[np.int64]
    backward: Bools
    dims: Floats
    num_bytes: Floats
    flop: Floats
    rows: npt.NDArray[np.intp]
    inverse: npt.NDArray[np.intp]

    def take(self, mask: Bools) -> "_Signatures":
        """The signatures under `mask`; `rows` and `inverse` stay as they are."""
        return replace(
            self,
            op_class=self.op_class[mask],
            dtype=self.dtype[mask],
            backward=self.backward[mask],
            dims=self.dims[mask],
            num_bytes=self.num_bytes[mask],
            flop=self.flop[mask],
        )


def _signatures(graph: ExecutionGraph) -> _Signatures:
    """Each distinct (class, dtype, backward or not, dims, bytes, FLOP) of the kernels once."""
    rows = np.flatnonzero(graph.is_compute)
    key = np.empty((rows.size, 5 + graph.dims.shape[1]), dtype=np.float64)
    key[:, 0] = graph.op_class[rows]
    key[:, 1] = graph.dtype[rows]
    key[:, 2] = graph.phase[rows] == Phase.BACKWARD
    key[:, 3] = graph.bytes_read[rows] + graph.bytes_written[rows]
    key[:, 4] = graph.flop[rows]
    key[:, 5:] = graph.dims[rows]
    first, inverse = _distinct(key)
    distinct = key[first]
    return _Signatures(
        op_class=distinct[:, 0].astype(np.int64),
        dtype=distinct[:, 1].astype(np.int64),
        backward=distinct[:, 2] > 0,
        num_bytes=distinct[:, 3],
        flop=distinct[:, 4],
        dims=distinct[:, 5:],
        rows=rows,
        inverse=inverse,
    )


def _distinct(key: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """First row of each distinct row of `key`, and for every row the number of its like."""
    weights = np.random.default_rng(0).integers(1, 2**63, size=key.shape[1], dtype=np.uint64) | np.uint64(1)
    mixed = (np.ascontiguousarray(key).view(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    if not np.array_equal(key[first][inverse], key):  # two rows mixed to one number: price every row by itself
        return np.arange(key.shape[0]), np.arange(key.shape[0])
    return first, inverse


class _Pricing:
    """Prices the signatures of one graph on one device."""

    def __init__(self, calibration: Calibration, device: DeviceSpec, *, sustained: bool) -> None:
        self.calibration, self.device, self.sustained = calibration, device, sustained
        self.generic = calibration.generic
        own = calibration.devices.get(device.calibration)
        self.own: DeviceCoefficients = own or self.generic
        self.lines: dict[str, None] = {}
        self.assumed: list[str] = []
        if own is None:
            self.note(f"{device.calibration}: no coefficients, priced from its specification")

    def note(self, line: str) -> None:
        """Report something that was priced outside the domain of its coefficients."""
        self.lines.setdefault(line)

    def extrapolated(self) -> tuple[str, ...]:
        """All that was reported; streaming classes without a table of this device share one line."""
        if self.assumed and self.own is not self.generic:
            self.note(f"{', '.join(sorted(set(self.assumed)))} on {self.device.calibration}: generic bandwidth shares")
        return tuple(self.lines)

    def machine(self, dtype: int, op: str) -> tuple[Machine, str]:
        """The rates at a data type, and its name.

        Raises:
            MissingCalibration: the device has no rate for it.
        """
        name = MATRIX_DTYPES.get(DType(dtype), "")
        peak = self.device.peak_flop_per_s.get(name)
        if peak is None:
            have = ", ".join(self.device.peak_flop_per_s)
            raise MissingCalibration(
                f"{op} in {DType(dtype).name.lower()}: {self.device.name} has no such rate; "
                f"fix: use one of {have}, or give device.peak.{name or DType(dtype).name.lower()}"
            )
        return (
            Machine(
                peak_flop_per_s=peak,
                bandwidth_bytes_per_s=self.device.memory_bandwidth_bytes_per_s,
                num_sms=self.device.num_sms,
            ),
            name,
        )

    def gemm_coefficients(self, name: str) -> tuple[GemmCoefficients, float]:
        """Coefficients of a data type and their spread, borrowed from the nearest that has some."""
        for source in (self.own, self.generic):
            for other in SUBSTITUTES[name]:
                if found := source.gemm.get(other):
                    if source is not self.own:
                        self.note(f"gemm {name} on {self.device.calibration}: generic efficiencies")
                    return found, float(np.hypot(found.sigma_log, source.extra_sigma_log))
        raise MissingCalibration(f"gemm in {name}: no coefficients; fix: add generic.gemm.{name} to the calibration")

    def attention_coefficients(self, name: str) -> tuple[AttentionCoefficients, float]:
        """As `gemm_coefficients`, for fused attention."""
        for source in (self.own, self.generic):
            for other in (*SUBSTITUTES[name], "bf16"):
                if found := source.attention.get(other):
                    if source is not self.own:
                        self.note(f"attention {name} on {self.device.calibration}: generic efficiencies")
                    return found, source.extra_sigma_log
        raise MissingCalibration(f"attention in {name}: no coefficients; fix: add generic.attention.{name}")

    def stream_coefficients(self, name: str) -> tuple[StreamCoefficients, float]:
        """Coefficients of a class of streaming kernels and the spread of borrowing them."""
        found = self.own.streaming.get(name)
        if found is None:
            self.assumed.append(name)
            return self.generic.streaming[name], self.generic.extra_sigma_log
        return found, self.own.extra_sigma_log

    def gemm(self, part: _Signatures, dtype: int) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of matrix products of one data type."""
        machine, name = self.machine(dtype, "gemm")
        coefficients, sigma = self.gemm_coefficients(name)
        element = DTYPE_BYTES[DType(dtype)]
        shape = part.dims[:, :4].copy()
        grouped = part.op_class == OpClass.GROUPED_GEMM
        # Approximation: groups get equal shares of the rows; under-estimates an unbalanced mixture of experts.
        shape[grouped, 1] = np.ceil(shape[grouped, 1] / np.maximum(shape[grouped, 0], 1.0))
        batch, m, n, k = (shape[:, i] for i in range(4))
        least = batch * (element * (m * k + k * n) + 2.0 * m * n)
        num_bytes = np.where(part.num_bytes > 0, part.num_bytes, least)
        outside = part.dims[:, 1:4].max(axis=1, initial=0.0) > self.calibration.largest_extent
        if outside.any():
            self.note(f"gemm: {int(outside.sum())} shapes beyond m, n, k <= {self.calibration.largest_extent}")
        rate = coefficients.sustained_rate_fraction if self.sustained else coefficients.isolated_rate_fraction
        time = gemm_time_s(shape, num_bytes, coefficients, machine, element_bytes=element, rate_fraction=rate)
        bound = np.maximum(2.0 * batch * m * n * k / machine.peak_flop_per_s, num_bytes / machine.bandwidth_bytes_per_s)
        return np.maximum(time, bound), np.where(outside, 2.0, 1.0) * sigma

    def attention(self, part: _Signatures, dtype: int) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of fused attention of one data type."""
        machine, name = self.machine(dtype, "attention")
        coefficients, borrowed = self.attention_coefficients(name)
        rate = 1.0
        if self.sustained:
            rate = self.gemm_coefficients(name)[0].sustained_rate_fraction
        element = DTYPE_BYTES[DType(dtype)]
        time = attention_time_s(
            part.dims, part.backward, coefficients, machine, element_bytes=element, rate_fraction=rate
        )
        low, high = coefficients.head_dims[[0, -1]]
        outside = (part.dims[:, 3:5].max(axis=1, initial=0.0) > self.calibration.longest_sequence) | (
            (part.dims[:, 5] < low) | (part.dims[:, 5] > high)
        )
        if outside.any():
            self.note(
                f"attention: {int(outside.sum())} shapes beyond sequence {self.calibration.longest_sequence} "
                f"or head_dim {low:.0f} to {high:.0f}"
            )
        bound = np.maximum(
            attention_flop(part.dims) / machine.peak_flop_per_s,
            attention_bytes(part.dims, element) / machine.bandwidth_bytes_per_s,
        )
        sigma = np.where(part.backward, coefficients.backward_sigma_log, coefficients.sigma_log)
        return np.maximum(time, bound), np.hypot(sigma, borrowed) * np.where(outside, 2.0, 1.0)

    def stream(self, part: _Signatures, name: str) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of kernels that only move bytes."""
        c, borrowed = self.stream_coefficients(name)
        share = np.where(part.backward, c.backward_bandwidth_fraction, c.bandwidth_fraction)
        time = stream_time_s(part.num_bytes, c.launch_floor_s, share, self.device.memory_bandwidth_bytes_per_s)
        return time, np.full(share.shape, float(np.hypot(c.sigma_log, borrowed)))

    def other(self, part: _Signatures) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of kernels that no class describes: the slower of bytes and FLOP."""
        names = sorted({OpClass(int(c)).name.lower() for c in part.op_class})
        self.note(f"{', '.join(names)}: {part.op_class.size} kernels of no known class priced by bytes and FLOP")
        time, _ = self.stream(part, "elementwise")
        peaks = [
            self.device.peak_flop_per_s.get(MATRIX_DTYPES.get(DType(int(d)), "fp32"))
            or self.device.peak_flop_per_s.get("fp32")
            or max(self.device.peak_flop_per_s.values())
            for d in part.dtype
        ]
        return np.maximum(time, part.flop / (np.array(peaks) * OTHER_RATE_FRACTION)), np.full(time.shape, 0.7)


def _scale(stack: StackProfile, op_class: npt.NDArray[np.int64]) -> Floats:
    """(num_signatures,) factors of the stack profile.

    Raises:
        SpecError: it names a class that does not exist.
    """
    known = {member.name.lower(): member for member in OpClass}
    scale = np.ones(op_class.size)
    for name, factor in stack.compute_scale.items():
        if name not in known:
            raise SpecError("compute_scale", name, "is not an op class", f"use one of {', '.join(known)}")
        scale[op_class == known[name]] = factor
    return scale


class RooflineModel:
    """Kernel times from a roofline with measured efficiencies; implements `simulate.ports.ComputeModel`.

    Args:
        calibration: coefficients.
        sustained: price kernels as in a training step, where the power limit holds clocks down; else as a benchmark
            sees one kernel alone.
    """

    name: ClassVar[str] = "roofline"
    version: ClassVar[int] = 1

    def __init__(self, calibration: Calibration, *, sustained: bool = True) -> None:
        self._calibration, self._sustained = calibration, sustained

    @classmethod
    def shipped(cls, *, sustained: bool = True) -> "RooflineModel":
        """The model with the coefficients that the package ships."""
        return cls(shipped_calibration(), sustained=sustained)

    @classmethod
    def from_file(cls, path: Path, *, sustained: bool = True) -> "RooflineModel":
        """The model with the coefficients of a calibration file."""
        return cls(load_calibration(path), sustained=sustained)

    @property
    def reference(self) -> str:
        """Where its formulas and coefficients come from."""
        return f"{self._calibration.reference} [calibration {self._calibration.source_hash}]"

    @property
    def calibration(self) -> Calibration:
        """The coefficients."""
        return self._calibration

    def covers(self, device: DeviceSpec) -> bool:
        """Whether the coefficients know the device, so that it is not priced from its specification alone."""
        return device.calibration in self._calibration.devices

    def kernel_times(self, graph: ExecutionGraph, device: DeviceSpec, stack: StackProfile) -> KernelTimes:
        """Seconds of every compute row alone; 0 for other rows.

        Raises:
            MissingCalibration: a matrix product in a data type that the device has no rate for.
            SpecError: the stack scales a class that does not exist.
        """
        distinct = _signatures(graph)
        pricing = _Pricing(self._calibration, device, sustained=self._sustained)
        time = np.zeros(distinct.op_class.size)
        sigma = np.zeros(distinct.op_class.size)

        def price(mask: Bools, how: Callable[[_Signatures], tuple[Floats, Floats]]) -> None:
            if mask.any():
                time[mask], sigma[mask] = how(distinct.take(mask))

        left = np.ones(time.size, dtype=np.bool_)
        products = (distinct.op_class == OpClass.GEMM) | (distinct.op_class == OpClass.GROUPED_GEMM)
        attention = distinct.op_class == OpClass.ATTENTION
        for dtype in np.unique(distinct.dtype[products | attention]):
            this = distinct.dtype == dtype
            price(products & this, lambda part, d=int(dtype): pricing.gemm(part, d))  # type: ignore[misc]
            price(attention & this, lambda part, d=int(dtype): pricing.attention(part, d))  # type: ignore[misc]
        left &= ~(products | attention)
        for op_class, name in _STREAMS.items():
            mask = distinct.op_class == op_class
            price(mask, lambda part, n=name: pricing.stream(part, n))  # type: ignore[misc]
            left &= ~mask
        price(left, pricing.other)
        scale = _scale(stack, distinct.op_class)
        time_s, sigma_log = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
        time_s[distinct.rows] = (time * scale)[distinct.inverse]
        sigma_log[distinct.rows] = sigma[distinct.inverse]
        return KernelTimes(time_s=time_s, sigma_log=sigma_log, extrapolated=pricing.extrapolated())
