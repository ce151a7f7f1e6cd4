"""Fit the coefficients of the compute model from tables of measured kernels and write them as a calibration file.

    python scripts/fit_compute.py --data DIR [--out FILE] [--report FILE] [--seed N]

DIR holds gemm.csv.gz, attention.csv.gz and elementwise_norm.csv.gz (columns: docs/compute_model.md). A fifth of the (n, k)
pairs is left out of every GEMM fit and gives the errors of the report. The raw tables never enter the package.
"""

import argparse
import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from echo_explore.compute.attention import AttentionCoefficients, attention_time_s
from echo_explore.compute.gemm import Floats, GemmCoefficients, Machine, gemm_time_s
from echo_explore.specs import DeviceSpec, load_cluster

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (128, 64), (64, 128), (64, 64))
NUM_FIT_ROWS = 2500
CLUSTERS = {
    "a100-sxm4-80gb": ("A100-SXM4-80GB", "a100-80gb-hdr"),
    "h100-sxm5-80gb": ("H100-SXM5-80GB", "h100-ndr"),
    "h200-sxm-141gb": ("H200-SXM", "h200-ndr"),
    "b200-sxm-180gb": ("B200-SXM", "b200-ndr"),
    "gb200": ("GB200", "gb200-nvl72"),
    "gb300": ("GB300", "gb300-nvl72"),
}
"""Device key: its name in the tables and the cluster file with its specification."""
CUDA_CORE = {
    # NVIDIA A100 PCIe product brief PB-10137-001 (2020); NVIDIA V100 datasheet (January 2020)
    "a100-sxm4-40gb": ("A100-PCIE-40GB", Machine(peak_flop_per_s=19.5e12, bandwidth_bytes_per_s=1.555e12, num_sms=108)),
    "v100-sxm2-32gb": ("V100-PCIE-32GB", Machine(peak_flop_per_s=14.0e12, bandwidth_bytes_per_s=0.9e12, num_sms=80)),
}
"""fp32 tables of PCIe cards with the same GPU."""
POOL = ("a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb", "gb300")
"""Devices that the generic coefficients are pooled from, one a generation and power class."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Coefficients and what to say about them."""

    coefficients: GemmCoefficients
    rates: Mapping[str, float]
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
        sigma_log=1.0,
    )
    return coefficients, _sigmoid(rest[7:])


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


def without_idle_tiles(coefficients: GemmCoefficients, predict: Callable[[GemmCoefficients], Floats]) -> GemmCoefficients:
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


def fit_gemm(rows: pd.DataFrame, machines: list[Machine], element_bytes: float, seed: int) -> Fitted:
    """Coefficients from the rows of one or more machines, and the rate that each source sustains.

    Args:
        rows: with a column `machine`, an index into machines.
        machines: rates.
        element_bytes: of the inputs.
        seed: of the split and the sample.
    """
    fit, held = split_by_pair(rows, seed)
    fit = _sample(fit, NUM_FIT_ROWS, seed)
    held = _sample(held, 6000, seed)
    sources = sorted(rows.source.unique())
    code = {s: i for i, s in enumerate(sources)}
    y = np.log(fit.latency_us.to_numpy() * 1e-6)

    def predict(coefficients: GemmCoefficients, rates: Floats, table: pd.DataFrame) -> Floats:
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
        return time

    n = len(TILES)
    start = np.concatenate([[2.0] * n, np.log([2e-6, 1e-6]), [0.0], np.log([2e-6, 1.0]), [1.5, 0.7], [1.5] * len(sources)])

    def residual(vector: Floats) -> Floats:
        coefficients, rates = _unpack(vector, n)
        prior = 0.3 * (vector - start)  # keeps unused tiles and flat directions where they started
        return np.concatenate([np.log(predict(coefficients, rates, fit)) - y, prior * 0.5])

    best = least_squares(residual, start, loss="soft_l1", f_scale=0.08, max_nfev=80)
    coefficients, rates = _unpack(best.x, n)
    coefficients = without_idle_tiles(coefficients, lambda c: predict(c, rates, fit))
    outcome = _errors(predict(coefficients, rates, held), held)
    coefficients = replace(coefficients, sigma_log=outcome["sigma_log"])
    return Fitted(
        coefficients=coefficients,
        rates=dict(zip(sources, rates.tolist(), strict=True)),
        num_rows=len(fit),
        held=outcome,
    )


