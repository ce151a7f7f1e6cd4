"""Kernel times of the learned models: physical base times a fitted residual, never below the roofline.

    t = max(base e^r, F / P, bytes / B)

A product in 16 bits is never faster, beyond 4.5 %, than the same product with n, k or both divided by 4, 16, 64, ...:
t(n, k) = max(t'(n, k), 0.955 t'(n // 4^i, k // 4^j) for all i, j), which makes t(n, k) >= 0.955 t(n // 4, k) exact.
Batched products that leave the matrix units (unaligned rows on Ampere) are slower than t, but never than 1.045 times
the fastest product that they are a quarter of, so the same holds for them.

References:
    NeuSight, arXiv 2407.13853 (2024): a learned utilisation bounded by the roofline.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from echo_explore.compute.attention_features import attention_base_s, attention_features, attention_work
from echo_explore.compute.chip import Chip, copy_engine, matrix_instructions
from echo_explore.compute.gemm import (
    UNALIGNED_BATCHED_FRACTION,
    UNALIGNED_SLOWDOWN,
    alignment_slowdown,
    unaligned_batched_s,
)
from echo_explore.compute.gemm_features import FLOOR_CYCLES, gemm_base_s, gemm_bytes, gemm_features
from echo_explore.compute.network import ResidualNetwork, load_networks
from echo_explore.compute.stream_features import stream_base_s, stream_features
from echo_explore.compute.tables import element_bytes_of, kernel_family
from echo_explore.core import SpecError

Floats = npt.NDArray[np.float64]

_FOLDER = Path(__file__).resolve().parent.parent / "_shipped" / "kernels"
GEMM_NETWORKS: Mapping[str, str] = {
    "bf16": "gemm_half", "fp16": "gemm_half", "fp8": "gemm_fp8", "mxfp8": "gemm_fp8", "nvfp4": "gemm_nvfp4",
    "fp32": "gemm_fp32", "tf32": "gemm_half",
}  # fmt: skip
"""The network that prices products of a precision; each always with the peak of the precision itself."""
SMALLEST_EXTENT = 32.0
"""Smallest n and k of the tables in 16 bits and below; smaller ones cost the same."""
QUARTER_FRACTION = 0.955
"""How much faster than its quarter a product may be: within the 5 % that measured tables scatter by."""
WHOLE_FRACTION = 0.957
"""How much faster than a quarter that leaves the matrix units; a hair within QUARTER_FRACTION's 5 %."""
MEASURED_BACKWARD = "cudnn"
"""Kernels whose backward is in the tables; the others take the device's ratio to the forward."""
CAST_OVER_STATIC = 1.5
"""Cast to fp8 with a scale a token, as the tables time it with a product, over the one with a known scale: median 1.40
(H100) to 1.53 (B200) by GPU, 6,368 pairs of measured casts of vLLM 0.24 on five GPUs (2026-12-01)."""
WITHOUT_CAST_SIGMA_LOG = 0.1
"""Uncertainty of taking that cast off: it is known to 10 to 16 % and a fifth to a quarter of the time; the rest is
assumed, since training libraries scale by tensor or block where the tables scale by token (2026-12-01)."""
LIKE: Mapping[str, tuple[str, ...]] = {
    "a100-sxm4-40gb": ("a100-sxm4-80gb", "a100-pcie-40gb"),
    "a100-pcie-40gb": ("a100-pcie-80gb", "a100-sxm4-80gb"),
    "a100-pcie-80gb": ("a100-sxm4-80gb",), "a100-sxm4-80gb": ("a100-pcie-80gb",),
    "h800-sxm5-80gb": ("h100-sxm5-80gb",), "gh200-96gb": ("h100-sxm5-80gb",), "b300-sxm": ("gb300",),
    "v100-sxm2-32gb": ("v100-pcie-32gb",),
}  # fmt: skip
"""Devices whose measurements serve another one, best first: the same silicon with other memory, links or housing
(NVIDIA data sheets: A100 2021, H100 2023, GH200 2023, HGX B300 2025, V100 2020; H800: arXiv 2505.09343, section 4)."""
LARGEST_BATCH = 64.0
"""Products of larger batches in 16 bits take no longer than parts of so many in turn; the tables have single ones, so
that the networks know large batches least (2026-12-01). A judgement: 64 was chosen after its time, times 8, was seen to
lie within the tolerance of a published batch of 512 (tests/compute/test_learned.py)."""
LIKE_SIGMA_LOG = 0.05
"""Uncertainty of borrowing so: cards of one GPU differ by that much between tables (A100 and H100, 2026-11-30)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Times of rows and how sure they are.

    Attributes:
        time_s: (num_rows,).
        sigma_log: of every row.
        generic: no measurement of this device or a like one was used.
    """

    time_s: Floats
    sigma_log: float
    generic: bool


