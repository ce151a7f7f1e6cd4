"""What the learned residual of a fused attention kernel sees.

    base = ((F / P + S)^2 + (bytes / B)^2)^(1/2) + 6000 / f;  S = Q (1 / E + 4 / V);  log t = log base + r(features)

F counts the FLOP that the kernel executes (half of the square for a causal one), P the peak at the data type of the
queries, B the bandwidth, f the clock. S is the softmax of Q pairs of query and key, beside the matrix units: E are
exponentials a second, V single-precision instructions a second. It is what a generation changes least: from A100 to
B200 the matrix units of an SM quadruple, E a clock stays, and B300 doubles E alone.

References:
    FlashAttention-3, arXiv 2407.08608 (2024), section 3.1: exponentials at 1/256 of the rate of products on H100.
"""

import numpy as np
import numpy.typing as npt

from echo_explore.compute.chip import Chip

Floats = npt.NDArray[np.float64]

ATTENTION_FEATURES = (
    "log_compute_cycles", "log_memory_cycles", "log_intensity", "log_batch_heads", "log_kv_heads", "log_group",
    "log_seq_q", "log_seq_k", "log_head_dim", "log_value_dim", "causal", "log_window_share", "backward",
    "deterministic",
    "log_waves_64", "log_waves_128", "log_waves_256", "last_wave_128", "last_wave_256", "log_query_fill_128",
    "log_block_cycles", "log_keys_over_l2", "log_batch", "log_output_cycles",
    "odd_head_dim_16", "odd_head_dim_32", "odd_head_dim_64", "head_dim_above_64", "head_dim_above_128",
    "log_softmax_cycles",
)  # fmt: skip
FLOOR_CYCLES = 6000.0
"""Cycles added as base: about the 3 us floor of cuDNN's kernels at 1.8 GHz (2026-11-30)."""
SOFTMAX_INSTRUCTIONS = 4.0
"""Of a pair beside its exponential: maximum, scale and subtract, sum, conversion to the type of the second product.
FlashAttention-2, arXiv 2307.08691 (2023), algorithm 1, lines 8 to 10."""


def attended_pairs(columns: dict[str, Floats]) -> Floats:
    """(num_rows,) keys that a query attends to on average: see `attention_columns`."""
    seq_q, seq_k = columns["seq_q"], columns["seq_k"]
    keys = np.where(columns["causal"] > 0, seq_k - np.minimum(seq_q, seq_k) / 2.0, seq_k)
    return np.where(columns["window"] > 0, np.minimum(keys, columns["window"]), keys)


def with_used_window(columns: dict[str, Floats], element_bytes: float) -> dict[str, Floats]:
    """The columns with the window that the kernel makes use of.

    cuDNN's backward in 8 bits visits every key whatever the window: 90 ms for a window of 128 over 32,768 tokens where
    the one in 16 bits takes 3.7 ms (cudnn-frontend benchmarks of GPT-OSS on GB200 and GB300, 2026).
    """
    if element_bytes >= 2.0:
        return columns
    return columns | {"window": np.where(columns["backward"] > 0, 0.0, columns["window"])}


def attention_work(columns: dict[str, Floats], element_bytes: float, kv_bytes: float) -> tuple[Floats, Floats]:
    """(FLOP executed, least bytes moved) of each row, both (num_rows,).

    The backward runs five products where the forward runs two, and moves about twice the bytes: queries, keys, values,
    output and its gradient in, three gradients out.
    """
    c = with_used_window(columns, element_bytes)
    work = 2.0 * _pairs(c)
    backward = c["backward"] > 0
    flop = work * np.where(backward, 3.0 * c["head_dim"] + 2.0 * c["value_dim"], c["head_dim"] + c["value_dim"])
    queries = c["batch"] * c["heads"] * c["seq_q"]
    keys = c["batch"] * c["kv_heads"] * c["seq_k"]
    moved = element_bytes * queries * c["head_dim"] + max(element_bytes, 2.0) * queries * c["value_dim"]
    moved = moved + kv_bytes * keys * (c["head_dim"] + c["value_dim"])
    return flop, np.where(backward, 2.0, 1.0) * moved


def _pairs(columns: dict[str, Floats]) -> Floats:
    return columns["batch"] * columns["heads"] * columns["seq_q"] * attended_pairs(columns)


