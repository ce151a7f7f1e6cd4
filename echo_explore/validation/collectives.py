"""Measured collectives: predict every row of a table and score the predictions."""

import csv
import gzip
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from echo_explore.comm.choice import ForcedChoice
from echo_explore.comm.coefficients import CommCoefficients, ToolConstants
from echo_explore.comm.custom import custom_all_reduce_s, custom_costs, framework_of
from echo_explore.comm.libraries import BASE, library
from echo_explore.comm.model import HierarchicalModel, make_batch
from echo_explore.comm.paths import ClusterLinks
from echo_explore.core import EchoError, SpecError, plain_bytes, write_atomic
from echo_explore.graph.kinds import Collective, DType
from echo_explore.specs import load_cluster
from echo_explore.validation.collective_rows import (
    COLLECTIVES,
    DTYPES,
    PROTOCOLS,
    REQUIRED,
    check_host,
    check_row,
)
from echo_explore.validation.fabrics import MeasuredFabric, fabric_of, links_of_fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveScores:
    """How wrong predictions are, by gpu and collective; a declined row counts as 100 %.

    Attributes:
        groups: (gpu, collective, rows, coverage, median, mean), NCCL's own choice only.
        custom: the same for frameworks' own kernels.
    """

    groups: tuple[tuple[str, str, int, float, float, float], ...]
    custom: tuple[tuple[str, str, int, float, float, float], ...]

    def text(self) -> str:
        """A table and the means over groups."""
        lines = [f"{'gpu':22s} {'collective':16s} {'rows':>6s} {'cover':>7s} {'median':>7s} {'mean':>7s}"]
        for title, groups in (("", self.groups), ("frameworks' own kernels", self.custom)):
            if not groups:
                continue
            lines += [title] if title else []
            lines += [f"{g:22s} {c:16s} {n:6d} {v:7.1%} {m:7.1%} {a:7.1%}" for g, c, n, v, m, a in groups]
            medians, means = statistics.fmean(g[4] for g in groups), statistics.fmean(g[5] for g in groups)
            lines.append(f"mean of medians {medians:.4f}, of means {means:.4f}")
        return "\n".join(lines)


