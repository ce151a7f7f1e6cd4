"""Tables of measured kernels as inputs, bases and categories of learned residuals; for scripts/kernel_networks.py."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from echo_explore.compute.attention_features import (
    ATTENTION_FEATURES,
    attention_base_s,
    attention_features,
)
from echo_explore.compute.chip import Chip, card_of, chip_names, copy_engine, matrix_instructions, named_chip
from echo_explore.compute.gemm_features import GEMM_FEATURES, gemm_base_s, gemm_features
from echo_explore.compute.stream_features import STREAM_FEATURES, stream_base_s, stream_features
from echo_explore.compute.tables import (
    attention_table_columns,
    element_bytes_of,
    kernel_family,
    normal_kv,
    normal_source,
    precision_of,
)

Floats = npt.NDArray[np.float64]
SMALL_US = 10.0
"""Times below are launches and count little: the yardstick leaves them out."""
BASE_EXPONENT = {"gemm_half": 2.0, "gemm_fp32": 2.0}
"""p of the physical base of a family of products; the larger of the two times where there is none."""
RARE_WEIGHT = 20.0
"""Weight of the tables with few rows that are of training kernels (cudnn-frontend), so that they are heard."""


@dataclass(kw_only=True)
class Family:
    """One kind of kernel, ready to fit.

    Attributes:
        name: of the network.
        features: names of the inputs.
        inputs: (num_rows, num_features).
        log_base: (num_rows,) log of the physical base in microseconds.
        log_time: (num_rows,) log of the measured microseconds.
        weight: (num_rows,).
        categories: texts `field:value` of each row, by field.
        group: (num_rows,) rows of one group are held back together.
        device: (num_rows,) device key.
        label: (num_rows,) group of the report.
        base_exponent: p of the base; None where the base has none.
    """

    name: str
    features: tuple[str, ...]
    inputs: Floats
    log_base: Floats
    log_time: Floats
    weight: Floats
    categories: Mapping[str, npt.NDArray[np.str_]]
    group: npt.NDArray[np.int64]
    device: npt.NDArray[np.str_]
    label: npt.NDArray[np.str_]
    big: npt.NDArray[np.bool_]
    base_exponent: float | None = None
    scored: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


def _weights(latency_us: Floats, scored: npt.NDArray[np.bool_]) -> Floats:
    return np.where(latency_us >= SMALL_US, 1.0, 0.15) * np.where(scored, 1.0, 0.3)


def _balance(device: npt.NDArray[np.str_]) -> Floats:
    """(num_rows,) root of the largest table over the device's own, so that short tables are heard."""
    counts = dict(zip(*np.unique(device, return_counts=True), strict=True))
    own = np.array([counts[d] for d in device], dtype=np.float64)
    return np.asarray(np.sqrt(max(counts.values()) / own), dtype=np.float64)


def _by_chip(
    table: pd.DataFrame, compute: Callable[[pd.DataFrame, Chip], tuple[Floats, Floats]]
) -> tuple[Floats, Floats, npt.NDArray[np.str_]]:
    """(inputs, base in seconds, device key) of rows, one GPU after the other."""
    inputs: list[Floats] = []
    base = np.empty(len(table))
    for gpu in table.gpu.unique():
        mask = table.gpu.eq(gpu).to_numpy()
        x, base[mask] = compute(table[mask], named_chip(gpu))
        if not inputs:
            inputs.append(np.empty((len(table), x.shape[1])))
        inputs[0][mask] = x
    keys = {gpu: named_chip(gpu).key for gpu in table.gpu.unique()}
    return inputs[0], base, table.gpu.map(keys).to_numpy(dtype=str)


