"""Fit the coefficients of collectives to measured times and write them as a calibration file.

Usage: fit_collectives.py --data DIR [--out FILE] [--folds K [--fold I] [--seed N]]

DIR holds kernels/collectives.csv.gz (columns: docs/collectives.md). Each scale-up fabric is fitted to its rows inside
one domain, then each network to its rows over several nodes with the scale-up coefficients held; frameworks' own
kernels last. --folds K parts the curves (gpu, fabric, collective, dtype, GPUs, nodes, library, tool) of every gpu,
fabric and collective into K parts, leaves each in turn out of the fit and scores all rows as predicted by the fit that
did not see their curve; --fold I does one part only. What is written is coefficients only.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from echo_explore.calibration.collective_fit import (
    Samples,
    errors,
    fit_custom,
    fit_network,
    fit_scale_up,
    spread,
    with_span,
)
from echo_explore.calibration.collective_vectors import START_NETWORK, start_scale_up
from echo_explore.calibration.comm_toml import alias_table, custom_table, network_table, scale_up_table, tool_table
from echo_explore.comm.choice import Capabilities
from echo_explore.comm.coefficients import (
    CommCoefficients,
    NetworkCoefficients,
    OneShotCosts,
    RingCosts,
    ScaleUpCoefficients,
    Triple,
)
from echo_explore.comm.custom import OWN_BYTES, SWITCH_BYTES, framework_of
from echo_explore.comm.libraries import LIBRARIES
from echo_explore.comm.model import HierarchicalModel
from echo_explore.validation.collective_rows import COLLECTIVES
from echo_explore.validation.collectives import (
    library_name,
    nccl_s,
    predict_rows,
    ranks_per_node,
    score_collectives,
    tool_constants,
)
from echo_explore.validation.fabrics import FABRICS, MeasuredFabric, fabric_of, links_of_fabric

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.collective_rows import Row, folds, read_rows, thinned, worst_curves, write_rows
from scripts.collective_sources import (
    ALIASES,
    BASES,
    DEFAULT_SIGMA,
    EFA_STEPS,
    HEADER,
    NETWORK_BASES,
    NETWORK_STARTS,
    OF_LIBRARY,
    OF_LIBRARY_SOURCE,
    RING_SHARE,
    SIMPLE_ONLY,
    SOURCES,
    TOOL_SOURCES,
    TOOLS,
    published_rows,
)
from scripts.exchange_tables import exchange_tables, left_out_errors, read_exchanges


def make_samples(
    rows: Iterable[Row], fabric: MeasuredFabric, *, inside: bool, spans: bool, domain: int
) -> list[tuple[Samples, Capabilities]]:
    """Medians of rows that agree in all that the model knows, by kind and library."""
    grouped: dict[tuple[str, str], dict[tuple[float, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    nothing = CommCoefficients(scale_up={}, network={}, tools=TOOLS)
    for row in rows:
        n, nodes = float(row["num_gpus"]), float(row["nodes"])
        per_node = float(ranks_per_node(np.array([n]), np.array([nodes]), domain, spans=spans)[0])
        if (per_node >= n) != inside:
            continue
        tool = tool_constants(nothing, row["tool"], row["gpu"], row["collective"])
        key = (n, per_node, float(row["size_bytes"]), float(row["dtype"] in ("int8", "uint8")))
        library = library_name(row["lib"])
        able = library if library == "oneccl" else "nccl-2.27"
        grouped[row["collective"], able][*key, tool.launch_s, tool.floor_s].append(float(row["latency_us"]) * 1e-6)
    found = []
    for (collective, library), cells in sorted(grouped.items()):
        kept, stride = thinned(list(cells))
        columns = np.array(kept).T
        times = [float(np.exp(np.median(np.log(cells[key])))) for key in kept]
        samples = Samples(
            kind=COLLECTIVES[collective],
            num_ranks=columns[0],
            ranks_per_node=columns[1],
            size=columns[2],
            narrow=columns[3] > 0,
            launch_s=columns[4],
            floor_s=columns[5],
            time_s=np.array(times),
            weight=np.array([float(len(cells[key])) * stride[key[:2]] for key in kept]),
        )
        found.append((samples, LIBRARIES[library].able))
    return found


def start_of(key: str, found: Mapping[str, ScaleUpCoefficients]) -> ScaleUpCoefficients:
    """The coefficients that a fabric's fit starts from."""
    base = found.get(BASES.get(key, ""), start_scale_up(key))
    return replace(base, key=key, ring_share=RING_SHARE.get(key, {}), sigma_log=DEFAULT_SIGMA)


