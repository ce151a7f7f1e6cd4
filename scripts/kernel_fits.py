"""Least-squares fits of GEMM, fused attention and streaming kernels; used by scripts/fit_compute.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from echo_explore.compute.attention import AttentionCoefficients, attention_time_s
from echo_explore.compute.gemm import UNALIGNED_SLOWDOWN, Floats, GemmCoefficients, Machine, gemm_time_s
from echo_explore.specs import DeviceSpec

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (128, 64), (64, 128), (64, 64))
NUM_FIT_ROWS = 2500
GPU_FLOOR_US = 3.0
"""Most that a kernel's floor may be. Tables timed on the GPU (vidur, aiconfigurator) have floors of 1 to 3 us; those
timed from the host (NeuSight) of 17 to 48 us, which are launches (StackProfile.host_call_s) and not the kernel's."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Coefficients and what to say about them.

    Attributes:
        rates: share of the peak that each source sustains.
        quantise: seconds and passes over A that the table adds to each product, both 0 where it adds none.
        held: errors on the pairs held back.
    """

    coefficients: GemmCoefficients
    rates: Mapping[str, float]
    quantise: tuple[float, float]
    num_rows: int
    held: Mapping[str, float]


def machine_of(spec: DeviceSpec, precision: str) -> Machine:
    """The rates of a device at one data type."""
    return Machine(
        peak_flop_per_s=spec.peak_flop_per_s[precision],
        bandwidth_bytes_per_s=spec.memory_bandwidth_bytes_per_s,
        num_sms=spec.num_sms,
    )


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-x)), dtype=np.float64)


def _unpack(vector: Floats, num_tiles: int) -> tuple[GemmCoefficients, Floats]:
    tiles = np.array(TILES[:num_tiles], dtype=np.float64)
    shares, rest = _sigmoid(vector[:num_tiles]), vector[num_tiles:]
    coefficients = GemmCoefficients(
        tile_rows=tiles[:, 0],
        tile_columns=tiles[:, 1],
        tile_efficiency_fraction=np.maximum(shares, 1e-3),
        launch_floor_s=float(np.exp(rest[0])),
        wave_overhead_s=float(np.exp(rest[1])),
        wave_quantisation_fraction=float(_sigmoid(rest[2])),
        split_overhead_s=float(np.exp(rest[3])),
        split_traffic_factor=float(np.exp(rest[4])),
        memory_efficiency_fraction=float(_sigmoid(rest[5])),
        combine_exponent=1.0 + float(np.exp(rest[6])),
        isolated_rate_fraction=1.0,
        sustained_rate_fraction=1.0,
        unaligned_slowdown=UNALIGNED_SLOWDOWN,
        sigma_log=1.0,
    )
    return coefficients, _sigmoid(rest[7:-2])


def _gemm_inputs(rows: pd.DataFrame, element_bytes: float) -> tuple[Floats, Floats]:
    shape = rows[["batch", "m", "n", "k"]].to_numpy(dtype=np.float64)
    batch, m, n, k = shape.T
    out_bytes = max(element_bytes, 2.0)
    return shape, batch * (element_bytes * (m * k + k * n) + out_bytes * m * n)


def _errors(predicted: Floats, rows: pd.DataFrame) -> dict[str, float]:
    ratio = predicted / (rows.latency_us.to_numpy() * 1e-6)
    big = (rows.latency_us >= 10).to_numpy()
    error = np.abs(ratio[big] - 1)
    log = np.log(ratio[big])
    spread = 1.4826 * float(np.median(np.abs(log - np.median(log))))
    tail = float(np.percentile(np.abs(log), 80)) / 1.2816
    return {
        "rows": float(big.sum()),
        "mean": float(error.mean()),
        "median": float(np.median(error)),
        "p90": float(np.percentile(error, 90)),
        "bias": float(np.median(ratio[big]) - 1),
        "sigma_log": max(spread, tail, 0.03),
    }


def _sample(rows: pd.DataFrame, count: int, seed: int) -> pd.DataFrame:
    """`count` rows: four fifths of training size (m, n, k from 256), the rest smaller."""
    large = (rows.m >= 256) & (rows.n >= 256) & (rows.k >= 256)
    parts = [
        part.sample(min(size, len(part)), random_state=seed)
        for part, size in ((rows[large], count * 4 // 5), (rows[~large], count // 5))
    ]
    return pd.concat(parts)


def split_by_pair(rows: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(fit, held) where a fifth of the (n, k) pairs is held back with all its m."""
    key = rows.n * 1_000_003 + rows.k
    pairs = np.random.default_rng(seed).permutation(np.unique(key))
    held = key.isin(pairs[: len(pairs) // 5])
    return rows[~held], rows[held]


def without_idle_tiles(
    coefficients: GemmCoefficients, predict: Callable[[GemmCoefficients], Floats]
) -> GemmCoefficients:
    """The coefficients without tiles that move no prediction by 0.2 % on average."""
    kept = coefficients
    for tile in range(len(TILES)):
        keep = np.ones(len(kept.tile_rows), dtype=np.bool_)
        keep &= (kept.tile_rows != TILES[tile][0]) | (kept.tile_columns != TILES[tile][1])
        if not keep.any():
            continue
        fewer = replace(
            kept,
            tile_rows=kept.tile_rows[keep],
            tile_columns=kept.tile_columns[keep],
            tile_efficiency_fraction=kept.tile_efficiency_fraction[keep],
        )
        if float(np.mean(np.abs(np.log(predict(fewer) / predict(kept))))) < 0.002:
            kept = fewer
    return kept


def fit_gemm(
    rows: pd.DataFrame, machines: list[Machine], element_bytes: float, seed: int, *, quantised: bool = False
) -> Fitted:
    """Coefficients from the rows of one or more machines, and the rate that each source sustains.

    Args:
        rows: with a column `machine`, an index into machines.
        machines: rates.
        element_bytes: of the inputs.
        seed: of the split and the sample.
        quantised: the times include a cast of A from 16 bits; its floor and passes over A are fitted too.
    """
    fit, held = split_by_pair(rows, seed)
    fit = _sample(fit, NUM_FIT_ROWS, seed)
    held = _sample(held, 6000, seed)
    sources = sorted(rows.source.unique())
    code = {s: i for i, s in enumerate(sources)}
    y = np.log(fit.latency_us.to_numpy() * 1e-6)

    def quantise_of(vector: Floats) -> tuple[float, float]:
        return (float(np.exp(vector[-2])), float(np.exp(vector[-1]))) if quantised else (0.0, 0.0)

    def predict(
        coefficients: GemmCoefficients, rates: Floats, table: pd.DataFrame, quantise: tuple[float, float]
    ) -> Floats:
        shape, num_bytes = _gemm_inputs(table, element_bytes)
        rate = rates[table.source.map(code).to_numpy()]
        owner = table.machine.to_numpy()
        time = np.empty(len(table))
        for index in np.unique(owner):
            mask = owner == index
            time[mask] = gemm_time_s(
                shape[mask], num_bytes[mask], coefficients, machines[index],
                element_bytes=element_bytes, rate_fraction=rate[mask],
            )  # fmt: skip
            pass_s = shape[mask, 1] * shape[mask, 3] * (2.0 + element_bytes) / machines[index].bandwidth_bytes_per_s
            time[mask] += quantise[0] + quantise[1] * pass_s
        return time

    n = len(TILES)
    start = np.concatenate(
        [
            [2.0] * n,
            np.log([2e-6, 1e-6]),
            [0.0],
            np.log([2e-6, 1.0]),
            [1.5, 0.7],
            [1.5] * len(sources),
            np.log([3e-6, 1.2]),
        ]
    )

    def unpack(vector: Floats) -> tuple[GemmCoefficients, Floats]:
        coefficients, rates = _unpack(vector, n)
        if element_bytes >= 4:  # CUDA cores load element by element
            coefficients = replace(coefficients, unaligned_slowdown=1.0)
        return coefficients, rates

    def residual(vector: Floats) -> Floats:
        coefficients, rates = unpack(vector)
        prior = 0.3 * (vector - start)  # keeps unused tiles and flat directions where they started
        return np.concatenate([np.log(predict(coefficients, rates, fit, quantise_of(vector))) - y, prior * 0.5])

    best = least_squares(residual, start, loss="soft_l1", f_scale=0.08, max_nfev=80)
    coefficients, rates = unpack(best.x)
    quantise = quantise_of(best.x)
    coefficients = without_idle_tiles(coefficients, lambda c: predict(c, rates, fit, quantise))
    outcome = _errors(predict(coefficients, rates, held, quantise), held)
    coefficients = replace(coefficients, sigma_log=outcome["sigma_log"])
    return Fitted(
        coefficients=coefficients,
        rates=dict(zip(sources, rates.tolist(), strict=True)),
        quantise=quantise,
        num_rows=len(fit),
        held=outcome,
    )


def gemm_errors(
    coefficients: GemmCoefficients, rows: pd.DataFrame, machine: Machine, element_bytes: float
) -> dict[str, float]:
    """Errors of given coefficients, at their isolated rate, on the rows of one machine."""
    shape, num_bytes = _gemm_inputs(rows, element_bytes)
    rate = coefficients.isolated_rate_fraction
    time = gemm_time_s(shape, num_bytes, coefficients, machine, element_bytes=element_bytes, rate_fraction=rate)
    return _errors(time, rows)


def fit_attention(rows: pd.DataFrame, machine: Machine) -> tuple[AttentionCoefficients, dict[str, float]]:
    """Coefficients of the fused forward on one machine, and errors on a fifth of the (batch, heads) held back."""
    widths, counts = np.unique(rows.head_dim.to_numpy(dtype=np.float64), return_counts=True)
    head_dims = widths[counts >= 3]
    held = (rows.heads * 7 + rows.kv_heads * 3 + rows.batch) % 5 == 0
    fit = rows[~held].sample(min(2000, int((~held).sum())), random_state=0)
    held_rows = rows[held] if held.sum() >= 5 else fit

    def coefficients_of(vector: Floats) -> AttentionCoefficients:
        return AttentionCoefficients(
            head_dims=head_dims,
            efficiency_fraction=np.maximum(_sigmoid(vector[4:]), 1e-3),
            launch_floor_s=float(np.exp(vector[0])),
            block_overhead_s=float(np.exp(vector[1])),
            wave_quantisation_fraction=float(_sigmoid(vector[2])),
            memory_efficiency_fraction=float(_sigmoid(vector[3])),
            backward_ratio=3.0,
            sigma_log=1.0,
            backward_sigma_log=1.0,
        )

    def predict(coefficients: AttentionCoefficients, table: pd.DataFrame) -> Floats:
        columns = ["batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal"]
        dims = np.column_stack([table[columns].to_numpy(dtype=np.float64), np.zeros(len(table))])
        backward = np.zeros(len(table), dtype=np.bool_)
        return attention_time_s(dims, backward, coefficients, machine, element_bytes=2.0, rate_fraction=1.0)

    y = np.log(fit.latency_us.to_numpy() * 1e-6)
    start = np.concatenate([np.log([4e-6, 2e-6]), [0.0, 1.5], [0.5] * len(head_dims)])
    best = least_squares(
        lambda v: np.concatenate([np.log(predict(coefficients_of(v), fit)) - y, 0.15 * (v - start)]),
        start, loss="soft_l1", f_scale=0.1, max_nfev=60,
    )  # fmt: skip
    coefficients = coefficients_of(best.x)
    outcome = _errors(predict(coefficients, held_rows), held_rows)
    return replace(coefficients, sigma_log=outcome["sigma_log"]), outcome | {"fit_rows": float(len(fit))}


def fit_stream(rows: pd.DataFrame, bandwidth_bytes_per_s: float, cache_bytes: float) -> dict[str, float]:
    """Floor, bandwidth share and spread of one class of streaming kernels, from rows beyond twice the L2 cache."""
    bytes_, time = rows.approx_bytes.to_numpy(dtype=np.float64), rows.latency_us.to_numpy() * 1e-6
    large = bytes_ > 2.0 * cache_bytes

    def predict(vector: Floats) -> Floats:
        return np.asarray(
            np.exp(vector[0]) + bytes_ / (bandwidth_bytes_per_s * _sigmoid(vector[1:2])), dtype=np.float64
        )

    weight = np.where(large, 1.0, 0.05)
    best = least_squares(
        lambda v: weight * np.log(predict(v) / time), np.array([np.log(2e-6), 1.0]), loss="soft_l1", f_scale=0.1
    )
    log = np.log(predict(best.x) / time)[large]
    return {
        "launch_floor_us": min(float(np.exp(best.x[0])) * 1e6, GPU_FLOOR_US),
        "bandwidth_fraction": float(_sigmoid(best.x[1:2])[0]),
        "sigma_log": max(float(np.percentile(np.abs(log), 68)), 0.05),
        "mean": float(np.mean(np.abs(np.exp(log) - 1))),
        "rows": float(large.sum()),
    }