@cache
def network_file(name: str) -> Mapping[str, ResidualNetwork]:
    """The shipped networks `name` and `name` + `_generic`."""
    return load_networks(_FOLDER / f"{name}.toml")


def check_kernels(attention_kernel: str, kernel_source: str) -> None:
    """Refuse words of a stack profile that no network knows: they would change nothing.

    Raises:
        SpecError: names the words that count.
    """
    attention = network_file("attention")["attention"]
    sources = (network_file("gemm_half")["gemm_half"], attention)
    for field, value, known in (
        ("attention_kernel", attention_kernel, attention.names("kernel")),
        ("kernel_source", kernel_source, sorted({name for network in sources for name in network.names("source")})),
    ):
        if value and value not in known and not (field == "attention_kernel" and kernel_family(value)):
            raise SpecError(
                f"stack.{field}", value, "is in no table of kernels", f"use {', '.join(known)}, or leave it empty"
            )


def _choose(name: str, chip: Chip) -> tuple[ResidualNetwork, list[str], float, bool]:
    """(network, its device category, spread, generic) for a chip: its own, a like one's, or the generic network."""
    own = network_file(name)[name]
    for place, key in enumerate((chip.key, *LIKE.get(chip.key, ()))):
        if own.knows(f"device:{key}"):
            sigma = own.sigma_log.get(key, own.sigma_log["*"])
            return own, [f"device:{key}"], float(np.hypot(sigma, LIKE_SIGMA_LOG * (place > 0))), False
    generic = network_file(name)[f"{name}_generic"]
    words = (("copies", copy_engine(chip.architecture)), ("matrix", matrix_instructions(chip.architecture)))
    known = [_category(generic, field, value) for field, value in words if generic.knows_field(field)]
    return generic, known, generic.sigma_log["*"], True


def _category(network: ResidualNetwork, field: str, value: str) -> str:
    """`field:value`, or `field:*`, the middle of the tables, where the fit has not seen it."""
    name = f"{field}:{value}"
    return name if value and network.knows(name) else f"{field}:*"