def gemm_family(table: pd.DataFrame, name: str, dtypes: Sequence[str]) -> Family:
    """Products of some data types."""
    rows = table[table.dtype.isin(dtypes) & (table.latency_us > 0)].reset_index(drop=True)

    def compute(part: pd.DataFrame, chip: Chip) -> tuple[Floats, Floats]:
        precision = precision_of(part.dtype.iloc[0])
        element = element_bytes_of(precision)
        shape = part[["batch", "m", "n", "k"]].to_numpy(dtype=np.float64)
        peak = chip.peak(precision)
        base = gemm_base_s(shape, chip, peak, element, exponent=BASE_EXPONENT.get(name, math.inf))
        return gemm_features(shape, chip, peak, element), base

    inputs, base, device = _by_chip(rows, compute)
    latency = rows.latency_us.to_numpy()
    return Family(
        name=name, features=GEMM_FEATURES, inputs=inputs, log_base=np.log(base * 1e6), log_time=np.log(latency),
        weight=_weights(latency, np.ones(len(rows), dtype=np.bool_)) * _balance(device),
        categories={
            "device": device,
            "copies": rows.gpu.map(lambda gpu: copy_engine(named_chip(gpu).architecture)).to_numpy(dtype=str),
            "source": rows.source.map(normal_source).to_numpy(dtype=str),
        },
        base_exponent=BASE_EXPONENT.get(name),
        group=(rows.n * 1_000_003 + rows.k).to_numpy(dtype=np.int64), device=device,
        label=(rows.gpu + " " + rows.dtype).to_numpy(dtype=str),
        big=(2.0 * rows.batch * rows.m * rows.n * rows.k >= 1e11).to_numpy(),
        scored=np.ones(len(rows), dtype=np.bool_),
    )  # fmt: skip


def attention_family(table: pd.DataFrame, seed: int) -> Family:
    """Fused attention: scored rows, and a sample of those with a shorter query."""
    table = table[(table.latency_us > 0) & table["pass"].isin(["fwd", "bwd"])]
    table = table[table.gpu.str.lower().isin(chip_names()) & ~table.dtype.str.contains("?", regex=False)]
    scored = table.seq_q.eq(table.seq_k) & (table.seq_q >= 512)
    rest = table[~scored]
    rows = pd.concat([table[scored], rest.sample(min(60_000, len(rest)), random_state=seed)]).reset_index(drop=True)
    columns = attention_table_columns({name: rows[name].tolist() for name in rows.columns})
    kv = np.array([normal_kv(a, b) for a, b in zip(rows.dtype, rows.kv_dtype.fillna(""), strict=True)])
    inputs = np.empty((len(rows), len(ATTENTION_FEATURES)))
    base = np.empty(len(rows))
    for gpu, dtype, kv_dtype in {*zip(rows.gpu, rows.dtype, kv, strict=True)}:
        mask = (rows.gpu.eq(gpu) & rows.dtype.eq(dtype)).to_numpy() & (kv == kv_dtype)
        chip, precision = named_chip(gpu), precision_of(dtype)
        part = {k: v[mask] for k, v in columns.items()}
        arguments = (
            part,
            chip,
            chip.peak(precision),
            element_bytes_of(precision),
            element_bytes_of(precision_of(kv_dtype)),
        )
        inputs[mask], base[mask] = attention_features(*arguments), attention_base_s(*arguments)
    keys = {gpu: named_chip(gpu).key for gpu in rows.gpu.unique()}
    device = rows.gpu.map(keys).to_numpy(dtype=str)
    latency = rows.latency_us.to_numpy()
    is_scored = (rows.seq_q.eq(rows.seq_k) & (rows.seq_q >= 512)).to_numpy()
    backward = rows["pass"].eq("bwd").to_numpy()
    few = rows.source.str.contains("cudnn-frontend").to_numpy()
    group = rows.batch * 1_000_003 + rows.heads * 1009 + rows.kv_heads
    group = group + few * (rows.seq_q * 7_000_003 + rows.causal)  # five models in all: hold back their sequences
    weight = _weights(latency, is_scored) * np.where(few, RARE_WEIGHT, 1.0)
    return Family(
        name="attention", features=ATTENTION_FEATURES, inputs=inputs, log_base=np.log(base * 1e6),
        log_time=np.log(latency), weight=np.asarray(weight),
        categories={
            "device": device,
            "matrix": rows.gpu.map(lambda gpu: matrix_instructions(named_chip(gpu).architecture)).to_numpy(dtype=str),
            "kernel": np.array([re.sub(r"-(det|swa\d+)", "", k) for k in rows.kernel]),
            "family": np.array([kernel_family(k) for k in rows.kernel]),
            "source": rows.source.map(normal_source).to_numpy(dtype=str),
            "dtype": np.array([f"{a}/{b}" for a, b in zip(rows.dtype, kv, strict=True)]),
        },
        group=group.to_numpy(dtype=np.int64), device=device,
        label=np.where(
            backward, "backward " + rows.gpu, rows.gpu + " " + rows.dtype + " " + rows.kv_dtype.fillna("-")
        ).astype(str),
        big=(columns["batch"] * columns["heads"] * columns["seq_q"] * columns["seq_k"] * columns["head_dim"] >= 1e11),
        scored=is_scored | backward,
    )  # fmt: skip


