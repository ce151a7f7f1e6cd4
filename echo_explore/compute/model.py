"""Kernel times of a graph: learned products, a roofline with measured efficiencies for the rest, vectorised."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from echo_explore.compute.chip import chip_names
from echo_explore.compute.coefficients import Calibration, load_calibration, shipped_calibration
from echo_explore.compute.pricing import Pricing
from echo_explore.compute.signatures import Bools, Floats, Signatures, signatures
from echo_explore.compute.times import KernelTimes
from echo_explore.core import SpecError
from echo_explore.graph import ExecutionGraph, OpClass
from echo_explore.specs import DeviceSpec, StackProfile

PRODUCTS = (OpClass.GEMM, OpClass.GROUPED_GEMM, OpClass.CONVOLUTION)
"""Classes that are priced as matrix products."""
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
    OpClass.BATCH_NORM: "batch_norm",
}


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
        allow_fallback: price kernels without a model by the roofline, and count them; else they are an error.
    """

    name: ClassVar[str] = "roofline"
    version: ClassVar[int] = 2

    def __init__(self, calibration: Calibration, *, sustained: bool = True, allow_fallback: bool = False) -> None:
        self._calibration, self._sustained, self._allow_fallback = calibration, sustained, allow_fallback

    @classmethod
    def shipped(cls, *, sustained: bool = True, allow_fallback: bool = False) -> "RooflineModel":
        """The model with the coefficients that the package ships."""
        return cls(shipped_calibration(), sustained=sustained, allow_fallback=allow_fallback)

    @classmethod
    def from_file(cls, path: Path, *, sustained: bool = True, allow_fallback: bool = False) -> "RooflineModel":
        """The model with the coefficients, or the corrections, of a calibration file."""
        return cls(load_calibration(path), sustained=sustained, allow_fallback=allow_fallback)

    @property
    def reference(self) -> str:
        """Where its formulas and coefficients come from."""
        return f"{self._calibration.reference} [calibration {self._calibration.source_hash}]"

    @property
    def calibration(self) -> Calibration:
        """The coefficients."""
        return self._calibration

    def covers(self, device: DeviceSpec) -> bool:
        """Whether the model prices the device unasked: its coefficients, corrections or catalogue of GPUs name it.

        A GPU of the catalogue alone (H20, L40S, ...) is priced from its specification and less surely; `kernel_times`
        says so.
        """
        corrected = {c.device for c in self._calibration.corrections}
        known = device.calibration in self._calibration.devices or device.calibration in chip_names().values()
        return known or bool(corrected & {device.calibration.lower(), device.name.lower()})

    def kernel_times(self, graph: ExecutionGraph, device: DeviceSpec, stack: StackProfile) -> KernelTimes:
        """Seconds of every compute row alone; 0 for other rows.

        Raises:
            MissingCalibration: a kernel has no model and no fallback is allowed.
            SpecError: the stack scales a class that does not exist.
        """
        distinct = signatures(graph)
        pricing = Pricing(
            self._calibration, device, stack, sustained=self._sustained, allow_fallback=self._allow_fallback
        )
        time = np.zeros(distinct.op_class.size)
        sigma = np.zeros(distinct.op_class.size)

        def price(mask: Bools, how: Callable[[Signatures], tuple[Floats, Floats]]) -> None:
            if mask.any():
                time[mask], sigma[mask] = how(distinct.take(mask))

        products = np.isin(distinct.op_class, PRODUCTS)
        attention = distinct.op_class == OpClass.ATTENTION
        fallback = pricing.without_model(distinct, products | attention)
        price(fallback, pricing.roofline)
        left = ~(products | attention | fallback)
        for dtype in np.unique(distinct.dtype[(products | attention) & ~fallback]):
            this = (distinct.dtype == dtype) & ~fallback
            for op_class in PRODUCTS:
                mask = this & (distinct.op_class == op_class)
                price(mask, lambda part, d=int(dtype): pricing.gemm(part, d))  # type: ignore[misc]
            price(attention & this, lambda part, d=int(dtype): pricing.attention(part, d))  # type: ignore[misc]
        for op_class, name in _STREAMS.items():
            mask = distinct.op_class == op_class
            price(mask, lambda part, n=name: pricing.stream(part, n))  # type: ignore[misc]
            left &= ~mask
        price(distinct.op_class == OpClass.QUANTISE, pricing.quantise)
        price(left & (distinct.op_class != OpClass.QUANTISE), pricing.other)
        num_fallbacks = int(fallback[distinct.inverse].sum())
        if num_fallbacks:
            names = sorted({OpClass(int(c)).name.lower() for c in distinct.op_class[fallback]})
            pricing.note(
                f"fallback: {num_fallbacks} kernels without a model ({', '.join(names)}) priced by the roofline"
            )
        scale = _scale(stack, distinct.op_class)
        time_s, sigma_log = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
        time_s[distinct.rows] = (time * scale)[distinct.inverse]
        sigma_log[distinct.rows] = sigma[distinct.inverse]
        return KernelTimes(
            time_s=time_s, sigma_log=sigma_log, num_fallbacks=num_fallbacks, extrapolated=pricing.extrapolated()
        )
