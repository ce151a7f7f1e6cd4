"""Fit the learned residuals of kernel times (echo_explore/compute/network.py); used by scripts/fit_compute.py.

Every family is fitted three times: without a fifth of the shapes, for its errors; on all rows, to be shipped; and
without knowing the device, for GPUs that no table has. Rows of one (n, k), or of one (batch, heads, kv_heads), stay
together. A category is replaced by `*` in a fifth of the draws, so that `field:*` learns the middle of the tables.
"""

import argparse
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from echo_explore.compute.learned import LIKE
from scripts.kernel_families import SMALL_US, Family, families

Floats = npt.NDArray[np.float64]
WIDTH = 64
GENERIC_WIDTH = 24
WIDTHS = {"attention": 96, "gemm_fp32": 96}
GENERATION = ("copies", "matrix")
"""Categories that stand for the device where it is not known."""


@dataclass(kw_only=True)
class Fit:
    """A fitted network as arrays, and how it does."""

    network: dict[str, Any]
    predict: Callable[[npt.NDArray[np.intp]], Floats]


class _Net(torch.nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(inputs, width)
        self.second = torch.nn.Linear(width, width)
        self.third = torch.nn.Linear(width, 1)
        torch.nn.init.zeros_(self.third.weight)
        torch.nn.init.zeros_(self.third.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.first(x))
        hidden = torch.nn.functional.silu(self.second(hidden))
        out: torch.Tensor = self.third(hidden).squeeze(1)
        return out


def fit_network(
    family: Family, rows: npt.NDArray[np.intp], *, device_known: bool, epochs: int, width: int, seed: int,
    decay: float = 1e-4,
) -> Fit:  # fmt: skip
    """Fit on `rows`; `predict` of the result gives log microseconds of any rows of the family."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    fields = [f for f in family.categories if f not in (GENERATION if device_known else ("device",))]
    names = [f"{f}:{v}" for f in fields for v in ("*", *np.unique(family.categories[f]))]
    names = [n for n in names if n != "device:*"]
    position = {n: i for i, n in enumerate(names)}
    codes = np.column_stack(
        [np.array([position[f"{f}:{v}"] for v in family.categories[f]]) for f in fields]
        or [np.zeros((len(family.device), 0), dtype=np.int64)]
    )
    stars = [position.get(f"{f}:*", -1) for f in fields]
    x = family.inputs[rows]
    low, high = x.min(axis=0), x.max(axis=0)
    mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-3)
    scaled = torch.tensor((np.clip(family.inputs, low, high) - mean) / scale, dtype=torch.float32)
    target = torch.tensor(family.log_time - family.log_base, dtype=torch.float32)
    residual = (family.log_time - family.log_base)[rows]
    limits = np.quantile(residual[family.weight[rows] >= 0.5], [0.0005, 0.9995])
    weight = torch.tensor(family.weight, dtype=torch.float32)
    net = _Net(x.shape[1] + len(names), width)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=decay)
    size = 2048 if len(rows) > 20_000 else 512
    steps = epochs * max(1, len(rows) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps + 1, pct_start=0.1)
    for _ in range(epochs):
        order = rng.permutation(rows)
        for start in range(0, max(1, len(order) // size) * size, size):
            batch = order[start : start + size]
            chosen = codes[batch].copy()
            for column, star in enumerate(stars):
                if star >= 0:
                    chosen[rng.random(len(batch)) < 0.2, column] = star
            hot = torch.zeros((len(batch), len(names)))
            hot[np.arange(len(batch))[:, None], chosen] = 1.0
            out = net(torch.cat([scaled[batch], hot], dim=1))
            error = torch.nn.functional.smooth_l1_loss(out, target[batch], beta=0.03, reduction="none")
            loss = (error * weight[batch]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

    def predict(which: npt.NDArray[np.intp]) -> Floats:
        parts = []
        with torch.no_grad():
            for chunk in np.array_split(which, max(1, len(which) // 20_000)):
                hot = torch.zeros((len(chunk), len(names)))
                hot[np.arange(len(chunk))[:, None], codes[chunk]] = 1.0
                parts.append(net(torch.cat([scaled[chunk], hot], dim=1)).numpy())
        return np.asarray(np.clip(np.concatenate(parts), *limits) + family.log_base[which], dtype=np.float64)

    state = {k: v.detach().numpy() for k, v in net.state_dict().items()}
    network = {
        "width": width,
        "features": list(family.features),
        "categories": names,
        "low": low, "high": high, "mean": mean, "scale": scale,
        "first": state["first.weight"].T, "first_bias": state["first.bias"],
        "second": state["second.weight"].T, "second_bias": state["second.bias"],
        "third": state["third.weight"][0], "third_bias": float(state["third.bias"][0]),
        "residual_low": float(limits[0]), "residual_high": float(limits[1]),
    }  # fmt: skip
    return Fit(network=network, predict=predict)


def spread(log: Floats) -> float:
    """Standard deviation of the middle and of the 80 % interval of log errors, the larger."""
    middle = 1.4826 * float(np.median(np.abs(log - np.median(log))))
    return max(middle, float(np.percentile(np.abs(log), 80)) / 1.2816, 0.03)


def report(family: Family, rows: npt.NDArray[np.intp], log_predicted: Floats) -> pd.DataFrame:
    """Errors by label on the rows of at least 10 us that the yardstick scores."""
    ratio = np.exp(log_predicted - family.log_time[rows])
    keep = (np.exp(family.log_time[rows]) >= SMALL_US) & family.scored[rows]
    table = pd.DataFrame(
        {"label": family.label[rows], "error": np.abs(ratio - 1), "signed": ratio - 1, "big": family.big[rows]}
    )[keep]
    grouped = table.groupby("label")
    out = grouped.agg(
        rows=("error", "size"), median=("error", "median"), mean=("error", "mean"),
        p90=("error", lambda e: e.quantile(0.9)), bias=("signed", "median"),
    )  # fmt: skip
    out["big"] = table[table.big].groupby("label").error.mean()
    return out


def held_back(family: Family, seed: int) -> npt.NDArray[np.bool_]:
    """(num_rows,) a fifth of the groups."""
    groups = np.random.default_rng(seed).permutation(np.unique(family.group))
    return np.isin(family.group, groups[: len(groups) // 5])


LEFT_OUT = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "gb200", "gb300")
"""Devices that are left out one by one, of products in 16 bits and attention, to see how far the networks carry."""
EPOCHS = {"gemm_half": 40, "gemm_fp8": 40, "gemm_nvfp4": 40, "gemm_fp32": 120, "attention": 45, "stream": 60}
SOURCES = "aiconfigurator-core 0.12.0 (Apache-2.0), vidur (MIT), NeuSight (MIT), cudnn-frontend benchmarks (MIT)"


def _text(values: Floats) -> str:
    rows = np.atleast_2d(values)
    return "'''\n" + "\n".join(" ".join(f"{v:.4g}" for v in row) for row in rows) + "'''"


def network_toml(name: str, network: Mapping[str, Any], facts: Mapping[str, Any], sigma: Mapping[str, float]) -> str:
    """One network as text."""
    lines = [f"[network.{name}]"]
    lines += [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in facts.items()]
    for key, value in network.items():
        if isinstance(value, np.ndarray):
            lines.append(f"{key} = {_text(value)}")
        elif isinstance(value, list):
            lines.append(f"{key} = [" + ", ".join(f'"{v}"' if isinstance(v, str) else f"{v:.4g}" for v in value) + "]")
        elif isinstance(value, dict):
            lines.append(f"{key} = {{ " + ", ".join(f'"{k}" = {v}' for k, v in value.items()) + " }")
        else:
            lines.append(f"{key} = {value:.6g}")
    lines.append("sigma_log = { " + ", ".join(f'"{k}" = {v:.3g}' for k, v in sigma.items()) + " }")
    return "\n".join(lines) + "\n"


def _lines(table: pd.DataFrame, what: str) -> list[str]:
    out = []
    for label, row in table.iterrows():
        cells = [f"{row[c] * 100:{'+' if c == 'bias' else ''}.1f} %" for c in ("median", "mean", "p90", "bias")]
        cells.append("" if np.isnan(row["big"]) else f"{row['big'] * 100:.1f} %")
        out.append(f"| {what} {label} | {row['rows']:.0f} | " + " | ".join(cells) + " |")
    out.append(f"| {what}, mean over groups | {table.rows.sum():.0f} | | {table['mean'].mean() * 100:.1f} % | | | |")
    return out


def fit_family(family: Family, seed: int, *, trial_only: bool = False) -> tuple[str, list[str]]:
    """The shipped text of a family's two networks, and the lines of its report."""
    held = held_back(family, seed)
    everything = np.arange(len(held))
    epochs = EPOCHS[family.name]
    trial = fit_network(
        family, everything[~held], device_known=True, epochs=epochs, width=WIDTHS.get(family.name, WIDTH), seed=seed
    )
    log = trial.predict(everything[held])
    table = report(family, everything[held], log)
    lines = _lines(table, family.name)
    if trial_only:
        return "", lines
    error = family.log_time[held] - log
    keep = (np.exp(family.log_time[held]) >= SMALL_US) & family.scored[held]
    devices = family.device[held]
    sigma = {d: spread(error[keep & (devices == d)]) for d in np.unique(devices[keep])}
    sigma["*"] = max(sigma.values())
    shipped = fit_network(
        family, everything, device_known=True, epochs=epochs, width=WIDTHS.get(family.name, WIDTH), seed=seed
    )
    away = []
    for device in LEFT_OUT if family.name in ("gemm_half", "attention") else ():
        # The same silicon in another housing goes with it.
        rest = everything[~np.isin(family.device, [device, *LIKE.get(device, ())])]
        fit = fit_generic(family, rest, seed)
        gone = everything[family.device == device]
        table = report(family, gone, fit.predict(gone))
        lines += _lines(table, f"{family.name}, this GPU left out:")
        away.append(float(table["mean"].mean()))
    generic = fit_generic(family, everything, seed)
    today = datetime.date.today().isoformat()
    facts = {"source": SOURCES, "fitted_on": today, "num_rows": len(everything), "held_back": int(held.sum())}
    wide = {"*": max([1.3 * a for a in away], default=1.5 * sigma["*"])}
    for fit in (shipped, generic):
        if family.base_exponent is not None:
            fit.network["base_exponent"] = family.base_exponent
    if family.name == "gemm_half":
        shipped.network |= ceiling(family)
        generic.network |= ceiling(family)
    text = network_toml(family.name, shipped.network, facts, sigma)
    return text + "\n" + network_toml(f"{family.name}_generic", generic.network, facts, wide), lines


CEILING_BASES_US = (2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0, 200.0, 1000.0)
"""Knots of the largest residual; below the first and beyond the last it is constant."""


def ceiling(family: Family) -> dict[str, Any]:
    """Largest residual by device and base: the 99th percentile near each knot, so that base e^ceiling never falls."""
    knots = np.log(CEILING_BASES_US)
    edges = np.concatenate([[-np.inf], knots, [np.inf]])
    found: dict[str, list[float]] = {}
    for device in np.unique(family.device):
        mine = family.device == device
        base, residual = family.log_base[mine], (family.log_time - family.log_base)[mine]
        between = [residual[(base >= a) & (base < b)] for a, b in pairwise(edges)]
        tops = [float(np.quantile(r, 0.99)) if r.size > 20 else -np.inf for r in between]
        high = np.array([max(pair) for pair in pairwise(tops)])
        high = np.where(np.isfinite(high), high, np.max(high))
        for i in range(1, len(high)):
            high[i] = max(high[i], high[i - 1] - (knots[i] - knots[i - 1]))
        found[str(device)] = [round(float(h), 3) for h in high]
    found["*"] = np.max(list(found.values()), axis=0).tolist()
    return {"ceiling_base_us": list(CEILING_BASES_US), "ceiling": found}


def fit_generic(family: Family, rows: npt.NDArray[np.intp], seed: int) -> Fit:
    """A small network that does not know the device, from as many rows of each."""
    rng = np.random.default_rng(seed)
    devices = np.unique(family.device[rows])
    each = 15_000
    parts = [rng.permutation(rows[family.device[rows] == d])[:each] for d in devices]
    return fit_network(
        family, np.concatenate(parts), device_known=False, epochs=10, width=GENERIC_WIDTH, seed=seed, decay=1e-3
    )


def write_networks(
    data: Path, out: Path, names: Sequence[str] = tuple(EPOCHS), seed: int = 0, *, trial_only: bool = False
) -> list[str]:
    """Fit families, write one file each into `out`, and give the lines of the report."""
    torch.set_num_threads(1)
    lines: list[str] = []
    for family in families(data, seed, names):
        start = time.perf_counter()
        text, told = fit_family(family, seed, trial_only=trial_only)
        head = "# Learned residual of kernel times. Written by scripts/kernel_networks.py; see docs/compute_model.md.\n"
        if text:
            (out / f"{family.name}.toml").write_text(f"{head}schema = 1\n\n{text}", encoding="utf-8")
        lines += told
        print("\n".join(told), f"\n{family.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return lines


def main() -> None:
    """Fit the families asked for and write one file each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    shipped = Path(__file__).resolve().parent.parent / "echo_explore/_shipped/kernels"
    parser.add_argument("--out", type=Path, default=shipped)
    parser.add_argument("--families", default=",".join(EPOCHS))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trial", action="store_true", help="fit without the held-back shapes and report, write nothing"
    )
    args = parser.parse_args()
    lines = write_networks(args.data, args.out, args.families.split(","), args.seed, trial_only=args.trial)
    if args.report:
        args.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
