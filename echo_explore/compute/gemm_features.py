"""What the learned residual of a matrix product sees: logs of physical times and ratios.

    base = ((s F / P)^p + (bytes / B)^p)^(1/p) + 4000 / f,  F = 2 batch m n k;  log t = log base + r(features)

with p the exponent of the network (2, or infinity: the larger of the two), P the peak, B the bandwidth, f the clock, s
the slowdown of unaligned rows. Times enter the features as clock cycles, so that a GPU without measurements is met by
the ones that were measured. `m` of the features counts the rows of all batches. Extents below 32, the smallest of the
tables, count as 32 in half and lower precision.
"""

import math

import numpy as np
import numpy.typing as npt

from echo_explore.compute.chip import Chip

Floats = npt.NDArray[np.float64]

GEMM_FEATURES = (
    "log_compute_cycles", "log_memory_cycles", "log_intensity", "log_m", "log_n", "log_k",
    "log_waves_256x128", "log_waves_128x256", "log_waves_128x128", "log_waves_128x64", "log_waves_64x64",
    "last_wave_256x128", "last_wave_128x256", "last_wave_128x128",
    "fill_m_64", "fill_m_128", "fill_m_256", "fill_n_128", "fill_n_256",
    "log_output_cycles", "log_a_over_l2", "log_b_over_l2", "log_c_over_l2",
    "odd_n_4", "odd_k_4", "odd_n_32", "odd_k_32",
)  # fmt: skip
_TILES = ((256.0, 128.0), (128.0, 256.0), (128.0, 128.0), (128.0, 64.0), (64.0, 64.0))
_WHOLE_WAVES = 3
FLOOR_CYCLES = 4000.0
"""Cycles added as base: 2.2 us at 1.8 GHz, about the shortest product of the tables (2026-11-30)."""
CLOCK_UNIT = 1e3
"""Features count kilocycles."""


def gemm_base_s(
    shape: Floats, chip: Chip, peak: float, element_bytes: float, slowdown: Floats | float = 1.0, *,
    exponent: float = math.inf,
) -> Floats:  # fmt: skip
    """(num_rows,) seconds of the physical base of products; see the module.

    Args:
        shape: (num_rows, 4) batch, m, n, k.
        chip: the GPU.
        peak: P in FLOP/s.
        element_bytes: of the inputs; the output has at least 2.
        slowdown: factor s.
        exponent: p, 1 or more.
    """
    batch, m, n, k = shape.T
    compute_s = 2.0 * batch * m * n * k / peak * slowdown
    memory_s = gemm_bytes(shape, element_bytes) / chip.bandwidth_bytes_per_s
    if math.isinf(exponent):
        joined = np.maximum(compute_s, memory_s)
    else:
        joined = (compute_s**exponent + memory_s**exponent) ** (1.0 / exponent)
    return np.asarray(joined + FLOOR_CYCLES / chip.clock_hz, dtype=np.float64)


def gemm_bytes(shape: Floats, element_bytes: float) -> Floats:
    """(num_rows,) least bytes that products move."""
    batch, m, n, k = shape.T
    return np.asarray(batch * (element_bytes * (m * k + k * n) + max(element_bytes, 2.0) * m * n), dtype=np.float64)


def gemm_features(shape: Floats, chip: Chip, peak: float, element_bytes: float) -> Floats:
    """(num_rows, len(GEMM_FEATURES)) inputs of the residual."""
    batch, m, n, k = shape.T
    cycles = chip.clock_hz / CLOCK_UNIT
    out_bytes = max(element_bytes, 2.0)
    out = np.empty((shape.shape[0], len(GEMM_FEATURES)), dtype=np.float64)
    out[:, 0] = 2.0 * batch * m * n * k * (cycles / peak)
    out[:, 1] = gemm_bytes(shape, element_bytes) * (cycles / chip.bandwidth_bytes_per_s)
    out[:, 2] = out[:, 0] / out[:, 1]
    out[:, 3], out[:, 4], out[:, 5] = batch * m, n, k
    for i, (rows, columns) in enumerate(_TILES):
        waves = batch * np.ceil(m / rows) * np.ceil(n / columns) / chip.num_sms
        out[:, 6 + i] = waves
        if i < _WHOLE_WAVES:
            out[:, 11 + i] = np.where(waves > 0.5, np.ceil(waves) / waves, 2.0)
    for i, (extent, size) in enumerate(((m, 64.0), (m, 128.0), (m, 256.0), (n, 128.0), (n, 256.0))):
        out[:, 14 + i] = extent / (np.ceil(extent / size) * size)
    out[:, 19] = 4.0 * batch * m * n * (cycles / chip.bandwidth_bytes_per_s)
    out[:, 20] = batch * m * k * (element_bytes / chip.l2_cache_bytes)
    out[:, 21] = batch * n * k * (element_bytes / chip.l2_cache_bytes)
    out[:, 22] = batch * m * n * (out_bytes / chip.l2_cache_bytes)
    for i, (extent, width) in enumerate(((n, 4), (k, 4), (n, 32), (k, 32))):
        out[:, 23 + i] = extent % width != 0
    for logs in (slice(0, 11), slice(19, 23)):
        np.log(out[:, logs], out=out[:, logs])
    return out