def fit_all(rows: Sequence[Row], num_starts: int) -> tuple[CommCoefficients, dict[str, int]]:
    """Coefficients of every fabric and network, and the number of rows that each was fitted to."""
    rows = [*rows, *published_rows()]
    by_fabric: dict[MeasuredFabric, list[Row]] = defaultdict(list)
    customs: dict[tuple[str, MeasuredFabric], list[Row]] = defaultdict(list)
    for row in rows:
        fabric = fabric_of(row["gpu"], row["fabric"])
        if fabric is None:
            continue
        if row["algo"] == "auto":
            by_fabric[fabric].append(row)
        elif row["algo"].startswith("custom"):
            framework = framework_of(row["algo"], row["lib"])
            if framework is not None:
                customs[framework, fabric].append(row)
    scale_up: dict[str, ScaleUpCoefficients] = {}
    network: dict[str, NetworkCoefficients] = {"default": replace(START_NETWORK, key="default")}
    counts: dict[str, int] = {}
    keys = sorted({f.scale_up for f in FABRICS}, key=lambda key: (key in BASES, BASES.get(key, "") in BASES, key))
    for key in keys:
        fabrics = [f for f in FABRICS if f.scale_up == key]
        scale_up[key] = start_of(key, scale_up)
        links = links_of_fabric(
            replace(fabrics[0], network="default"), CommCoefficients(scale_up=scale_up, network=network)
        )
        samples = [
            s
            for f in fabrics
            for s in make_samples(by_fabric[f], f, inside=True, spans=links.domain_hosts > 1, domain=links.domain_gpus)
        ]
        if samples:
            informed = key in BASES and BASES[key] in counts
            fitted = fit_scale_up(samples, links, num_starts=num_starts, informed=informed)
            final = [(errors(s, replace(links, scale_up=fitted), able), s) for s, able in samples]
            scale_up[key] = replace(fitted, sigma_log=_spread(final))
            counts[key] = int(sum(s.weight.sum() for s, _ in samples))
            _report(key, final)
    names = {f.network for f in FABRICS}
    for key in [name for name in ("infiniband-ampere", *NETWORK_BASES) if name in names]:
        _fit_one_network(key, by_fabric, scale_up, network, counts, num_starts)
    custom = _fit_customs(customs, CommCoefficients(scale_up=scale_up, network=network), counts)
    return CommCoefficients(scale_up=scale_up, network=network, custom=custom, tools=TOOLS), counts


def _fit_customs(
    customs: Mapping[tuple[str, MeasuredFabric], list[Row]], found: CommCoefficients, counts: dict[str, int]
) -> dict[str, OneShotCosts]:
    """Constants of each framework on all fabrics together (`default`), then near those on each by itself."""
    custom: dict[str, OneShotCosts] = {}
    for framework in sorted({name for name, _ in customs}):
        parts = {f: _custom_columns(f, rows, found) for (name, f), rows in customs.items() if name == framework}
        joined = np.concatenate(list(parts.values()), axis=1)
        base = _fit_custom(joined, 64, None, None)
        custom[f"{framework}/default"] = base
        counts[f"{framework}/default"] = joined.shape[1]
        for fabric, columns in sorted(parts.items(), key=lambda item: item[0].scale_up):
            architecture = "blackwell" if fabric.gpu.startswith(("B", "GB")) else "hopper"
            limited = framework == "vllm" and fabric.gpu.startswith(("B2", "GB", "H1", "H2"))
            limits = (OWN_BYTES[architecture], SWITCH_BYTES[architecture]) if limited else None
            name = f"{framework}/{fabric.scale_up}"
            custom[name] = _fit_custom(columns, 2 if fabric.scale_up.startswith("pcie") else 64, limits, base)
            counts[name] = columns.shape[1]
            print(f"{name}: {columns.shape[1]} rows, sigma {custom[name].sigma_log}", flush=True)
    return custom


def _custom_columns(fabric: MeasuredFabric, rows: Sequence[Row], found: CommCoefficients) -> np.ndarray:
    """Ranks, bytes, eager, seconds, NCCL's seconds, link bandwidth; (6, num_rows)."""
    links = links_of_fabric(replace(fabric, network="default"), found)
    ranks, size = (np.array([float(r[name]) for r in rows]) for name in ("num_gpus", "size_bytes"))
    eager = np.array([float("eager" in r["algo"]) for r in rows])
    seconds = np.array([float(r["latency_us"]) * 1e-6 for r in rows])
    nccl = nccl_s(ranks, size, links, HierarchicalModel(coefficients=found))
    return np.array([ranks, size, eager, seconds, nccl, np.full(len(rows), links.scale_up_bytes_per_s)])