def learned_gemm(shape: Floats, chip: Chip, precision: str, *, source: str = "") -> Learned:
    """Isolated times of products, as tables measure them (fp8 and nvfp4: with the cast of A).

    Args:
        shape: (num_rows, 4) batch, m, n, k, each at least 1.
        chip: the GPU.
        precision: of the inputs.
        source: framework and version that measures; empty: the middle of those that the fit saw.

    Raises:
        MissingCalibration: the GPU lacks the precision.
    """
    peak, element = chip.peak(precision), element_bytes_of(precision)
    network, categories, sigma, generic = _choose(GEMM_NETWORKS[precision], chip)
    measured_on = "*" if generic else categories[0].partition(":")[2]
    categories = [*categories, _category(network, "source", source)]
    half = element == 2.0
    worst = 1.0 if precision == "fp32" else UNALIGNED_SLOWDOWN

    def clipped(rows: Floats) -> tuple[Floats, Floats]:
        inner = rows
        if precision != "fp32":
            inner = np.column_stack([rows[:, :2], np.maximum(rows[:, 2:], SMALLEST_EXTENT)])
        slowdown = alignment_slowdown(inner[:, 2], inner[:, 3], element, worst)
        return inner, gemm_base_s(inner, chip, peak, element, slowdown, exponent=network.base_exponent)

    def raw(rows: Floats, base: Floats) -> Floats:
        residual = network.residual(gemm_features(rows, chip, peak, element), categories)
        return base * np.exp(np.minimum(residual, network.highest(base, measured_on)))

    def highest(base: Floats) -> Floats:
        most: Floats = QUARTER_FRACTION * base * np.exp(network.highest(base, measured_on))
        return most

    def bounded(rows: Floats) -> Floats:
        time = raw(*clipped(rows))
        if half:
            _lift_to_quarters(time, rows, clipped, raw, highest)
        moved_s = gemm_bytes(rows, element) / chip.bandwidth_bytes_per_s
        least: Floats = np.maximum(time, np.maximum(2.0 * np.prod(rows, axis=1) / peak, moved_s))
        return least

    def in_parts(rows: Floats) -> Floats:
        time = bounded(rows)
        if half and (large := np.flatnonzero(rows[:, 0] > LARGEST_BATCH)).size:
            part = np.column_stack([np.full(large.size, LARGEST_BATCH), rows[large, 1:]])
            time[large] = np.minimum(time[large], rows[large, 0] / LARGEST_BATCH * bounded(part))
        return time

    time = in_parts(shape)
    if chip.architecture == "ampere" and precision in UNALIGNED_BATCHED_FRACTION:
        slow = unaligned_batched_s(shape, peak, element, UNALIGNED_BATCHED_FRACTION[precision])
        if (rows := np.flatnonzero(slow > time)).size:
            time[rows] = np.maximum(time[rows], np.minimum(slow[rows], _fastest_whole_s(shape[rows], in_parts)))
    return Learned(time_s=time, sigma_log=sigma, generic=generic)


def _fastest_whole_s(shape: Floats, bounded: Callable[[Floats], Floats]) -> Floats:
    """(num_rows,) most that a product may take whose n or k is a quarter of some other's; see the module."""
    least = np.full(shape.shape[0], np.inf)
    for column in (2, 3):
        for rest in (-2, -1, 0, 1, 2, 3):  # 2 and 3, like 4 to 7, count 1 as their quarter
            whole = shape.copy()
            whole[:, column] = 4.0 * whole[:, column] + np.where(shape[:, column] == 1, rest, max(rest, 0))
            least = np.minimum(least, bounded(whole))
    return least / WHOLE_FRACTION


def learned_product(shape: Floats, chip: Chip, precision: str, *, source: str = "") -> Learned:
    """Isolated times of products alone: what graphs hold, which have rows of their own for casts.

    In 16 bits as `learned_gemm`; in 8 bits less the cast of A, which costs CAST_OVER_STATIC of the learned cast with a
    known scale; never below the roofline or the shortest product of the tables.

    Args:
        shape: (num_rows, 4) batch, m, n, k, each at least 1.
        chip: the GPU.
        precision: bf16, fp16, fp8 or mxfp8.
        source: as in `learned_gemm`.

    Raises:
        MissingCalibration: the GPU lacks the precision.
    """
    whole = learned_gemm(shape, chip, precision, source=source)
    if element_bytes_of(precision) == 2.0:
        return whole
    batch, m, n, k = shape.T
    element = element_bytes_of(precision)
    rows = batch * m
    cast = learned_stream(
        rows, k, (2.0 + element) * rows * k, np.zeros(rows.size), chip,
        op="fp8_quant_scale_matrix", kernel="static_scaled_fp8_quant",
    )  # fmt: skip
    moved_s = gemm_bytes(shape, element) / chip.bandwidth_bytes_per_s
    least = np.maximum(2.0 * rows * n * k / chip.peak(precision), moved_s)
    least = np.maximum(least, FLOOR_CYCLES / chip.clock_hz)
    return Learned(
        time_s=np.maximum(whole.time_s - CAST_OVER_STATIC * cast.time_s, least),
        sigma_log=float(np.hypot(whole.sigma_log, WITHOUT_CAST_SIGMA_LOG)),
        generic=whole.generic,
    )


