"""Print the table of errors of kernels for docs/accuracy.md: python -m scripts.kernel_table --data DIR --report FILE.

Held back and left out come from the report of the fits (`python -m scripts.kernel_networks --data DIR --report FILE`);
as shipped are the shipped networks on the same tables. Means over groups (GPU and data type) of a mean absolute error,
over rows of 10 us and more that the yardstick scores.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from echo_explore.compute import shipped_calibration
from echo_explore.compute.kernel_table import KernelTable, Kind
from echo_explore.compute.table_times import table_times

SMALL_US = 10.0
KINDS: Mapping[str, tuple[str, str, str, str]] = {
    # kind: what it is called, family of the report, asked of held-back shapes, asked with a GPU left out
    "half": ("GEMM bf16, fp16", "gemm_half", "6 %, no group above 9 %", "12 % in bf16"),
    "fp8": ("GEMM fp8 with its cast", "gemm_fp8", "8 %, B200 12 %", ""),
    "nvfp4": ("GEMM nvfp4 with its cast", "gemm_nvfp4", "9 %", ""),
    "fp32": ("GEMM fp32, CUDA cores", "gemm_fp32", "9 %", ""),
    "forward": ("attention forward", "attention", "6 %", "18 %"),
    "backward": ("attention backward (cuDNN)", "attention backward", "15 %", ""),
    "stream": ("norm, elementwise, quantise", "stream", "10 %", ""),
}
LINE = re.compile(r"^\| (?P<family>[a-z_0-9]+)(?P<left>, this GPU left out:)? (?P<label>[^|,]+) \| (?P<rows>\d+) \|"
                  r" [^|]+ \| (?P<mean>[0-9.]+) % \|")  # fmt: skip
"""One group of a report; lines of means over groups do not match."""


def reported(text: str) -> pd.DataFrame:
    """Groups of a report: family, left (a GPU left out), gpu, group, rows, mean error."""
    found = []
    for line in text.splitlines():
        if (match := LINE.match(line)) is None:
            continue
        words = match["label"].split()
        backward = words[0] == "backward"
        family = match["family"] + " backward" * backward
        gpu = words[backward]
        dtype = "" if backward or match["family"] == "stream" else words[1]
        group = " ".join(words) if match["family"] == "stream" else f"{gpu} {dtype}".strip()
        left = match["left"] is not None
        found.append((family, left, gpu, group, int(match["rows"]), float(match["mean"]) / 100.0))
    table = pd.DataFrame(found, columns=["family", "left", "gpu", "group", "rows", "mean"])
    table["sum"] = table["rows"] * table["mean"]  # attention is reported by type of keys too: one group a data type
    out = table.groupby(["family", "left", "gpu", "group"], as_index=False)[["rows", "sum"]].sum()
    out["mean"] = out["sum"] / out["rows"]
    return out


def shipped_errors(table: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """(gpu, dtype, rows, mean) of the shipped model on a table."""
    cells = {
        name: table[name].astype(object).where(table[name].notna(), "").astype(str).tolist() for name in table.columns
    }
    times = table_times(KernelTable(name=kind, kind=kind, columns=cells), shipped_calibration())
    if times.reason:
        raise SystemExit(f"{len(times.reason)} rows have no price: {next(iter(times.reason.values()))}")
    error = np.abs(times.predicted_s * 1e6 / table.latency_us.to_numpy() - 1.0)
    grouped = table.assign(error=error).groupby(["gpu", "dtype"]).error
    return grouped.agg(rows="size", mean="mean").reset_index()


def as_shipped(data: Path) -> dict[str, pd.DataFrame]:
    """Errors by group of each kind of kernel."""
    gemm = pd.read_csv(data / "gemm.csv.gz")
    gemm = gemm[(gemm.latency_us >= SMALL_US) & ~gemm.dtype.str.contains("?", regex=False)]
    attention = pd.read_csv(data / "attention.csv.gz", low_memory=False)
    attention = attention[(attention.latency_us >= SMALL_US) & ~attention.dtype.str.contains("?", regex=False)]
    forward = attention[attention["pass"].eq("fwd") & attention.seq_q.eq(attention.seq_k) & (attention.seq_q >= 512)]
    stream = pd.read_csv(data / "elementwise_norm.csv.gz", low_memory=False)
    stream = stream[(stream.latency_us >= SMALL_US) & ~stream.kernel.fillna("").str.contains("minus_static")]
    stream = stream[~stream.dtype.str.contains("?", regex=False)]
    return {
        "half": shipped_errors(gemm[gemm.dtype.isin(["bfloat16", "float16"])], "gemm"),
        "fp8": shipped_errors(gemm[gemm.dtype.eq("fp8")], "gemm"),
        "nvfp4": shipped_errors(gemm[gemm.dtype.eq("nvfp4")], "gemm"),
        "fp32": shipped_errors(gemm[gemm.dtype.eq("float32")], "gemm"),
        "forward": shipped_errors(forward, "attention"),
        "backward": shipped_errors(attention[attention["pass"].eq("bwd")], "attention"),
        "stream": shipped_errors(stream, "elementwise"),
    }


def line(kind: str, groups: pd.DataFrame, shipped: pd.DataFrame) -> str:
    """One row of the table."""
    name, family, asked, asked_left = KINDS[kind]
    mine = groups[groups.family.eq(family)]
    held, left = mine[~mine.left], mine[mine.left]
    cells = [name, asked]
    if held.empty:
        cells += ["not run", ""]
    else:
        worst, where = max(zip(held["mean"].tolist(), held["group"].tolist(), strict=True))
        cells += [f"{held['mean'].mean():.1%}", f"{worst:.1%} ({where})"]
    cells.append(f"{shipped['mean'].mean():.1%}")
    by_gpu = left.groupby("group")["mean"].mean()
    cells += [asked_left, ", ".join(f"{group} {mean:.1%}" for group, mean in by_gpu.items()) or "not run"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Read the report, price the tables and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True, nargs="+")
    args = parser.parse_args()
    groups = reported("\n".join(path.read_text(encoding="utf-8") for path in args.report))
    shipped = as_shipped(args.data)
    print("| kernels | asked | held back | worst group held back | as shipped | GPU left out: asked | reached |")
    print("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        print(line(kind, groups, shipped[kind]))
    for kind, table in shipped.items():
        worst = table.sort_values("mean", ascending=False).head(3)
        told = ", ".join(f"{row.gpu} {row.dtype} {row.mean:.1%} ({row.rows})" for row in worst.itertuples(name="Row"))
        print(f"as shipped, largest of {KINDS[kind][0]}: {told}")


if __name__ == "__main__":
    main()