def _fit_custom(
    columns: np.ndarray, most_ranks: int, limits: tuple[Triple, Triple] | None, base: OneShotCosts | None
) -> OneShotCosts:
    ranks, size, eager, seconds, nccl, link = columns
    return fit_custom(
        ranks, size, eager > 0, seconds, nccl, link_bytes_per_s=link, most_ranks=most_ranks, limits=limits, base=base
    )


def _fit_one_network(
    key: str,
    by_fabric: Mapping[MeasuredFabric, list[Row]],
    scale_up: dict[str, ScaleUpCoefficients],
    network: dict[str, NetworkCoefficients],
    counts: dict[str, int],
    num_starts: int,
) -> None:
    for fabric in (f for f in FABRICS if f.network == key):
        base = network.get(NETWORK_BASES.get(key, ""))
        network.setdefault(key, replace(base or START_NETWORK, key=key))
        links = links_of_fabric(fabric, CommCoefficients(scale_up=scale_up, network=network))
        start = replace(base or network[key], key=key)
        if key.startswith("efa") and not NETWORK_BASES[key].startswith("efa"):
            start = replace(start, hop_factor=EFA_STEPS, simple_only=key in SIMPLE_ONLY)
        if f"network.{key}" not in counts:
            network[key] = start
        samples = make_samples(
            by_fabric.get(fabric, []), fabric, inside=False, spans=links.domain_hosts > 1, domain=links.domain_gpus
        )
        if not samples or f"network.{key}" in counts:
            continue
        counts[f"network.{key}"] = int(sum(s.weight.sum() for s, _ in samples))
        fit = fit_network(
            samples,
            replace(links, network=start),
            num_starts=max(num_starts, NETWORK_STARTS),
            hold_tree=not key.startswith("infiniband"),
            informed=f"network.{NETWORK_BASES.get(key)}" in counts,
        )
        if key.startswith("infiniband"):
            for name in [n for n in scale_up if n == fabric.scale_up or BASES.get(n) == fabric.scale_up]:
                scale_up[name] = replace(scale_up[name], tree_efficiency=fit.tree_efficiency)
        fitted = replace(links, network=fit.network, scale_up=scale_up[fabric.scale_up])
        final = [(errors(s, fitted, able), s) for s, able in samples]
        network[key] = with_span(replace(fit.network, sigma_log=_spread(final)), [s for s, _ in samples])
        _report(f"network.{key}", final)


def _spread(final: Sequence[tuple[np.ndarray, Samples]]) -> tuple[float, float, float]:
    found = np.concatenate([e for e, _ in final])
    return spread(found, np.concatenate([s.size for _, s in final]), np.concatenate([s.weight for _, s in final]))


def _report(key: str, final: Sequence[tuple[np.ndarray, Samples]]) -> None:
    for found, samples in final:
        mean = np.average(np.abs(np.expm1(found)), weights=samples.weight)
        print(f"{key:26s} {samples.kind.name:15s} {int(samples.weight.sum()):6d} rows, mean {mean:6.1%}", flush=True)


def default_scale_up(found: Mapping[str, ScaleUpCoefficients]) -> ScaleUpCoefficients:
    """For fabrics that were not measured: geometric means of A100, H100 and B200, without their tuners' errors."""
    from echo_explore.calibration import collective_vectors as v

    all_of = [found[other] for name, other in ALIASES if name.startswith("scale_up")]
    plain = start_scale_up("default")

    def ring(name: str) -> RingCosts:
        mean = v.ring_from(np.mean([v.ring_vector(getattr(f, name)) for f in all_of], axis=0))
        return replace(mean, tuner=plain.all_reduce.tuner)

    return replace(
        plain,
        all_reduce=ring("all_reduce"),
        all_gather=ring("all_gather"),
        reduce_scatter=ring("reduce_scatter"),
        all_to_all=v.pair_from(np.mean([v.pair_vector(f.all_to_all) for f in all_of], axis=0)),
        send=v.pair_from(np.mean([v.pair_vector(f.send) for f in all_of], axis=0)),
        switch=v.switch_from(np.mean([v.switch_vector(f.switch) for f in all_of[1:]], axis=0)),
        tree_efficiency=float(np.exp(np.mean([np.log(f.tree_efficiency) for f in all_of]))),
        sigma_log=DEFAULT_SIGMA,
    )


