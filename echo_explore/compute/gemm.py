"""Seconds of matrix products: tiles, waves, split-K, a sustained rate, and the roofline.

    t = floor + combine_p(max(t_tile, t_rate), t_memory)
    t_tile = min over tiles (a x b) and splits z of
             waves(z) (2 a b ceil(k/z)_64 / (r e_ab) + w) + [z > 1] (u + z v 4 m n / B)
    waves = max(1, x) mixed with ceil(x) by the share q;  x = batch ceil(m/a) ceil(n/b) z / num_sms
    t_rate = 2 batch m n k / (P c);  t_memory = bytes / (B e_memory);  combine_p(x, y) = (x^p + y^p)^(1/p)

with r = P / num_sms the peak of one SM, e_ab the share of it that a tile reaches in steady state, w the prologue and
epilogue of a wave, c the share of the peak that the power limit sustains. Every candidate of the minimum grows with
m, n and k, so t does, as long as their alignment stays the same.

References:
    NVIDIA, Matrix Multiplication Background User's Guide, DU-09799-001 (February 2023), sections 2.3 and 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SPLITS: Floats = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0])
K_STEP = 64.0
"""Depth of one main-loop step: 128 bytes of a 2-byte type, the widest swizzle of shared memory (CUTLASS 3, 2023)."""
ACCUMULATOR_BYTES = 4.0
"""Partial sums of split-K are fp32."""
ALIGNMENT_BYTES = 16.0
"""Rows of a multiple of 16 bytes load at full width: NVIDIA DU-09799-001 (February 2023), section 2.2, table 1."""
UNALIGNED_SLOWDOWN = 2.0
"""Tensor cores: main loop with odd row lengths over aligned ones, on A100. Padding GPT-2's vocabulary from 50,257 to
50,304 sped the whole step up by about 25 % (A. Karpathy, nanoGPT, February 2023) where the output projection is 27 % of
the FLOP: 0.73 + 0.27 x = 1.25 to 1.33 gives x = 1.9 to 2.2."""
# Approximation: alignments to 8 and 4 bytes lie between in equal ratios; no table has such shapes, direction unknown.

UNALIGNED_BATCHED_FRACTION: Mapping[str, float] = {"fp16": 53.9 / 312.0, "bf16": 12.2 / 312.0}
"""Share of the peak that batched products with such rows reach on Ampere: torch.bmm of (384, 1024, 1024) and (384,
1024, 140), rows of 280 bytes, on A100 under CUDA 11.6 (pytorch/pytorch issue 83272, August 2022). The bf16 one is 0.63
of the rate of the CUDA cores: no kernel for matrix units takes such rows."""
# Approximation: later libraries may have such kernels: over-estimates their products; other generations are not known.


def unaligned_batched_s(shape: Floats, peak_flop_per_s: float, element_bytes: float, fraction: float) -> Floats:
    """(num_rows,) least seconds of batched products whose rows are no multiple of 16 bytes; 0 for any other.

    Args:
        shape: (num_rows, 4) batch, m, n, k.
        peak_flop_per_s: of the matrix units.
        element_bytes: of the inputs.
        fraction: share of the peak that such products reach.
    """
    unaligned = (shape[:, 2:] * element_bytes % ALIGNMENT_BYTES != 0).any(axis=1) & (shape[:, 0] > 1)
    return np.where(unaligned, 2.0 * np.prod(shape, axis=1) / (peak_flop_per_s * fraction), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCoefficients:
    """What one device and data type needs to price a matrix product; symbols as in the module.

    Attributes:
        tile_rows: (num_tiles,) a.
        tile_columns: (num_tiles,) b.
        tile_efficiency_fraction: (num_tiles,) e_ab.
        launch_floor_s: floor.
        wave_overhead_s: w.
        wave_quantisation_fraction: q; 0 is a smooth machine, 1 whole waves.
        split_overhead_s: u.
        split_traffic_factor: v.
        memory_efficiency_fraction: e_memory.
        combine_exponent: p, 1 or more.
        isolated_rate_fraction: c of a single kernel at high clocks.
        sustained_rate_fraction: c in a training step.
        unaligned_slowdown: factor on the main loop of rows of the worst alignment; 1 for CUDA cores.
        sigma_log: standard deviation of the log of measured over predicted on shapes left out of the fit.
    """

    tile_rows: Floats
    tile_columns: Floats
    tile_efficiency_fraction: Floats
    launch_floor_s: float
    wave_overhead_s: float
    wave_quantisation_fraction: float
    split_overhead_s: float
    split_traffic_factor: float
    memory_efficiency_fraction: float
    combine_exponent: float
    isolated_rate_fraction: float
    sustained_rate_fraction: float
    unaligned_slowdown: float
    sigma_log: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rates of one device at one data type.

    Attributes:
        peak_flop_per_s: P.
        bandwidth_bytes_per_s: B.
        num_sms: streaming multiprocessors.
    """

    peak_flop_per_s: float
    bandwidth_bytes_per_s: float
    num_sms: int