def stream_family(table: pd.DataFrame) -> Family:
    """Norm, elementwise and quantising kernels."""
    rows = table[(table.latency_us > 0) & ~table.kernel.fillna("").str.contains("minus_static")].reset_index(drop=True)

    def compute(part: pd.DataFrame, chip: Chip) -> tuple[Floats, Floats]:
        rows, columns, moved = (part[c].to_numpy(dtype=np.float64) for c in ("rows", "cols", "approx_bytes"))
        backward = part["pass"].eq("bwd").astype(float).to_numpy(dtype=np.float64)
        return stream_features(rows, columns, moved, np.asarray(backward, dtype=np.float64), chip), stream_base_s(
            moved, chip
        )

    inputs, base, device = _by_chip(rows, compute)
    latency = rows.latency_us.to_numpy()
    return Family(
        name="stream", features=STREAM_FEATURES, inputs=inputs, log_base=np.log(base * 1e6), log_time=np.log(latency),
        weight=_weights(latency, np.ones(len(rows), dtype=np.bool_))
        * np.where(rows.source.str.contains("cudnn-frontend"), RARE_WEIGHT, 1.0),
        categories={
            "device": device,
            "op": rows.op.to_numpy(dtype=str),
            "kernel": rows.kernel.to_numpy(dtype=str),
        },
        group=(rows.rows * 1_000_003 + rows.cols).to_numpy(dtype=np.int64), device=device,
        label=(rows.gpu + " " + rows.dtype).to_numpy(dtype=str), big=(rows.approx_bytes > 1e8).to_numpy(),
        scored=np.ones(len(rows), dtype=np.bool_),
    )  # fmt: skip


def read_rows(path: Path) -> pd.DataFrame:
    """A table of kernels, each row under the name of the card that ran it."""
    table = pd.read_csv(path, low_memory=False)
    known = table[["gpu", "source"]].drop_duplicates().itertuples(index=False)
    for gpu, source in list(known):
        card = card_of(gpu, normal_source(source))
        if card != gpu:
            table.loc[table.gpu.eq(gpu) & table.source.eq(source), "gpu"] = card
    return table


def families(data: Path, seed: int, names: Sequence[str]) -> list[Family]:
    """The families of `names`, from the tables in `data`."""
    gemm = read_rows(data / "gemm.csv.gz")
    made: dict[str, Callable[[], Family]] = {
        "gemm_half": lambda: gemm_family(gemm, "gemm_half", ["bfloat16", "float16"]),
        "gemm_fp8": lambda: gemm_family(gemm, "gemm_fp8", ["fp8"]),
        "gemm_nvfp4": lambda: gemm_family(gemm, "gemm_nvfp4", ["nvfp4"]),
        "gemm_fp32": lambda: gemm_family(gemm, "gemm_fp32", ["float32"]),
        "attention": lambda: attention_family(read_rows(data / "attention.csv.gz"), seed),
        "stream": lambda: stream_family(read_rows(data / "elementwise_norm.csv.gz")),
    }
    return [made[name]() for name in names]