def _lift_to_quarters(
    time: Floats,
    shape: Floats,
    clipped: Callable[[Floats], tuple[Floats, Floats]],
    raw: Callable[[Floats, Floats], Floats],
    highest: Callable[[Floats], Floats],
) -> None:
    """Raise `time` in place to what its quarters cost; see the module.

    A cell whose base allows no more than the time needs no residual, and neither do the smaller ones beyond it.
    """
    rows, i = np.arange(shape.shape[0]), 0
    while rows.size:
        inner, j = rows, 0
        while inner.size:
            cell = shape[inner].copy()
            cell[:, 2] //= 4.0**i
            cell[:, 3] //= 4.0**j
            if i or j:
                extents, base = clipped(cell)
                active = highest(base) > time[inner]
                if j == 0:
                    rows = inner[active]
                inner, cell = inner[active], cell[active]
                if inner.size:
                    time[inner] = np.maximum(time[inner], QUARTER_FRACTION * raw(extents[active], base[active]))
            deeper = cell[:, 3] >= SMALLEST_EXTENT
            inner, j = inner[deeper], j + 1
        cut = shape[rows, 2] // 4.0**i
        rows, i = rows[cut >= SMALLEST_EXTENT], i + 1


def learned_attention(
    columns: Mapping[str, Floats], chip: Chip, dtype: str, kv_dtype: str, *, kernel: str = "", source: str = ""
) -> Learned:
    """Isolated times of fused attention.

    Args:
        columns: see `attention_columns`.
        chip: the GPU.
        dtype: precision of the queries, which decides the peak.
        kv_dtype: precision of keys and values.
        kernel: name in the tables; empty or unknown: the middle of those that the fit saw.
        source: as in `learned_gemm`.

    Raises:
        MissingCalibration: the GPU lacks the precision.
    """
    peak = chip.peak(dtype)
    widths = element_bytes_of(dtype), element_bytes_of(kv_dtype)
    network, categories, sigma, generic = _choose("attention", chip)
    named = {"bf16": "bfloat16", "fp16": "float16"}
    pair = f"{named.get(dtype, dtype)}/{named.get(kv_dtype, kv_dtype)}"
    words = (("kernel", kernel), ("family", kernel_family(kernel)), ("source", source), ("dtype", pair))
    for field, value in words:
        categories.append(_category(network, field, value))
    arguments = (dict(columns), chip, peak, *widths)
    base = attention_base_s(*arguments)
    time = base * np.exp(network.residual(attention_features(*arguments), categories))
    flop, moved = attention_work(dict(columns), *widths)
    bound = np.maximum(flop / peak, moved / chip.bandwidth_bytes_per_s)
    return Learned(time_s=np.maximum(time, bound), sigma_log=sigma, generic=generic)


def learned_stream(
    rows: Floats, columns: Floats, num_bytes: Floats, backward: Floats, chip: Chip, *, op: str = "", kernel: str = ""
) -> Learned:
    """Isolated times of kernels that stream rows through memory.

    Args:
        rows: (num_rows,).
        columns: (num_rows,) elements a row.
        num_bytes: (num_rows,) bytes that the operation must move.
        backward: (num_rows,) 1 where it is a backward.
        chip: the GPU.
        op: name in the tables; empty or unknown: the middle.
        kernel: who wrote the kernel; as op.
    """
    network, categories, sigma, generic = _choose("stream", chip)
    categories += [_category(network, "op", op), _category(network, "kernel", kernel)]
    residual = network.residual(stream_features(rows, columns, num_bytes, backward, chip), categories)
    # Approximation: no roofline below, since arrays that fit into the L2 cache are read faster than memory allows.
    return Learned(time_s=stream_base_s(num_bytes, chip) * np.exp(residual), sigma_log=sigma, generic=generic)