def gemm_errors(coefficients: GemmCoefficients, rows: pd.DataFrame, machine: Machine, element_bytes: float) -> dict[str, float]:
    """Errors of given coefficients, at their isolated rate, on the rows of one machine."""
    shape, num_bytes = _gemm_inputs(rows, element_bytes)
    rate = coefficients.isolated_rate_fraction
    time = gemm_time_s(shape, num_bytes, coefficients, machine, element_bytes=element_bytes, rate_fraction=rate)
    return _errors(time, rows)


def fit_attention(rows: pd.DataFrame, machine: Machine) -> tuple[AttentionCoefficients, dict[str, float]]:
    """Coefficients of the fused forward from rows of one machine, and errors on a fifth of the rows held back by heads."""
    head_dims = np.array(sorted(d for d, n in rows.head_dim.value_counts().items() if n >= 3), dtype=np.float64)
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


def fit_stream(rows: pd.DataFrame, bandwidth_bytes_per_s: float) -> dict[str, float]:
    """Floor, share of the bandwidth and spread of one class of streaming kernels, over rows of more than 4 MB."""
    bytes_, time = rows.approx_bytes.to_numpy(dtype=np.float64), rows.latency_us.to_numpy() * 1e-6
    large = bytes_ > 4e6

    def predict(vector: Floats) -> Floats:
        return np.asarray(np.exp(vector[0]) + bytes_ / (bandwidth_bytes_per_s * _sigmoid(vector[1:2])), dtype=np.float64)

    weight = np.where(large, 1.0, 0.1)
    best = least_squares(
        lambda v: weight * np.log(predict(v) / time), np.array([np.log(2e-6), 1.0]), loss="soft_l1", f_scale=0.1
    )
    log = np.log(predict(best.x) / time)[large]
    return {
        "launch_floor_us": float(np.exp(best.x[0])) * 1e6,
        "bandwidth_fraction": float(_sigmoid(best.x[1:2])[0]),
        "sigma_log": max(float(np.percentile(np.abs(log), 68)), 0.03),
        "mean": float(np.mean(np.abs(np.exp(log) - 1))),
        "rows": float(large.sum()),
    }