def write(path: Path, c: CommCoefficients, counts: Mapping[str, int], exchanges: str, date: str, seed: int) -> None:
    """The calibration file."""
    text = HEADER.format(date=date, seed=seed)
    for name, tool in c.tools.items():
        text += tool_table(tool, TOOL_SOURCES[name])
    for key, scale_up in c.scale_up.items():
        text += scale_up_table(scale_up, f"{SOURCES.get(key, key)}; {counts.get(key, 0)} rows, {date}")
    unmeasured = "Fabrics that were not measured: geometric means of A100, H100, B200, wider spread (judged)"
    text += scale_up_table(default_scale_up(c.scale_up), unmeasured)
    for key, network in c.network.items():
        if f"network.{key}" in counts:
            text += network_table(network, f"{SOURCES.get(key, key)}; {counts[f'network.{key}']} rows, {date}")
    for key, (base, step_s, sigma) in OF_LIBRARY.items():
        old = replace(
            c.network[base], key=key, ring_step_s=step_s, sigma_log=(sigma, sigma, sigma), unmeasured_sigma_log=sigma
        )
        text += network_table(old, OF_LIBRARY_SOURCE)
    other = replace(
        c.network["infiniband-ampere"], key="default", sigma_log=DEFAULT_SIGMA, unmeasured_sigma_log=0.5,
        measured_bytes=(0.0, math.inf), measured_ranks=(0.0, math.inf),
    )  # fmt: skip
    text += network_table(other, "Networks that were not measured: as InfiniBand under A100, wider spread (judged)")
    for name, other_key in ALIASES:
        text += alias_table(
            name, other_key, "Other devices of the architecture, or other hosts on this network: judged"
        )
    for name, costs in c.custom.items():
        framework, _, key = name.partition("/")
        source = f"Frameworks' own kernels, aiconfigurator-core 0.12.0 (Apache-2.0); {counts[name]} rows, {date}"
        text += custom_table(framework, key, costs, source)
    text += exchanges
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Fit, report, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds kernels/collectives.csv.gz")
    parser.add_argument("--out", type=Path, help="calibration file to write; without it only the errors are printed")
    parser.add_argument("--folds", type=int, default=0, help="leave parts of the curves out in turn and score on those")
    parser.add_argument("--seed", type=int, default=5, help="with --folds: of the split")
    parser.add_argument("--fold", type=int, help="with --folds: this part alone")
    parser.add_argument("--predicted", type=Path, help="table to write with what was predicted for each judged row")
    parser.add_argument("--gpus", default="", help="with commas between; others are left out")
    parser.add_argument("--worst", type=int, default=0, help="print so many of the worst curves")
    parser.add_argument("--starts", type=int, default=1, help="starts of each fit")
    parser.add_argument("--date", default="2026-12-01", help="date of the fit, for the file's comments")
    args = parser.parse_args()
    rows = read_rows(args.data / "kernels" / "collectives.csv.gz")
    rows = [row for row in rows if not args.gpus or row["gpu"] in args.gpus.split(",")]
    judged: list[Row] = []
    predicted: list[float | None] = []
    part = folds(rows, args.folds, args.seed) if args.folds else np.zeros(len(rows))
    turns = [args.fold] if args.fold is not None else range(max(args.folds, 1))
    for turn in turns:
        kept = [row for row, own in zip(rows, part, strict=True) if not args.folds or own != turn]
        found, counts = fit_all(kept, args.starts)
        left_out = [row for row, own in zip(rows, part, strict=True) if own == turn]
        judged += left_out
        predicted += predict_rows(left_out, HierarchicalModel(coefficients=with_aliases(found)))[0]
    print(score_collectives(judged, predicted).text())
    if args.folds and args.fold is None:
        exchanged = read_exchanges(args.data / "kernels" / "moe_a2a.csv.gz")
        for (gpu, phase), (median, mean) in left_out_errors(exchanged, args.seed).items():
            print(f"DeepEP {phase} on {gpu}, workloads left out: median {median:.1%}, mean {mean:.1%}")
    if args.worst:
        print(worst_curves(judged, predicted, args.worst))
    if args.predicted is not None:
        write_rows(args.predicted, judged, predicted)
    if args.out is not None and not args.folds:
        exchanges = exchange_tables(args.data / "kernels" / "moe_a2a.csv.gz", args.date)
        write(args.out, found, counts, exchanges, args.date, args.seed)


def with_aliases(found: CommCoefficients) -> CommCoefficients:
    """The coefficients with what stands for networks that were not fitted."""
    network = dict(found.network)
    for name, other in ALIASES:
        if name.startswith("network") and other in network:
            network[name.partition(".")[2]] = replace(network[other], key=name.partition(".")[2])
    return replace(found, network=network)


if __name__ == "__main__":
    main()
