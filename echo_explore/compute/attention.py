"""Seconds of one fused (flash) attention kernel.

    t = floor + combine_p(max(waves (t_block + w), F / (P c)), bytes / B)        forward
    t_block = 2 * 2 * 128 * K w / (r e_d);  K = keys that a block of 128 queries visits;  F = 4 batch heads s_q K w
    w = (d + d_v) / 2, the mean width of keys and values

A causal kernel visits s_k - s_q/2 + 64 keys on average (its diagonal block whole), a window W at most W + 128.
The backward takes `backward_ratio` times the forward above the floor, (3 d + 2 d_v) / (2.5 (d + d_v)) times that where
values are narrower than keys (multi-latent attention).

References:
    FlashAttention-2, arXiv 2307.08691 (2023), section 3.1 and 4.1; FlashAttention-3, arXiv 2407.08608 (2024).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.compute.gemm import Floats, Machine, combine, mixed_waves

QUERY_BLOCK = 128.0
"""Queries of one thread block: FlashAttention-2, arXiv 2307.08691 (2023), section 3.3 (64 or 128)."""

VALUE_COLUMN = 8
"""Of `dims`: head_dim of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCoefficients:
    """What one device, kernel and data type needs; symbols as in the module.

    Attributes:
        head_dims: (num_points,) ascending.
        efficiency_fraction: (num_points,) e_d, interpolated over log d and constant outside.
        launch_floor_s: floor.
        block_overhead_s: w.
        wave_quantisation_fraction: see `mixed_waves`.
        memory_efficiency_fraction: share of the bandwidth reached.
        backward_ratio: backward over forward.
        sigma_log: spread of the forward on shapes left out of the fit.
        backward_sigma_log: spread of the backward.
    """

    head_dims: Floats
    efficiency_fraction: Floats
    launch_floor_s: float
    block_overhead_s: float
    wave_quantisation_fraction: float
    memory_efficiency_fraction: float
    backward_ratio: float
    sigma_log: float
    backward_sigma_log: float


def visited_keys(seq_q: Floats, seq_k: Floats, causal: npt.NDArray[np.bool_], window: Floats) -> Floats:
    """(num_rows,) keys that a block of queries visits on average."""
    diagonal = np.clip(seq_k - seq_q / 2.0 + QUERY_BLOCK / 2.0, 1.0, seq_k)
    keys = np.where(causal, diagonal, seq_k)
    return np.where(window > 0, np.minimum(keys, window + QUERY_BLOCK), keys)


def value_dims(dims: Floats) -> Floats:
    """(num_rows,) width of a head of values; that of keys where no other is given."""
    if dims.shape[1] <= VALUE_COLUMN:
        return dims[:, 5]
    return np.where(dims[:, VALUE_COLUMN] > 0, dims[:, VALUE_COLUMN], dims[:, 5])


def mean_widths(dims: Floats) -> Floats:
    """(num_rows,) mean width of a head of keys and of values."""
    return (dims[:, 5] + value_dims(dims)) / 2.0


def backward_work(dims: Floats) -> Floats:
    """(num_rows,) products of a backward over 2.5 times those of its forward: 1 where keys and values are as wide.

    Five products, three of them as wide as keys (FlashAttention-2, section 2.3 and 4.1).
    """
    values = value_dims(dims)
    return (3.0 * dims[:, 5] + 2.0 * values) / (2.5 * (dims[:, 5] + values))


def attention_bytes(dims: Floats, element_bytes: float) -> Floats:
    """(num_rows,) bytes of queries, keys, values and output."""
    batch, heads, kv_heads, seq_q, seq_k = (dims[:, i] for i in range(5))
    return 2.0 * element_bytes * batch * mean_widths(dims) * (heads * seq_q + kv_heads * seq_k)


def attention_flop(dims: Floats) -> Floats:
    """(num_rows,) FLOP that the forward kernel executes, without the masked part of diagonal blocks."""
    batch, heads, _, seq_q, seq_k, _, causal, window = (dims[:, i] for i in range(8))
    pairs = np.where(causal > 0, seq_k - np.minimum(seq_q, seq_k) / 2.0, seq_k)
    pairs = np.where(window > 0, np.minimum(pairs, window), pairs)
    return 4.0 * batch * heads * seq_q * pairs * mean_widths(dims)


def attention_time_s(
    dims: Floats,
    backward: npt.NDArray[np.bool_],
    coefficients: AttentionCoefficients,
    machine: Machine,
    *,
    element_bytes: float,
    rate_fraction: float,
) -> Floats:
    """(num_rows,) seconds.

    Args:
        dims: (num_rows, 8 or 9) batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, window, head_dim of values.
        backward: (num_rows,) the row is the backward kernel.
        coefficients: of the device and data type.
        machine: rates of the device.
        element_bytes: of queries, keys and values.
        rate_fraction: share of the peak that the power limit sustains.
    """
    batch, heads, _, seq_q, seq_k, head_dim, causal, window = (dims[:, i] for i in range(8))
    c = coefficients
    keys = visited_keys(seq_q, seq_k, causal > 0, window)
    efficiency = np.interp(np.log(np.maximum(head_dim, 1.0)), np.log(c.head_dims), c.efficiency_fraction)
    sm_rate = machine.peak_flop_per_s / machine.num_sms
    block_s = 4.0 * QUERY_BLOCK * keys * mean_widths(dims) / (sm_rate * efficiency) + c.block_overhead_s
    waves = mixed_waves(batch * heads * np.ceil(seq_q / QUERY_BLOCK) / machine.num_sms, c.wave_quantisation_fraction)
    rate_s = attention_flop(dims) / (machine.peak_flop_per_s * rate_fraction)
    memory_s = attention_bytes(dims, element_bytes) / (machine.bandwidth_bytes_per_s * c.memory_efficiency_fraction)
    forward = combine(np.maximum(waves * block_s, rate_s), memory_s, 4.0)
    return c.launch_floor_s + np.where(backward, c.backward_ratio * backward_work(dims), 1.0) * forward