ATTENTION_KERNELS = {
    "a100-sxm4-80gb": ("flash_attention", "vllm_flash_attn"),
    "h100-sxm5-80gb": ("fa3", "vllm_flash_attn_fa3", "flash_attention_v3"),
    "h200-sxm-141gb": ("fa3", "vllm_flash_attn_fa3", "flash_attention_v3", "cudnn"),
    "gb200": ("cudnn",),
    "gb300": ("cudnn",),
}
"""The kernels that training runs use on each device: FlashAttention-2 and -3, cuDNN on Blackwell."""
FLASH2_BACKWARD_RATIO = 2.9
"""A100: 2.5 times the FLOP at 63 % instead of 73 % of the peak; FlashAttention-2, arXiv 2307.08691 (2023), section 4.1."""
ASSUMED_SIGMA_LOG = 0.3
"""Spread stated for a share that no table gives."""
STREAM_ROWS: Mapping[str, Mapping[str, tuple[str, str, float]]] = {
    # class: (gpu of the table, condition, bandwidth of that card in bytes/s); PCIe cards: NVIDIA A100 datasheet (June 2021)
    "a100-sxm4-80gb": {
        "elementwise": ("A100-PCIE-80GB", "op in ['add', 'addu', 'mul', 'mulu', 'relu', 'tanh']", 1.935e12),
        "norm": ("A100-PCIE-80GB", "op == 'ln'", 1.935e12),
        "softmax": ("A100-PCIE-80GB", "op == 'softmax'", 1.935e12),
        "rope": ("A100-SXM4-80GB", "op == 'attn_rope'", 2.039e12),
    },
    "a100-sxm4-40gb": {
        "elementwise": ("A100-PCIE-40GB", "op in ['add', 'addu', 'mul', 'mulu', 'relu', 'tanh', 'gelu']", 1.555e12),
        "norm": ("A100-PCIE-40GB", "op == 'ln'", 1.555e12),
        "softmax": ("A100-PCIE-40GB", "op == 'softmax'", 1.555e12),
    },
    "h100-sxm5-80gb": {
        "elementwise": ("H100-SXM5-80GB", "op == 'fp8_quant_scale_matrix' and kernel != 'sglang'", 3.35e12),
        "norm": ("H200-SXM", "op == 'rms_norm' and kernel == 'cudnn' and `pass` == 'fwd'", 4.8e12),
        "rope": ("H100-SXM5-80GB", "op == 'attn_rope'", 3.35e12),
    },
    "h200-sxm-141gb": {
        "elementwise": ("H200-SXM", "op == 'fp8_quant_scale_matrix' and kernel != 'sglang'", 4.8e12),
        "norm": ("H200-SXM", "op == 'rms_norm' and kernel == 'cudnn' and `pass` == 'fwd'", 4.8e12),
    },
    "b200-sxm-180gb": {
        "elementwise": ("B200-SXM", "op == 'fp8_quant_scale_matrix' and kernel == 'static_scaled_fp8_quant'", 8e12),
        "norm": ("GB200", "op == 'rms_norm' and kernel == 'cudnn' and `pass` == 'fwd'", 8e12),
    },
    "gb200": {
        "elementwise": ("GB200", "op == 'fp8_quant_scale_matrix' and kernel == 'static_scaled_fp8_quant'", 8e12),
        "norm": ("GB200", "op == 'rms_norm' and kernel == 'cudnn' and `pass` == 'fwd'", 8e12),
    },
    "gb300": {
        "elementwise": ("GB300", "op == 'fp8_quant_scale_matrix' and kernel == 'static_scaled_fp8_quant'", 8e12),
        "norm": ("GB300", "op == 'rms_norm' and kernel == 'cudnn' and `pass` == 'fwd'", 8e12),
    },
    "v100-sxm2-32gb": {
        "elementwise": ("V100-PCIE-32GB", "op in ['add', 'addu', 'mul', 'mulu', 'relu', 'tanh', 'gelu']", 0.9e12),
        "norm": ("V100-PCIE-32GB", "op == 'ln'", 0.9e12),
        "softmax": ("V100-PCIE-32GB", "op == 'softmax'", 0.9e12),
    },
}
INHERITED = {
    "a100-sxm4-40gb": ("a100-sxm4-80gb", 0.02, "the same GPU with slower memory: NVIDIA A100 datasheet (June 2021)"),
    "h800-sxm5-80gb": ("h100-sxm5-80gb", 0.03, "only FP64 and NVLink are cut: arXiv 2505.09343 (2025), section 4.1"),
    "b300-sxm": ("gb300", 0.06, "the same Blackwell Ultra GPU with 148 SMs: NVIDIA HGX B300 specifications (2025)"),
}


