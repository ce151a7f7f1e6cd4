"""Prices of the distinct kernels of one graph on one device, class by class."""

import numpy as np

from echo_explore.compute.attention import (
    AttentionCoefficients,
    attention_bytes,
    attention_flop,
    attention_time_s,
    backward_work,
    value_dims,
)
from echo_explore.compute.attention_features import attention_columns
from echo_explore.compute.chip import chip_of, power_share
from echo_explore.compute.coefficients import SUBSTITUTES, Calibration, DeviceCoefficients
from echo_explore.compute.corrections import Clock, Correction
from echo_explore.compute.gemm import Floats, GemmCoefficients, Machine, combine, gemm_time_s
from echo_explore.compute.gemm_features import gemm_bytes
from echo_explore.compute.learned import (
    MEASURED_BACKWARD,
    Learned,
    check_kernels,
    learned_attention,
    learned_product,
    learned_stream,
)
from echo_explore.compute.signatures import Bools, Signatures
from echo_explore.compute.streaming import StreamCoefficients, stream_time_s
from echo_explore.core import MissingCalibration, SpecError
from echo_explore.graph import DTYPE_BYTES, DType, OpClass
from echo_explore.specs import DeviceSpec, StackProfile

OTHER_RATE_FRACTION = 0.5
"""Share of the peak that a kernel without a model is priced at; a guess, reported (2026-11-30)."""
FALLBACK_SIGMA_LOG = 0.7
"""Spread stated for it: a factor of two (2026-11-30)."""
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
HALF = ("bf16", "fp16")
NARROW = ("fp8", "mxfp8")
"""Learned on the devices of the tables and those like them; elsewhere physical, since no GPU was left out of their fit.
nvfp4 and fp32 stay physical: docs/compute_model.md says why."""
LARGEST_EXTENT = 2**26
"""Beyond it a size is a mistake rather than a kernel: no tensor of training has 67 million rows a rank (2026-11-30)."""
BACKWARD_PRODUCTS = 2.5
"""FLOP of a fused backward over its forward: five products for two; FlashAttention-2, arXiv 2307.08691 (2023), 2.3."""
CONVOLUTION_SIGMA_LOG = 0.3
"""Assumed spread of a convolution priced as its implicit product; no table in 16 bits (2026-11-30)."""
# Approximation: a convolution streams its own bytes, not those of the product it stands for; reuse of the window by the
# cache is taken as perfect, which under-estimates small images.


