"""What the learned residual of a kernel that streams rows through memory sees.

    base = bytes / B + 4000 / f;  log t = log base + r(features)

`bytes` are what the operation must move, B the bandwidth, f the clock. Arrays that fit into the L2 cache are faster.
"""

import numpy as np
import numpy.typing as npt

from echo_explore.compute.chip import Chip

Floats = npt.NDArray[np.float64]

STREAM_FEATURES = (
    "log_memory_cycles", "log_rows", "log_columns", "log_elements", "log_bytes_over_l2", "log_element_bytes",
    "log_rows_a_sm", "fill_columns_1024", "odd_columns_4", "odd_columns_32", "backward",
)  # fmt: skip
FLOOR_CYCLES = 4000.0
"""Cycles added as base: about the 2 us of the shortest kernels of the tables at 1.8 GHz (2026-11-30)."""


def stream_base_s(num_bytes: Floats, chip: Chip) -> Floats:
    """(num_rows,) seconds of the physical base; see the module."""
    return num_bytes / chip.bandwidth_bytes_per_s + FLOOR_CYCLES / chip.clock_hz


def stream_features(rows: Floats, columns: Floats, num_bytes: Floats, backward: Floats, chip: Chip) -> Floats:
    """(num_rows, len(STREAM_FEATURES)) inputs of the residual."""
    out = np.empty((rows.shape[0], len(STREAM_FEATURES)), dtype=np.float64)
    out[:, 0] = num_bytes * (chip.clock_hz / 1e3 / chip.bandwidth_bytes_per_s)
    out[:, 1], out[:, 2], out[:, 3] = rows, columns, rows * columns
    out[:, 4] = num_bytes / chip.l2_cache_bytes
    out[:, 5] = num_bytes / (rows * columns)
    out[:, 6] = rows / chip.num_sms
    out[:, :7] = np.log(out[:, :7])
    out[:, 7] = columns / (np.ceil(columns / 1024.0) * 1024.0)
    out[:, 8], out[:, 9] = columns % 4 != 0, columns % 32 != 0
    out[:, 10] = backward
    return out
