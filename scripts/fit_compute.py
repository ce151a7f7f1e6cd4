"""Fit the coefficients of the compute model from tables of measured kernels and write them as a calibration file.

    python -m scripts.fit_compute --data DIR [--out FILE] [--report FILE] [--networks] [--seed N]

DIR holds gemm.csv.gz, attention.csv.gz and elementwise_norm.csv.gz (columns: docs/compute_model.md). A fifth of the
(n, k) pairs is left out of every GEMM fit and gives the errors of the report. The raw tables never enter the package.
"""

import argparse
import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from echo_explore.compute.attention import AttentionCoefficients
from echo_explore.compute.gemm import GemmCoefficients, Machine
from echo_explore.specs import load_cluster
from scripts.calibration_toml import Writer, attention_table, gemm_table
from scripts.kernel_families import read_rows
from scripts.kernel_fits import (
    GPU_FLOOR_US,
    Fitted,
    fit_attention,
    fit_gemm,
    fit_stream,
    gemm_errors,
    machine_of,
)

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


ATTENTION_KERNELS = {
    "a100-sxm4-80gb": ("flash_attention", "vllm_flash_attn"),
    "h100-sxm5-80gb": ("fa3", "vllm_flash_attn_fa3", "flash_attention_v3"),
    "h200-sxm-141gb": ("fa3", "vllm_flash_attn_fa3", "flash_attention_v3", "cudnn"),
    "gb200": ("cudnn",),
    "gb300": ("cudnn",),
}
"""The kernels that training runs use on each device: FlashAttention-2 and -3, cuDNN on Blackwell."""
FLASH2_BACKWARD_RATIO = 2.9
"""A100: 2.5 times the FLOP at 63 % instead of 73 % of the peak; FlashAttention-2, arXiv 2307.08691 (2023)."""
ASSUMED_SIGMA_LOG = 0.3
"""Spread stated for a share that no table gives."""
STREAM_ROWS: Mapping[str, Mapping[str, tuple[str, str, float]]] = {
    # class: (gpu of the table, condition, its bandwidth in bytes/s); PCIe cards: NVIDIA A100 datasheet (June 2021)
    "a100-sxm4-80gb": {
        "elementwise": ("A100-PCIE-80GB", "op in ['add', 'addu', 'mul', 'mulu', 'relu', 'tanh']", 1.935e12),
        "norm": ("A100-PCIE-80GB", "op == 'ln'", 1.935e12),
        "softmax": ("A100-PCIE-80GB", "op == 'softmax'", 1.935e12),
        "rope": ("A100-PCIE-80GB", "op == 'attn_rope'", 1.935e12),
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
PUBLISHED_RATES = {
    # SemiAnalysis, "MI300X vs H100 vs H200 benchmark part 1: training" (22 December 2024): large products in the stock
    # PyTorch reach about 620 of 1,307 TFLOP/s in BF16 and 990 of 2,615 in FP8 (H100: 720 of 989 and 1,280 of 1,979).
    "mi300x": {"bf16": 620 / 1307.4, "fp8": 990 / 2614.9},
}
INHERITED = {
    "a100-sxm4-40gb": ("a100-sxm4-80gb", 0.02, "the same GPU with slower memory: NVIDIA A100 datasheet (June 2021)"),
    "h800-sxm5-80gb": ("h100-sxm5-80gb", 0.03, "only FP64 and NVLink are cut: arXiv 2505.09343 (2025), section 4.1"),
    "mi325x": (
        "mi300x",
        0.1,
        "the same 304 compute units with other memory and 1,000 W: AMD data sheet (October 2024)",
    ),
    "b300-sxm": ("gb300", 0.06, "the same Blackwell Ultra GPU with 148 SMs: NVIDIA HGX B300 specifications (2025)"),
}


L2_BYTES = {
    # NVIDIA A100, H100 and V100 whitepapers (2020, 2023, 2017); l2CacheSize of CUDA device properties, B200 (2025)
    "A100-PCIE-40GB": 42e6, "A100-PCIE-80GB": 42e6, "A100-SXM4-80GB": 42e6, "H100-SXM5-80GB": 52e6, "H200-SXM": 52e6,
    "B200-SXM": 132e6, "GB200": 132e6, "GB300": 132e6, "V100-PCIE-32GB": 6.3e6,
}  # fmt: skip


def _report_line(what: str, outcome: Mapping[str, float]) -> str:
    shown = " | ".join(f"{outcome[key] * 100:+.1f} %" if key == "bias" else f"{outcome[key] * 100:.1f} %"
                       for key in ("median", "mean", "p90", "bias"))  # fmt: skip
    return f"| {what} | {outcome['rows']:.0f} | {shown} |"


class Fit:
    """One run of the script: the tables, the fits so far, and the two files."""

    def __init__(self, data: Path, seed: int) -> None:
        self.seed = seed
        gemm = read_rows(data / "gemm.csv.gz")
        gemm["source"] = gemm.source.str.replace(r"^(vidur|neusight)/.*", r"\1", regex=True)
        self.gemm_rows = gemm[(gemm.m >= 64) & (gemm.n >= 64) & (gemm.k >= 64)].assign(machine=0)
        attention = read_rows(data / "attention.csv.gz")
        attention = attention[attention.seq_q.eq(attention.seq_k) & (attention.seq_q >= 512)]
        attention = attention[attention.dtype.eq("bfloat16") & attention.kv_dtype.isin(["bfloat16", np.nan])]
        attention = attention[~attention.head_dim.astype(str).str.contains("/")]
        self.attention_rows = attention.assign(head_dim=attention.head_dim.astype(float))
        streams = read_rows(data / "elementwise_norm.csv.gz")
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
            held = f"held back: mean error {fitted.held['mean']:.1%}"
            comment = f"{fitted.num_rows} rows of {gpu}; rate by source: {how}; {held}"
            self.gemm.setdefault(key, {})["bf16"] = coefficients, comment

    def low_precision(self) -> None:
        """fp8 and nvfp4. The tables time a cast of A with each product; the graph has its own rows for casts."""
        for key, (gpu, _) in CLUSTERS.items():
            for precision, element in (("fp8", 1.0), ("nvfp4", 0.5)):
                rows = self.gemm_rows[self.gemm_rows.gpu.eq(gpu) & self.gemm_rows.dtype.eq(precision)]
                if precision not in self.specs[key].peak_flop_per_s or rows.empty:
                    continue
                fitted = fit_gemm(rows, [machine_of(self.specs[key], precision)], element, self.seed, quantised=True)
                self.report.append(_report_line(f"GEMM {precision} {key} with its cast", fitted.held))
                half = self.gemm[key]["bf16"][0]
                ratio = half.sustained_rate_fraction / half.isolated_rate_fraction
                isolated = max(fitted.rates.values())
                sustained, how = isolated * ratio, "sustained over isolated as bf16"
                if key == "h200-sxm-141gb":  # as in `half_precision`
                    sustained = min(sustained, self.gemm["h100-sxm5-80gb"][precision][0].sustained_rate_fraction)
                    how = "sustained rate of H100, the same GPU at the same 700 W"
                coefficients = replace(
                    fitted.coefficients,
                    isolated_rate_fraction=isolated,
                    sustained_rate_fraction=sustained,
                    sigma_log=float(np.hypot(fitted.coefficients.sigma_log, 0.1 - 0.5 * np.log(ratio))),
                )
                floor_s, passes = fitted.quantise
                comment = (
                    f"{fitted.num_rows} rows of {gpu}, less casts: {floor_s * 1e6:.1f} us, {passes:.1f} passes of A; "
                    f"{how}; held back: mean error {fitted.held['mean']:.1%}"
                )
                self.gemm[key][precision] = coefficients, comment

    def single_precision(self) -> None:
        """fp32 on CUDA cores."""
        for key, (gpu, machine) in CUDA_CORE.items():
            rows = self.gemm_rows[self.gemm_rows.gpu.eq(gpu) & self.gemm_rows.dtype.eq("float32")]
            fitted = fit_gemm(rows, [machine], 4.0, self.seed)
            self.report.append(_report_line(f"GEMM fp32 {key} (from {gpu})", fitted.held))
            rate = max(fitted.rates.values())
            coefficients = replace(
                fitted.coefficients,
                isolated_rate_fraction=rate,
                sustained_rate_fraction=rate,
                launch_floor_s=GPU_FLOOR_US * 1e-6,
            )
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
            error = f"mean error {outcome['mean']:.1%}"
            comment = f"{outcome['fit_rows']:.0f} rows of {gpu}, kernels {', '.join(kernels)}; {error}; {said}"
            self.attention[key] = c, comment
        # Tables of inference engines include preparing and writing the cache; a training kernel has cuDNN's floor.
        cudnn = self.attention["gb200"][0]
        for key in ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb"):
            c, comment = self.attention[key]
            self.attention[key] = (
                replace(
                    c,
                    launch_floor_s=cudnn.launch_floor_s,
                    memory_efficiency_fraction=cudnn.memory_efficiency_fraction,
                ),
                f"{comment}; floor and memory share of cuDNN, without the engine's {c.launch_floor_s * 1e6:.0f} us",
            )
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
        found = {}
        for gpu in pairs.index.unique("gpu"):
            ratio = np.log(pairs.loc[gpu, "bwd"] / pairs.loc[gpu, "fwd"])
            found[names[gpu]] = float(np.exp(ratio.median())), float(max(ratio.std(), 0.05)), len(ratio)
        return found

    def norm_backward_share(self) -> tuple[float, int]:
        """Bandwidth share of a norm's backward over its forward: 3/2 tensors over the ratio of times (cuDNN)."""
        rows = self.stream_rows[self.stream_rows.op.eq("rms_norm") & self.stream_rows.kernel.eq("cudnn")]
        times = rows.pivot_table(index=["gpu", "rows", "cols"], columns="pass", values="latency_us").dropna()
        return float(1.5 / (times["bwd"] / times["fwd"]).median()), len(times)

    def streams(self, writer: Writer, key: str) -> None:
        """Tables of the streaming classes of one device."""
        backward, pairs = self.norm_backward_share()
        found: dict[str, tuple[dict[str, float], str]] = {}
        for name, (gpu, condition, bandwidth) in STREAM_ROWS[key].items():
            rows = self.stream_rows[self.stream_rows.gpu.eq(gpu)].query(condition)
            fit = fit_stream(rows, bandwidth, L2_BYTES[gpu])
            fit["backward_bandwidth_fraction"] = fit["bandwidth_fraction"] * (backward if name == "norm" else 1.0)
            comment = f"{fit['rows']:.0f} rows beyond twice the L2 cache of {gpu}; mean error {fit['mean']:.1%}"
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
        writer.table(
            "generic.gemm.fp32", "of V100; " + cuda[1], gemm_table(replace(cuda[0], sigma_log=ASSUMED_SIGMA_LOG))
        )
        hopper = self.attention["h100-sxm5-80gb"][0]
        writer.table(
            "generic.attention.bf16",
            "of H100, the middle of the measured shares; spread assumed",
            attention_table(replace(hopper, sigma_log=ASSUMED_SIGMA_LOG, backward_sigma_log=ASSUMED_SIGMA_LOG)),
        )
        for name, share in GENERIC_STREAMS.items():
            writer.table(
                f"generic.streaming.{name}",
                GENERIC_STREAM_NOTES.get(name, "rounded mean of the measured devices"),
                {
                    "launch_floor_us": 3.0,
                    "bandwidth_fraction": share,
                    "backward_bandwidth_fraction": share * (0.8 if name in ("norm", "batch_norm") else 1.0),
                    "sigma_log": ASSUMED_SIGMA_LOG if name in GENERIC_STREAM_NOTES else 0.2,
                },
            )
        for key, rates in PUBLISHED_RATES.items():
            for precision, rate in rates.items():
                table = replace(
                    coefficients, isolated_rate_fraction=rate, sustained_rate_fraction=rate, sigma_log=ASSUMED_SIGMA_LOG
                )
                self.gemm.setdefault(key, {})[precision] = table, "generic shares; rate: SemiAnalysis (December 2024)"
        order = [*CLUSTERS, "v100-sxm2-32gb", *PUBLISHED_RATES, *INHERITED]
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
    "batch_norm": 0.65, "quantise": 0.80,
}  # fmt: skip
GENERIC_STREAM_NOTES = {
    "optimizer": "assumed: multi-tensor kernels, a little below elementwise ones",
    "cross_entropy": "assumed: softmax and a gather",
    "embedding": "assumed: rows gathered at random; no table of the bare kernel",
    "permute": "assumed: rows gathered at random; no table",
    "reduction": "assumed: elementwise with one side",
    "batch_norm": "assumed: two reads and a write at the share of a norm; no table of training kernels in 16 bits",
}


def main() -> None:
    """Fit, write the calibration, print or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured tables")
    shipped = Path(__file__).resolve().parent.parent / "echo_explore/_shipped/calibrations/compute.toml"
    parser.add_argument("--out", type=Path, default=shipped)
    parser.add_argument("--report", type=Path, help="write the table of errors here instead of printing it")
    parser.add_argument("--networks", action="store_true", help="fit the learned models too; needs torch")
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
        "# sigma_log: spread of log(measured / predicted) on shapes left out of the fit, widened by what is assumed.",
        "schema = 1",
        "learned = true  # products in 16 and 8 bits by the networks; the tables give the sustained rate",
        f'reference = "Echo Explore roofline, fitted {today} to {sources}"',
        f'fitted_on = "{today}"',
        "largest_extent = 65536",
        "longest_sequence = 65536",
    ]
    fit.write(writer)
    args.out.write_text(writer.text(), encoding="utf-8")
    if args.networks:
        from scripts.kernel_networks import write_networks

        write_networks(args.data, args.out.resolve().parent.parent / "kernels", seed=args.seed)
    head = ["| held back | rows | median | mean | 90th percentile | bias |", "|---|---|---|---|---|---|"]
    text = "\n".join(head + fit.report) + "\n"
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