def validate_collectives(measured: Path, out: Path, model: HierarchicalModel) -> CollectiveScores:
    """Predict every row, write the table with `predicted_us` and `reason` added, and score.

    Raises:
        SpecError: the table cannot be read, or lacks a column.
    """
    rows, fields = _read(measured)
    predicted, reasons = predict_rows(rows, model)
    text = io.StringIO()
    added = [name for name in ("predicted_us", "reason") if name not in fields]
    writer = csv.DictWriter(text, [*fields, *added], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row, time_us, reason in zip(rows, predicted, reasons, strict=True):
        value = "" if time_us is None else f"{time_us:.4g}"
        writer.writerow({**row, "predicted_us": value, "reason": reason})
    data = text.getvalue().encode()
    write_atomic(out, gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)
    return score_collectives(rows, predicted)


def predict_rows(rows: Sequence[Mapping[str, str]], model: HierarchicalModel) -> tuple[list[float | None], list[str]]:
    """Microseconds of every row, None where declined, and why."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    predicted: list[float | None] = [None] * len(rows)
    reasons = [""] * len(rows)
    for i, row in enumerate(rows):
        try:
            check_row(row)
            if fabric := fabric_of(row["gpu"], row["fabric"]):
                check_host(row, _most_gpus(fabric))
        except SpecError as error:
            reasons[i] = str(error)
            continue
        keys = ("gpu", "fabric", "collective", "dtype", "algo", "proto", "lib", "tool")
        groups[tuple(row.get(key) or "" for key in keys)].append(i)
    for key, members in groups.items():
        try:
            times = _times_us(key, [rows[i] for i in members], model)
        except (EchoError, ValueError) as error:
            for i in members:
                reasons[i] = " ".join(str(error).split())
            continue
        for i, time_us in zip(members, times, strict=True):
            predicted[i] = time_us
    return predicted, reasons


@cache
def _most_gpus(fabric: MeasuredFabric) -> int:
    """GPUs of a node of the fabric, or of its scale-up domain where that is larger."""
    node = load_cluster(fabric.cluster).node
    return max(node.num_gpus, node.domain_gpus, fabric.domain_gpus or 0)


def _times_us(key: tuple[str, ...], rows: Sequence[Mapping[str, str]], model: HierarchicalModel) -> list[float]:
    gpu, fabric_text, collective, dtype, algo, proto, lib, tool = key
    fabric = fabric_of(gpu, fabric_text)
    if fabric is None:
        raise SpecError("gpu", gpu, "no fabric of it is known", "add it to validation/fabrics.py")
    size, ranks, nodes = (np.array([float(row[name]) for row in rows]) for name in ("size_bytes", "num_gpus", "nodes"))
    if algo.startswith("custom"):
        return [1e6 * t for t in _custom_s(fabric, algo, lib, ranks, size, model).tolist()]
    links = links_of_fabric(fabric, model.coefficients)
    per_node = ranks_per_node(ranks, nodes, links.domain_gpus, spans=links.domain_hosts > 1)
    batch = make_batch(links, size, ranks, per_node, np.ones_like(size), dtype=DTYPES[dtype.lower()])
    priced = HierarchicalModel(
        coefficients=model.coefficients, forced=_forced(algo, proto), library=library_name(lib)
    ).choice_of(COLLECTIVES[collective], batch, links)
    constants = tool_constants(model.coefficients, tool, gpu, collective)
    return [1e6 * constants.measured_s(time_s) for time_s in priced.time_s.tolist()]


def ranks_per_node(num_ranks: np.ndarray, nodes: np.ndarray, domain_gpus: int, *, spans: bool) -> np.ndarray:
    """Ranks in one scale-up domain: all of them where it spans hosts and holds them, else an equal part."""
    even = np.ceil(num_ranks / nodes)
    return np.where((num_ranks <= domain_gpus) & spans, num_ranks, even)


def _forced(algo: str, proto: str) -> ForcedChoice:
    named = {"collnetdirect": "collnet", "collnetchain": "collnet", "nvlstree": "nvls-tree"}
    algorithm = named.get(algo.lower(), algo.lower())
    chosen = None if algorithm in ("auto", "") else algorithm
    return ForcedChoice(algorithm=chosen, protocol=PROTOCOLS.get(proto.lower()))


def library_name(lib: str) -> str:
    """`NCCL 2.27.3` is nccl-2.27.3; without a version the library of most fits."""
    family, _, version = lib.strip().lower().partition(" ")
    if family in ("rccl", "oneccl"):
        return family
    return library(f"nccl-{version}").name if family == "nccl" and version[:1].isdecimal() else BASE


def tool_constants(coefficients: CommCoefficients, tool: str, gpu: str, collective: str) -> ToolConstants:
    """What a tool's time includes; nothing where the tool is not known."""
    name = "nccl-tests"
    if "XLA" in tool:
        name = "xla-grace" if gpu.startswith("GB") else "xla"
    elif "kineto" in tool:
        name = "kineto-send" if collective == "send_recv" else "kineto"
    elif "LUT" in tool:
        name = "lut"
    return coefficients.tools.get(name, ToolConstants(key=name))


def _custom_s(
    fabric: MeasuredFabric, algo: str, lib: str, ranks: np.ndarray, size: np.ndarray, model: HierarchicalModel
) -> np.ndarray:
    coefficients = model.coefficients
    costs = custom_costs(coefficients.custom, framework_of(algo, lib) or algo, fabric.scale_up)
    links = links_of_fabric(fabric, coefficients)
    return custom_all_reduce_s(
        ranks,
        size,
        nccl_s(ranks, size, links, model),
        link_bytes_per_s=links.scale_up_bytes_per_s,
        costs=costs,
        eager=np.full(len(size), "eager" in algo.lower()),
    )


def nccl_s(ranks: np.ndarray, size: np.ndarray, links: ClusterLinks, model: HierarchicalModel) -> np.ndarray:
    """Seconds of NCCL's all-reduces inside one domain."""
    batch = make_batch(links, size, ranks, ranks, np.ones_like(size), dtype=DType.BF16)
    return model.choice_of(Collective.ALL_REDUCE, batch, links).time_s


def score_collectives(rows: Sequence[Mapping[str, str]], predicted: Iterable[float | None]) -> CollectiveScores:
    """Errors by gpu and collective."""
    errors: dict[tuple[bool, str, str], list[float | None]] = defaultdict(list)
    for row, guess in zip(rows, predicted, strict=True):
        truth = _number(row["latency_us"] or "")
        if not truth > 0:
            continue
        algo = row["algo"] or ""
        custom = algo.startswith("custom")
        if not custom and algo != "auto":
            continue
        errors[custom, row["gpu"], row["collective"]].append(None if guess is None else abs(guess / truth - 1))
    found: dict[bool, list[tuple[str, str, int, float, float, float]]] = {False: [], True: []}
    for (custom, gpu, collective), values in sorted(errors.items()):
        all_of = [1.0 if value is None else value for value in values]
        cover = sum(value is not None for value in values) / len(values)
        figures = (gpu, collective, len(values), cover, statistics.median(all_of), statistics.fmean(all_of))
        found[custom].append(figures)
    return CollectiveScores(groups=tuple(found[False]), custom=tuple(found[True]))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _read(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    try:
        text = plain_bytes(path.read_bytes()).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows, fields = list(reader), list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError("table", str(path), f"cannot be read: {error}", "give a CSV or CSV.gz file") from None
    if not fields:
        raise SpecError("table", str(path), "is empty", "give a CSV file with a header")
    if missing := [name for name in REQUIRED if name not in fields]:
        raise SpecError("table", str(path), f"has no column {', '.join(missing)}", "add it")
    if not rows:
        raise SpecError("table", str(path), "has a header but no row", "add measured rows")
    return rows, fields