def mixed_waves(ctas_per_sm: Floats, quantisation_fraction: float) -> Floats:
    """Waves that a grid takes: at least 1, between the ratio itself (0) and the whole number above it (1)."""
    q = quantisation_fraction
    return np.maximum(1.0, (1.0 - q) * ctas_per_sm + q * np.ceil(ctas_per_sm))


def combine(first_s: Floats, second_s: Floats, exponent: float) -> Floats:
    """(x^p + y^p)^(1/p): the larger of two times that overlap, a little more where they are alike."""
    high = np.maximum(first_s, second_s)
    low = np.minimum(first_s, second_s)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    result: Floats = high * (1.0 + ratio**exponent) ** (1.0 / exponent)
    return result


def alignment_slowdown(n: Floats, k: Floats, element_bytes: float, worst_slowdown: float) -> Floats:
    """Factor on the main loop, 1 to `worst_slowdown`, for rows that are no multiple of 16 bytes.

    worst_slowdown^(j / log2(16 / e)) where e is element_bytes and j counts the halvings of 16 bytes that the
    worse of n and k still misses.
    """
    full = max(1.0, ALIGNMENT_BYTES / element_bytes)
    worst = np.zeros_like(n)
    for extent in (n, k):
        missing = np.zeros_like(extent)
        width = full
        while width > 1.0:
            missing += extent % width != 0
            width /= 2.0
        worst = np.maximum(worst, missing)
    steps = max(1.0, np.log2(full))
    return np.asarray(worst_slowdown ** (worst / steps), dtype=np.float64)


def gemm_time_s(
    shape: npt.NDArray[np.float64],
    num_bytes: Floats,
    coefficients: GemmCoefficients,
    machine: Machine,
    *,
    element_bytes: float,
    rate_fraction: Floats | float,
) -> Floats:
    """(num_rows,) seconds of batched products.

    Args:
        shape: (num_rows, 4) batch, m, n, k.
        num_bytes: (num_rows,) bytes read and written.
        coefficients: of the device and data type.
        machine: rates of the device.
        element_bytes: of the inputs, for alignment.
        rate_fraction: c, one for all rows or one a row.
    """
    batch, m, n, k = (shape[:, i] for i in range(4))
    c = coefficients
    slowdown = alignment_slowdown(n, k, element_bytes, c.unaligned_slowdown)
    tiles = np.ceil(m[:, None] / c.tile_rows) * np.ceil(n[:, None] / c.tile_columns) * batch[:, None]
    depth = np.ceil(k[:, None] / SPLITS / K_STEP) * K_STEP
    area_s = (
        2.0 * c.tile_rows * c.tile_columns * machine.num_sms / (machine.peak_flop_per_s * c.tile_efficiency_fraction)
    )
    main_loop = area_s[None, :, None] * (depth * slowdown[:, None])[:, None, :] + c.wave_overhead_s
    waves = mixed_waves(tiles[:, :, None] * SPLITS / machine.num_sms, c.wave_quantisation_fraction)
    traffic = c.split_traffic_factor * ACCUMULATOR_BYTES / machine.bandwidth_bytes_per_s
    extra = (SPLITS > 1.0) * (c.split_overhead_s + SPLITS * traffic * (batch * m * n)[:, None])
    tile_s = (waves * main_loop + extra[:, None, :]).reshape(len(m), -1).min(axis=1)
    rate_s = 2.0 * batch * m * n * k / (machine.peak_flop_per_s * rate_fraction)
    memory_s = num_bytes / (machine.bandwidth_bytes_per_s * c.memory_efficiency_fraction)
    return c.launch_floor_s + combine(np.maximum(tile_s, rate_s), memory_s, c.combine_exponent)