class Writer:
    """Collects the lines of the calibration file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def table(self, name: str, comment: str, values: Mapping[str, Any]) -> None:
        """One table: a comment line with source, sample and spread, then its keys."""
        self.lines += ["", f"# {comment}", f"[{name}]"]
        self.lines += [f"{key} = {_toml(value)}" for key, value in values.items()]

    def text(self) -> str:
        """The file."""
        return "\n".join(self.lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', "'") + '"'
    if isinstance(value, list | tuple | np.ndarray):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, int) or float(value).is_integer():
        return str(int(value))
    return f"{value:.4g}"


def gemm_table(c: GemmCoefficients) -> dict[str, Any]:
    """The keys of one GEMM table."""
    return {
        "tiles": [f"{a:.0f}x{b:.0f}" for a, b in zip(c.tile_rows, c.tile_columns, strict=True)],
        "tile_efficiency_fraction": list(c.tile_efficiency_fraction),
        "launch_floor_us": c.launch_floor_s * 1e6,
        "wave_overhead_us": c.wave_overhead_s * 1e6,
        "wave_quantisation_fraction": c.wave_quantisation_fraction,
        "split_overhead_us": c.split_overhead_s * 1e6,
        "split_traffic_factor": c.split_traffic_factor,
        "memory_efficiency_fraction": c.memory_efficiency_fraction,
        "combine_exponent": c.combine_exponent,
        "isolated_rate_fraction": c.isolated_rate_fraction,
        "sustained_rate_fraction": c.sustained_rate_fraction,
        "sigma_log": c.sigma_log,
    }


def attention_table(c: AttentionCoefficients) -> dict[str, Any]:
    """The keys of one attention table."""
    return {
        "head_dims": list(c.head_dims),
        "efficiency_fraction": list(c.efficiency_fraction),
        "launch_floor_us": c.launch_floor_s * 1e6,
        "block_overhead_us": c.block_overhead_s * 1e6,
        "wave_quantisation_fraction": c.wave_quantisation_fraction,
        "memory_efficiency_fraction": c.memory_efficiency_fraction,
        "backward_ratio": c.backward_ratio,
        "sigma_log": c.sigma_log,
        "backward_sigma_log": c.backward_sigma_log,
    }


def _report_line(what: str, outcome: Mapping[str, float]) -> str:
    shown = " | ".join(f"{outcome[key] * 100:+.1f} %" if key == "bias" else f"{outcome[key] * 100:.1f} %"
                       for key in ("median", "mean", "p90", "bias"))  # fmt: skip
    return f"| {what} | {outcome['rows']:.0f} | {shown} |"


class Fit:
    """One run of the script: the tables, the fits so far, and the two files."""

    def __init__(self, data: Path, seed: int) -> None:
        self.seed = seed
        gemm = pd.read_csv(data / "gemm.csv.gz")
        gemm["source"] = gemm.source.str.replace(r"^(vidur|neusight)/.*", r"\1", regex=True)
        self.gemm_rows = gemm[(gemm.m >= 64) & (gemm.n >= 64) & (gemm.k >= 64)].assign(machine=0)
        attention = pd.read_csv(data / "attention.csv.gz", low_memory=False)
        attention = attention[attention.seq_q.eq(attention.seq_k) & (attention.seq_q >= 512)]
        attention = attention[attention.dtype.eq("bfloat16") & attention.kv_dtype.isin(["bfloat16", np.nan])]
        attention = attention[~attention.head_dim.astype(str).str.contains("/")]
        self.attention_rows = attention.assign(head_dim=attention.head_dim.astype(float))
        streams = pd.read_csv(data / "elementwise_norm.csv.gz")
        self.stream_rows = streams[(streams.latency_us > 0) & ~streams.kernel.str.contains("minus_static")]
        self.specs = {key: load_cluster(cluster).device for key, (_, cluster) in CLUSTERS.items()}
        self.gemm: dict[str, dict[str, tuple[GemmCoefficients, str]]] = {}
        self.attention: dict[str, tuple[AttentionCoefficients, str]] = {}
        self.report: list[str] = []

    def half_precision(self) -> None:
        """bf16 and fp16 GEMM of every device that has tables."""
        for key, (gpu, _) in CLUSTERS.items():
            rows = self.gemm_rows[self.gemm_rows.gpu.eq(gpu) & self.gemm_rows.dtype.isin(["bfloat16", "float16"])]
            fitted = fit_gemm(rows, [machine_of(self.specs[key], "bf16")], 2.0, self.seed)
            self.report.append(_report_line(f"GEMM bf16/fp16 {key}", fitted.held))
            isolated = max(fitted.rates.values())
            slower = [rate for rate in fitted.rates.values() if rate < isolated]
            sustained = float(np.exp(np.mean(np.log(slower)))) if slower else isolated
            how = ", ".join(f"{source} {rate:.3f}" for source, rate in fitted.rates.items())
            if key == "h200-sxm-141gb":  # the GPU and the power limit of H100
                sustained = min(sustained, self.gemm["h100-sxm5-80gb"]["bf16"][0].sustained_rate_fraction)
                how += "; sustained rate of H100, the same GPU at the same 700 W"
            # The sustained rate is known to about half the gap between the sources.
            sigma = float(np.hypot(fitted.coefficients.sigma_log, 0.5 * np.log(isolated / sustained)))
            coefficients = replace(
                fitted.coefficients, isolated_rate_fraction=isolated, sustained_rate_fraction=sustained, sigma_log=sigma
            )
            comment = f"{fitted.num_rows} rows of {gpu}; rate by source: {how}; held back: mean error {fitted.held['mean']:.1%}"
            self.gemm.setdefault(key, {})["bf16"] = coefficients, comment

    def low_precision(self) -> None:
        """fp8 and nvfp4: the tiles of bf16 at the higher rate, limited at what the best tenth of the large products reach.

        The tables are of inference kernels; training products reach the best of them.
        """
        for key, (gpu, _) in CLUSTERS.items():
            for precision, element in (("fp8", 1.0), ("nvfp4", 0.5)):
                rows = self.gemm_rows[self.gemm_rows.gpu.eq(gpu) & self.gemm_rows.dtype.eq(precision)]
                flop = 2.0 * rows.m * rows.n * rows.k
                large = rows[flop > 1e12]
                if precision not in self.specs[key].peak_flop_per_s or large.empty:
                    continue
                machine = machine_of(self.specs[key], precision)
                reached = flop[large.index] / (large.latency_us * 1e-6) / machine.peak_flop_per_s
                isolated = float(np.percentile(reached, 90))
                half = self.gemm[key]["bf16"][0]
                ratio = half.sustained_rate_fraction / half.isolated_rate_fraction
                coefficients = replace(
                    half, isolated_rate_fraction=isolated, sustained_rate_fraction=isolated * ratio, sigma_log=0.2
                )
                outcome = gemm_errors(coefficients, rows.sample(min(4000, len(rows)), random_state=self.seed), machine, element)
                coefficients = replace(coefficients, sigma_log=max(0.2, outcome["sigma_log"]))
                self.report.append(_report_line(f"GEMM {precision} {key} (tiles of bf16)", outcome))
                comment = f"tiles of bf16; rate: 90th percentile of {len(large)} rows above 1e12 FLOP of {gpu}"
                self.gemm[key][precision] = coefficients, comment

    def single_precision(self) -> None:
        """fp32 on CUDA cores."""
        for key, (gpu, machine) in CUDA_CORE.items():
            rows = self.gemm_rows[self.gemm_rows.gpu.eq(gpu) & self.gemm_rows.dtype.eq("float32")]
            fitted = fit_gemm(rows, [machine], 4.0, self.seed)
            self.report.append(_report_line(f"GEMM fp32 {key} (from {gpu})", fitted.held))
            rate = max(fitted.rates.values())
            coefficients = replace(fitted.coefficients, isolated_rate_fraction=rate, sustained_rate_fraction=rate)
            comment = f"{fitted.num_rows} rows of {gpu}; held back: mean error {fitted.held['mean']:.1%}"
            self.gemm.setdefault(key, {})["fp32"] = coefficients, comment
        self.gemm["a100-sxm4-80gb"]["fp32"] = self.gemm["a100-sxm4-40gb"]["fp32"]

    def _pooled(self, keys: list[str]) -> Fitted:
        parts = []
        for index, key in enumerate(keys):
            gpu = CLUSTERS[key][0]
            rows = self.gemm_rows[self.gemm_rows.gpu.eq(gpu) & self.gemm_rows.dtype.isin(["bfloat16"])]
            parts.append(rows.sample(min(8000, len(rows)), random_state=self.seed).assign(machine=index))
        pooled = pd.concat(parts).assign(source="pooled")
        return fit_gemm(pooled, [machine_of(self.specs[key], "bf16") for key in keys], 2.0, self.seed)

    def generic(self) -> tuple[GemmCoefficients, str]:
        """Shares pooled over devices, with the spread seen on a device left out."""
        spreads = []
        for left_out in POOL:
            fitted = self._pooled([key for key in POOL if key != left_out])
            gpu = CLUSTERS[left_out][0]
            rows = self.gemm_rows[self.gemm_rows.gpu.eq(gpu) & self.gemm_rows.dtype.eq("bfloat16")]
            coefficients = replace(fitted.coefficients, isolated_rate_fraction=max(fitted.rates.values()))
            sample = rows.sample(min(4000, len(rows)), random_state=self.seed)
            outcome = gemm_errors(coefficients, sample, machine_of(self.specs[left_out], "bf16"), 2.0)
            self.report.append(_report_line(f"GEMM bf16 {left_out}, left out of the pooled fit", outcome))
            spreads.append(float(np.hypot(outcome["sigma_log"], outcome["bias"])))
        fitted = self._pooled(list(POOL))
        rate = max(fitted.rates.values())
        ratios = [c["bf16"][0].sustained_rate_fraction / c["bf16"][0].isolated_rate_fraction
                  for k, c in self.gemm.items() if k in POOL]  # fmt: skip
        coefficients = replace(
            fitted.coefficients,
            isolated_rate_fraction=rate,
            sustained_rate_fraction=rate * float(np.mean(ratios)),
            sigma_log=max(spreads),
        )
        return coefficients, f"{fitted.num_rows} rows of {', '.join(POOL)} together; spread: worst device left out"

    def fused_attention(self) -> None:
        """Forward of the training kernels, and the ratio of backward to forward."""
        rows = self.attention_rows
        backward = self._backward_ratios()
        for key, kernels in ATTENTION_KERNELS.items():
            gpu = CLUSTERS[key][0]
            chosen = rows[rows.gpu.eq(gpu) & rows["pass"].eq("fwd") & rows.kernel.isin(kernels)]
            c, outcome = fit_attention(chosen, machine_of(self.specs[key], "bf16"))
            self.report.append(_report_line(f"attention forward bf16 {key} ({', '.join(kernels)})", outcome))
            ratio, spread, count = backward.get(key, backward["h200-sxm-141gb"])
            said = f"backward: {count} pairs" if key in backward else "backward ratio of H200"
            if key == "a100-sxm4-80gb":
                ratio, spread, said = FLASH2_BACKWARD_RATIO, 0.15, "backward: arXiv 2307.08691 (2023), section 4.1"
            sigma = float(np.hypot(c.sigma_log, spread))
            c = replace(c, backward_ratio=ratio, backward_sigma_log=sigma)
            comment = f"{outcome['fit_rows']:.0f} rows of {gpu}, kernels {', '.join(kernels)}; mean error {outcome['mean']:.1%}; {said}"
            self.attention[key] = c, comment
        # Other head widths keep the proportions of H100 where a device was measured at 128 (and 256) only.
        hopper = self.attention["h100-sxm5-80gb"][0]
        for key in ("a100-sxm4-80gb", "gb200", "gb300"):
            c, comment = self.attention[key]
            reference = float(np.interp(128.0, hopper.head_dims, hopper.efficiency_fraction))
            own = float(np.interp(128.0, c.head_dims, c.efficiency_fraction))
            small = float(hopper.efficiency_fraction[0] / reference * own)
            self.attention[key] = (
                replace(
                    c,
                    head_dims=np.concatenate([[64.0], c.head_dims]),
                    efficiency_fraction=np.concatenate([[small], c.efficiency_fraction]),
                ),
                comment + "; head_dim 64 in the proportion of H100",
            )

    def _backward_ratios(self) -> dict[str, tuple[float, float, int]]:
        rows = self.attention_rows[self.attention_rows.kernel.eq("cudnn")]
        names = {gpu: key for key, (gpu, _) in CLUSTERS.items()}
        index = ["gpu", "source", "batch", "heads", "kv_heads", "seq_q", "head_dim", "causal"]
        pairs = rows.pivot_table(index=index, columns="pass", values="latency_us").dropna(subset=["fwd", "bwd"])
        ratio = np.log(pairs["bwd"] / pairs["fwd"])
        return {
            names[gpu]: (float(np.exp(r.median())), float(max(r.std(), 0.05)), len(r))
            for gpu, r in ratio.groupby(level="gpu")
        }

    def norm_backward_share(self) -> tuple[float, int]:
        """Share of the bandwidth in a norm's backward over its forward: 3 tensors against 2, over the ratio of times (cuDNN)."""
        rows = self.stream_rows[self.stream_rows.op.eq("rms_norm") & self.stream_rows.kernel.eq("cudnn")]
        times = rows.pivot_table(index=["gpu", "rows", "cols"], columns="pass", values="latency_us").dropna()
        return float(1.5 / (times["bwd"] / times["fwd"]).median()), len(times)

    def streams(self, writer: Writer, key: str) -> None:
        """Tables of the streaming classes of one device."""
        backward, pairs = self.norm_backward_share()
        found: dict[str, tuple[dict[str, float], str]] = {}
        for name, (gpu, condition, bandwidth) in STREAM_ROWS[key].items():
            rows = self.stream_rows[self.stream_rows.gpu.eq(gpu)].query(condition)
            fit = fit_stream(rows, bandwidth)
            fit["backward_bandwidth_fraction"] = fit["bandwidth_fraction"] * (backward if name == "norm" else 1.0)
            comment = f"{fit['rows']:.0f} rows above 4 MB of {gpu}; mean error {fit['mean']:.1%}"
            if name == "norm":
                comment += f"; backward share {backward:.2f} of the forward from {pairs} pairs of cuDNN"
            found[name] = fit, comment
        for name, like in (("copy", "elementwise"), ("reduction", "elementwise"), ("optimizer", "elementwise")):
            fit, comment = found[like]
            found[name] = fit | {"sigma_log": max(0.15, fit["sigma_log"])}, f"as {like} of this device: no table"
        if "softmax" in found:
            found["cross_entropy"] = found["softmax"][0] | {"sigma_log": ASSUMED_SIGMA_LOG}, "as softmax: no table"
        keys = ("launch_floor_us", "bandwidth_fraction", "backward_bandwidth_fraction", "sigma_log")
        for name, (fit, comment) in sorted(found.items()):
            writer.table(f"device.{key}.streaming.{name}", comment, {k: fit[k] for k in keys})

    def write(self, writer: Writer) -> None:
        """All tables of the file."""
        coefficients, comment = self.generic()
        writer.table("generic.gemm.bf16", comment, gemm_table(coefficients))
        cuda = self.gemm["v100-sxm2-32gb"]["fp32"]
        writer.table("generic.gemm.fp32", "of V100; " + cuda[1], gemm_table(replace(cuda[0], sigma_log=ASSUMED_SIGMA_LOG)))
        hopper = self.attention["h100-sxm5-80gb"][0]
        writer.table(
            "generic.attention.bf16",
            "of H100: the middle of the measured shares; spread: half the range from A100 to GB300",
            attention_table(replace(hopper, sigma_log=ASSUMED_SIGMA_LOG, backward_sigma_log=ASSUMED_SIGMA_LOG)),
        )
        for name, share in GENERIC_STREAMS.items():
            writer.table(
                f"generic.streaming.{name}",
                GENERIC_STREAM_NOTES.get(name, "rounded mean of the measured devices"),
                {
                    "launch_floor_us": 3.0,
                    "bandwidth_fraction": share,
                    "backward_bandwidth_fraction": share * (0.8 if name == "norm" else 1.0),
                    "sigma_log": ASSUMED_SIGMA_LOG if name in GENERIC_STREAM_NOTES else 0.2,
                },
            )
        order = [*CLUSTERS, "v100-sxm2-32gb", *INHERITED]
        for key in order:
            if key in INHERITED:
                parent, sigma, because = INHERITED[key]
                values = {"inherits": parent, "because": because, "extra_sigma_log": sigma}
                writer.table(f"device.{key}", because, values)
            for precision, (fitted, said) in self.gemm.get(key, {}).items():
                writer.table(f"device.{key}.gemm.{precision}", said, gemm_table(fitted))
            source = "gb200" if key == "b200-sxm-180gb" else key
            if source in self.attention:
                c, said = self.attention[source]
                said = f"of GB200, the same GPU: {said}" if source != key else said
                writer.table(f"device.{key}.attention.bf16", said, attention_table(c))
            if key in STREAM_ROWS:
                self.streams(writer, key)