class Pricing:
    """Prices the signatures of one graph on one device.

    Args:
        calibration: coefficients and corrections.
        device: the GPU.
        stack: names the attention kernel and the source of kernels.
        sustained: at the clocks of a training step, else of one kernel alone.
        allow_fallback: price what has no model by the roofline, and count it.
    """

    def __init__(
        self, calibration: Calibration, device: DeviceSpec, stack: StackProfile, *, sustained: bool,
        allow_fallback: bool,
    ) -> None:  # fmt: skip
        self.calibration, self.device, self.stack = calibration, device, stack
        self.sustained, self.allow_fallback = sustained, allow_fallback
        self.chip = chip_of(device)
        self.power_share = power_share(device) if sustained else 1.0
        self.generic = calibration.generic
        own = calibration.devices.get(device.calibration)
        self.own: DeviceCoefficients = own or self.generic
        self.lines: dict[str, None] = {}
        self.assumed: list[str] = []
        names = {device.calibration.lower(), device.name.lower()}
        self.corrections = [c for c in calibration.corrections if c.device in names]
        if calibration.corrections and not self.corrections:
            others = ", ".join(sorted({c.device for c in calibration.corrections}))
            self.note(
                f"calibration: no correction is of {device.calibration} (they are of {others}), so none counts; "
                "calibrate on this GPU, or name its cluster"
            )
        if stack.attention_kernel or stack.kernel_source:
            check_kernels(stack.attention_kernel, stack.kernel_source)
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

    def has_rate(self, dtype: int) -> bool:
        """Whether the device computes in that data type."""
        return MATRIX_DTYPES.get(DType(dtype), "") in self.device.peak_flop_per_s

    def missing(self, what: str, fix: str) -> MissingCalibration:
        """The error for what has no model."""
        return MissingCalibration(f"{what}; fix: {fix}, or give --allow-fallback to price it by the roofline")

    def machine(self, dtype: int, op: str) -> tuple[Machine, str]:
        """The rates at a data type, and its name.

        Raises:
            MissingCalibration: the device has no rate for it.
        """
        name = MATRIX_DTYPES.get(DType(dtype), "")
        peak = self.device.peak_flop_per_s.get(name)
        if peak is None:
            have = ", ".join(self.device.peak_flop_per_s)
            raise self.missing(
                f"{op} in {DType(dtype).name.lower()}: {self.device.name} has no such rate",
                f"use one of {have}, or give device.peak.{name or DType(dtype).name.lower()}",
            )
        return (
            Machine(
                peak_flop_per_s=peak,
                bandwidth_bytes_per_s=self.device.memory_bandwidth_bytes_per_s,
                num_sms=self.device.num_sms,
            ),
            name,
        )

    def correction(self, op_class: str, dtype: str, measured: Clock) -> Correction | None:
        """The user's correction of a class and data type, the data type's own before `any`."""
        for wanted in (dtype, "any"):
            for found in self.corrections:
                if (found.op_class, found.dtype, found.measured) == (op_class, wanted, measured):
                    return found
        return None

    def corrected(
        self, time: Floats, sigma: Floats, op_class: str, dtype: str, measured: Clock
    ) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) after the user's correction, if there is one."""
        found = self.correction(op_class, dtype, measured)
        return (time, sigma) if found is None else (found.applied(time), np.full(time.shape, found.sigma_log))

    def gemm_coefficients(self, name: str) -> tuple[GemmCoefficients, float]:
        """Coefficients of a data type and their spread, borrowed from the nearest that has some."""
        for source in (self.own, self.generic):
            for other in SUBSTITUTES[name]:
                if found := source.gemm.get(other):
                    if source is not self.own:
                        self.note(f"gemm {name} on {self.device.calibration}: generic efficiencies")
                    return found, float(np.hypot(found.sigma_log, source.extra_sigma_log))
        raise self.missing(f"gemm in {name}: no coefficients", f"add generic.gemm.{name} to the calibration")

    def rate_fraction(self, c: GemmCoefficients) -> float:
        """Share of the peak rate that long products reach, under the device's own power limit in a training step."""
        return c.sustained_rate_fraction * self.power_share if self.sustained else c.isolated_rate_fraction

    def attention_coefficients(self, name: str) -> tuple[AttentionCoefficients, float]:
        """As `gemm_coefficients`, for fused attention."""
        for source in (self.own, self.generic):
            for other in (*SUBSTITUTES[name], "bf16"):
                if found := source.attention.get(other):
                    if source is not self.own:
                        self.note(f"attention {name} on {self.device.calibration}: generic efficiencies")
                    return found, source.extra_sigma_log
        raise self.missing(f"attention in {name}: no coefficients", f"add generic.attention.{name}")

    def stream_coefficients(self, name: str) -> tuple[StreamCoefficients, float]:
        """Coefficients of a class of streaming kernels and the spread of borrowing them."""
        found = self.own.streaming.get(name)
        if found is None:
            self.assumed.append(name)
            return self.generic.streaming[name], self.generic.extra_sigma_log
        return found, self.own.extra_sigma_log

    def gemm(self, part: Signatures, dtype: int) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of matrix products of one data type."""
        machine, name = self.machine(dtype, "gemm")
        coefficients, spread = self.gemm_coefficients(name)
        element = DTYPE_BYTES[DType(dtype)]
        shape = part.dims[:, :4].copy()
        grouped = part.op_class == OpClass.GROUPED_GEMM
        # Approximation: groups get equal shares of the rows; under-estimates an unbalanced mixture of experts.
        shape[grouped, 1] = np.ceil(shape[grouped, 1] / np.maximum(shape[grouped, 0], 1.0))
        shape = np.maximum(shape, 1.0)
        flop = 2.0 * np.prod(shape, axis=1)
        num_bytes = np.where(part.num_bytes > 0, part.num_bytes, gemm_bytes(shape, element))
        outside = part.dims[:, 1:4].max(axis=1, initial=0.0) > self.calibration.largest_extent
        if outside.any():
            self.note(f"gemm: {int(outside.sum())} shapes beyond m, n, k <= {self.calibration.largest_extent}")
        sigma = np.full(flop.shape, spread)
        convolution = part.op_class == OpClass.CONVOLUTION
        learned = None if convolution.any() else self.learned_products(shape, name)
        if learned is not None:
            time, sigma = self._learned_gemm(learned, shape, num_bytes, dtype, coefficients, spread, machine)
        else:
            rate = self.rate_fraction(coefficients)
            time = gemm_time_s(shape, num_bytes, coefficients, machine, element_bytes=element, rate_fraction=rate)
            time, sigma = self.corrected(time, sigma, "gemm", name, "isolated")
            sigma = np.where(convolution, np.maximum(sigma, CONVOLUTION_SIGMA_LOG), sigma)
        time, sigma = self.corrected(time, sigma, "gemm", name, "sustained")
        bound = np.maximum(flop / machine.peak_flop_per_s, num_bytes / machine.bandwidth_bytes_per_s)
        return np.maximum(time, bound), np.where(outside, 2.0, 1.0) * sigma

    def learned_products(self, shape: Floats, name: str) -> Learned | None:
        """Isolated times by the networks; None where they don't serve this data type on this device."""
        if not self.calibration.learned or name not in (*HALF, *NARROW):
            return None
        learned = learned_product(shape, self.chip, name, source=self.stack.kernel_source)
        return learned if name in HALF or not learned.generic else None

    def _learned_gemm(
        self, learned: Learned, shape: Floats, num_bytes: Floats, dtype: int, c: GemmCoefficients, spread: float,
        machine: Machine,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """Products by the network, and the sustained rate caps them.

        Bytes beyond the least (a sum that is read and written) move beside the arithmetic, as the least do; they never
        cost more than a copy of them.
        """
        name = MATRIX_DTYPES[DType(dtype)]
        bandwidth = machine.bandwidth_bytes_per_s * c.memory_efficiency_fraction
        least = gemm_bytes(shape, DTYPE_BYTES[DType(dtype)]) / bandwidth
        moved = np.maximum(num_bytes / bandwidth, least)
        time, sigma = self.corrected(
            learned.time_s, np.full(num_bytes.shape, learned.sigma_log), "gemm", name, "isolated"
        )
        own = c is not self.generic.gemm.get("bf16")
        capped = self.sustained or (learned.generic and own)
        rate_s = 2.0 * np.prod(shape, axis=1) / (machine.peak_flop_per_s * self.rate_fraction(c))

        def joined(moved_s: Floats) -> Floats:
            p = c.combine_exponent
            longer = time * combine(time, moved_s, p) / combine(time, least, p)
            return np.maximum(longer, c.launch_floor_s + combine(rate_s, moved_s, p)) if capped else longer

        copy = self.own.streaming.get("copy", self.generic.streaming["copy"])
        copied = (moved - least) * c.memory_efficiency_fraction / copy.bandwidth_fraction
        total = np.minimum(joined(moved), joined(least) + copied)
        if not capped:
            return total, sigma
        if learned.generic:
            sigma = np.maximum(sigma, spread)
        # The sustained rate is known to about half the gap between the sources.
        gap = 0.5 * np.log(c.isolated_rate_fraction / c.sustained_rate_fraction)
        return total, np.hypot(sigma, gap)

    def attention(self, part: Signatures, dtype: int) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of fused attention of one data type."""
        machine, name = self.machine(dtype, "attention")
        coefficients, borrowed = self.attention_coefficients(name)
        rate = 1.0
        if self.sustained:
            rate = self.rate_fraction(self.gemm_coefficients(name)[0])
        element = DTYPE_BYTES[DType(dtype)]
        time = attention_time_s(
            part.dims, part.backward, coefficients, machine, element_bytes=element, rate_fraction=rate
        )
        sigma = np.where(part.backward, coefficients.backward_sigma_log, coefficients.sigma_log)
        if self.stack.attention_kernel:
            time, sigma = self._named_attention(part, name, coefficients, machine.peak_flop_per_s * rate)
        low, high = coefficients.head_dims[[0, -1]]
        outside = (part.dims[:, 3:5].max(axis=1, initial=0.0) > self.calibration.longest_sequence) | (
            (part.dims[:, 5] < low) | (part.dims[:, 5] > high)
        )
        if outside.any():
            self.note(
                f"attention: {int(outside.sum())} shapes beyond sequence {self.calibration.longest_sequence} "
                f"or head_dim {low:.0f} to {high:.0f}"
            )
        time, sigma = self.corrected(time, np.hypot(sigma, borrowed), "attention", name, "isolated")
        time, sigma = self.corrected(time, sigma, "attention", name, "sustained")
        bound = np.maximum(
            attention_flop(part.dims) / machine.peak_flop_per_s,
            attention_bytes(part.dims, element) / machine.bandwidth_bytes_per_s,
        )
        return np.maximum(time, bound), sigma * np.where(outside, 2.0, 1.0)

    def _named_attention(
        self, part: Signatures, name: str, c: AttentionCoefficients, rate_flop_per_s: float
    ) -> tuple[Floats, Floats]:
        """Attention by the kernel that the stack names; its backward too where the tables have it."""
        columns = attention_columns(
            *(part.dims[:, i] for i in range(6)), value_dim=value_dims(part.dims), causal=part.dims[:, 6],
            window=part.dims[:, 7],
        )  # fmt: skip
        kernel, source = self.stack.attention_kernel, self.stack.kernel_source
        forward = learned_attention(columns, self.chip, name, name, kernel=kernel, source=source)
        forward_s = np.maximum(forward.time_s, attention_flop(part.dims) / rate_flop_per_s)
        backward_s, sigma = c.backward_ratio * backward_work(part.dims) * forward_s, c.backward_sigma_log
        if kernel == MEASURED_BACKWARD and not forward.generic:
            columns["backward"] = np.ones(part.backward.shape)
            backward = learned_attention(columns, self.chip, name, name, kernel=kernel, source=source)
            least = BACKWARD_PRODUCTS * backward_work(part.dims) * attention_flop(part.dims) / rate_flop_per_s
            backward_s, sigma = np.maximum(backward.time_s, least), backward.sigma_log
        return (
            np.where(part.backward, backward_s, forward_s),
            np.where(part.backward, sigma, forward.sigma_log),
        )

    def stream(self, part: Signatures, name: str) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of kernels that only move bytes."""
        c, borrowed = self.stream_coefficients(name)
        share = np.where(part.backward, c.backward_bandwidth_fraction, c.bandwidth_fraction)
        time = stream_time_s(part.num_bytes, c.launch_floor_s, share, self.device.memory_bandwidth_bytes_per_s)
        sigma = np.full(share.shape, float(np.hypot(c.sigma_log, borrowed)))
        for measured in ("isolated", "sustained"):
            time, sigma = self.corrected(time, sigma, name, "any", measured)
        return time, sigma

    def quantise(self, part: Signatures) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of casts to 8 and 4 bits: by the network where rows and columns are known."""
        time, sigma = self.stream(part, "quantise")
        known = (part.dims[:, :2] > 0).all(axis=1) & (part.num_bytes > 0)
        if self.calibration.learned and known.any():
            learned = learned_stream(
                part.dims[known, 0], part.dims[known, 1], part.num_bytes[known], np.zeros(int(known.sum())), self.chip,
                op="fp8_quant_scale_matrix", kernel=self.stack.kernel_source,
            )  # fmt: skip
            least = part.num_bytes[known] / self.device.memory_bandwidth_bytes_per_s
            time[known], sigma[known] = np.maximum(learned.time_s, least), learned.sigma_log
        return time, sigma

    def other(self, part: Signatures) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of kernels of no class that only move bytes."""
        names = sorted({OpClass(int(c)).name.lower() for c in part.op_class})
        self.note(f"{', '.join(names)}: {part.op_class.size} kernels of no known class priced by bytes and FLOP")
        time, _ = self.stream(part, "elementwise")
        return time, np.full(time.shape, FALLBACK_SIGMA_LOG)

    def roofline(self, part: Signatures) -> tuple[Floats, Floats]:
        """(time_s, sigma_log) of kernels without a model: the slower of bytes and FLOP at half the peak.

        A data type that the device lacks runs at its 16-bit rate.
        """
        share = self.device.memory_bandwidth_bytes_per_s * OTHER_RATE_FRACTION
        peaks = np.array([self._nearest_peak(int(d)) for d in part.dtype])
        time = np.maximum(part.num_bytes / share, part.flop / (peaks * OTHER_RATE_FRACTION))
        return time, np.full(time.shape, FALLBACK_SIGMA_LOG)

    def _nearest_peak(self, dtype: int) -> float:
        rates = self.device.peak_flop_per_s
        for name in (MATRIX_DTYPES.get(DType(dtype), "fp32"), "bf16", "fp16"):
            if name in rates:
                return rates[name]
        return max(rates.values())

    def without_model(self, all_: Signatures, products: Bools) -> Bools:
        """(num_signatures,) what only a fallback can price.

        Raises:
            SpecError: a size, FLOP or bytes are no such numbers.
            MissingCalibration: there is such a kernel and no fallback is allowed; names the first.
        """
        _check_numbers(all_)
        lacks_rate = products & ~np.array([self.has_rate(int(d)) for d in all_.dtype], dtype=np.bool_)
        unknown = (all_.op_class == OpClass.OTHER) & (all_.flop > 0)
        sizes = all_.dims.max(axis=1, initial=0) > LARGEST_EXTENT
        too_large = products & sizes
        found = lacks_rate | unknown | too_large
        if found.any() and not self.allow_fallback:
            first = int(np.flatnonzero(found)[0])
            name = OpClass(int(all_.op_class[first])).name.lower()
            if lacks_rate[first]:
                self.machine(int(all_.dtype[first]), name)
            if unknown[first]:
                raise self.missing(f"{name}: a kernel of no known class that computes", "give it a class in the tracer")
            raise self.missing(
                f"{name} of {[int(d) for d in all_.dims[first]]}: beyond {LARGEST_EXTENT}", "correct the shape"
            )
        return np.asarray(found, dtype=np.bool_)


def _check_numbers(all_: Signatures) -> None:
    """Refuse kernels of impossible sizes: a price of them would look right.

    Raises:
        SpecError: the first one.
    """
    attention = all_.op_class == OpClass.ATTENTION
    filled = attention | ((all_.op_class == OpClass.GEMM) & (all_.flop > 0))  # an empty product has no FLOP
    sizes = np.where(attention, 6, 4)[:, None] > np.arange(all_.dims.shape[1])
    checks = (
        ("dims", (all_.dims < 0).any(axis=1), "must not be negative"),
        ("dims", filled & ((all_.dims < 1) & sizes).any(axis=1), "must be 1 or more"),
        ("flop", ~((all_.flop >= 0) & np.isfinite(all_.flop)), "must be a finite number from 0 up"),
        ("bytes", ~((all_.num_bytes >= 0) & np.isfinite(all_.num_bytes)), "must be a finite number from 0 up"),
    )
    for name, wrong, rule in checks:
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            value = {"dims": [int(d) for d in all_.dims[row]], "flop": all_.flop[row], "bytes": all_.num_bytes[row]}[
                name
            ]
            where = f"{OpClass(int(all_.op_class[row])).name.lower()}: {name}"
            raise SpecError(where, str(value), rule, "correct the row of the graph")