def softmax_s(columns: dict[str, Floats], chip: Chip, element_bytes: float) -> Floats:
    """(num_rows,) seconds S of the exponentials and the instructions around them, if nothing else ran."""
    pairs = _pairs(with_used_window(columns, element_bytes))
    instructions_per_s = chip.vector_flop_per_s / 2.0  # the rate counts a multiply-add as two
    return pairs * (1.0 / chip.exponentials_per_s + SOFTMAX_INSTRUCTIONS / instructions_per_s)


def attention_columns(
    batch: Floats, heads: Floats, kv_heads: Floats, seq_q: Floats, seq_k: Floats, head_dim: Floats, *,
    value_dim: Floats | None = None, causal: Floats | float = 0.0, window: Floats | float = 0.0,
    backward: Floats | float = 0.0, deterministic: Floats | float = 0.0,
) -> dict[str, Floats]:  # fmt: skip
    """The columns of rows of attention, each (num_rows,), under the names that the functions here use."""
    full = {"causal": causal, "window": window, "backward": backward, "deterministic": deterministic}
    columns = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "seq_q": seq_q,
        "seq_k": seq_k,
        "head_dim": head_dim,
    }
    columns["value_dim"] = head_dim if value_dim is None else value_dim
    return {
        name: np.broadcast_to(np.asarray(value, dtype=np.float64), batch.shape)
        for name, value in (columns | full).items()
    }


def attention_base_s(
    columns: dict[str, Floats], chip: Chip, peak: float, element_bytes: float, kv_bytes: float
) -> Floats:
    """(num_rows,) seconds of the physical base; see the module."""
    flop, moved = attention_work(columns, element_bytes, kv_bytes)
    compute_s = flop / peak + softmax_s(columns, chip, element_bytes)
    return np.hypot(compute_s, moved / chip.bandwidth_bytes_per_s) + FLOOR_CYCLES / chip.clock_hz


def attention_features(
    columns: dict[str, Floats], chip: Chip, peak: float, element_bytes: float, kv_bytes: float
) -> Floats:
    """(num_rows, len(ATTENTION_FEATURES)) inputs of the residual."""
    c = with_used_window(columns, element_bytes)
    flop, moved = attention_work(c, element_bytes, kv_bytes)
    kilocycles = chip.clock_hz / 1e3
    queries = c["batch"] * c["heads"]
    out = np.empty((c["batch"].shape[0], len(ATTENTION_FEATURES)), dtype=np.float64)
    out[:, 0] = flop * (kilocycles / peak)
    out[:, 1] = moved * (kilocycles / chip.bandwidth_bytes_per_s)
    out[:, 2] = out[:, 0] / out[:, 1]
    out[:, 3], out[:, 4], out[:, 5] = queries, c["kv_heads"], c["heads"] / c["kv_heads"]
    out[:, 6], out[:, 7], out[:, 8], out[:, 9] = c["seq_q"], c["seq_k"], c["head_dim"], c["value_dim"]
    out[:, 11] = np.where(c["window"] > 0, np.minimum(c["window"] / c["seq_k"], 1.0), 1.0)
    for i, rows in enumerate((64.0, 128.0, 256.0)):
        waves = queries * np.ceil(c["seq_q"] / rows) / chip.num_sms
        out[:, 14 + i] = waves
        if i > 0:
            out[:, 16 + i] = np.where(waves > 0.5, np.ceil(waves) / waves, 2.0)
    out[:, 19] = c["seq_q"] / (np.ceil(c["seq_q"] / 128.0) * 128.0)
    out[:, 20] = 512.0 * c["head_dim"] * attended_pairs(c) * (kilocycles * chip.num_sms / peak)
    out[:, 21] = 2.0 * c["batch"] * c["kv_heads"] * c["seq_k"] * c["head_dim"] * (kv_bytes / chip.l2_cache_bytes)
    out[:, 22] = c["batch"]
    out[:, 23] = queries * c["seq_q"] * c["value_dim"] * (2.0 * kilocycles / chip.bandwidth_bytes_per_s)
    for i, width in enumerate((16.0, 32.0, 64.0)):
        out[:, 24 + i] = c["head_dim"] % width != 0
    out[:, 27], out[:, 28] = c["head_dim"] > 64, c["head_dim"] > 128
    out[:, 29] = softmax_s(c, chip, element_bytes) * kilocycles
    logs = [i for i, name in enumerate(ATTENTION_FEATURES) if name.startswith("log_")]
    out[:, logs] = np.log(out[:, logs])
    out[:, 10], out[:, 12], out[:, 13] = c["causal"], c["backward"], c["deterministic"]
    return out