GENERIC_STREAMS = {
    "elementwise": 0.80, "copy": 0.80, "reduction": 0.75, "optimizer": 0.75, "norm": 0.65, "softmax": 0.65,
    "cross_entropy": 0.60, "rope": 0.40, "embedding": 0.40, "permute": 0.50,
}  # fmt: skip
GENERIC_STREAM_NOTES = {
    "optimizer": "assumed: multi-tensor kernels move four arrays of fp32 and one of 16 bits near the rate of elementwise ones",
    "cross_entropy": "assumed: softmax and a gather",
    "embedding": "assumed: rows gathered at random; no table of the bare kernel",
    "permute": "assumed: rows gathered at random; no table",
    "reduction": "assumed: elementwise with one side",
}


def main() -> None:
    """Fit, write the calibration, print or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured tables")
    shipped = Path(__file__).resolve().parent.parent / "echo_explore/_shipped/calibrations/compute.toml"
    parser.add_argument("--out", type=Path, default=shipped)
    parser.add_argument("--report", type=Path, help="write the table of errors here instead of printing it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fit = Fit(args.data, args.seed)
    fit.half_precision()
    fit.low_precision()
    fit.single_precision()
    fit.fused_attention()
    writer = Writer()
    today = datetime.date.today().isoformat()
    sources = "aiconfigurator-core 0.12.0 (Apache-2.0), vidur (MIT), NeuSight (MIT), cudnn-frontend benchmarks (MIT)"
    writer.lines = [
        "# Coefficients of the compute model. Written by scripts/fit_compute.py; keys: docs/compute_model.md.",
        f"# Tables: {sources}, compiled 2026-11.",
        "# sigma_log is the spread of log(measured / predicted) on shapes left out of the fit, widened where a comment says so.",
        "schema = 1",
        f'reference = "Echo Explore roofline, fitted {today} to {sources}"',
        f'fitted_on = "{today}"',
        "largest_extent = 65536",
        "longest_sequence = 65536",
    ]
    fit.write(writer)
    args.out.write_text(writer.text(), encoding="utf-8")
    head = ["| held back | rows | median | mean | 90th percentile | bias |", "|---|---|---|---|---|---|"]
    text = "\n".join(head + fit.report) + "\n"
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
