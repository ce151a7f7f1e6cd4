"""Tables of kernels measured alone and beside a collective: rows read, and what each asks of its GPU.

Columns: docs/interference.md. A table says little of a kernel (class, name, sometimes the grid) and of the collective
(the name of its kernel), so typical shares of its class stand for what is missing.
"""

import csv
import gzip
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_explore.core import SpecError
from echo_explore.interference.coefficients import InterferenceCoefficients, SharingCoefficients
from echo_explore.interference.contention import kernel_slowdown
from echo_explore.interference.loads import Chip, Floats, KernelLoads, Traffic
from echo_explore.specs import ClusterSpec, load_cluster

REQUIRED = ("gpu", "compute_class", "compute_kernel", "comm_kernel", "alone_us", "overlap_ratio")
"""Columns that a table must have; grid, block, n_alone, source and slowdown are used where they are there."""

MEMORY_FRACTION: Mapping[str, float] = {
    "elementwise": 0.9,
    "norm": 0.6,
    "other": 0.6,
    "gemm": 0.3,
    "attention": 0.2,
}
"""Typical share of the memory bandwidth by class: streaming and norm as fitted for A100 and V100 [compute.toml,
2026-11-30]; products and attention by their arithmetic intensity at 0.8 of the peak (assumed)."""
ARITHMETIC_FRACTION: Mapping[str, float] = {"gemm": 0.8, "attention": 0.6}
"""Typical share of the peak: large products as fitted for A100 [compute.toml, 2026-11-30]; attention backward 0.6 of it
[FlashAttention-2, arXiv 2307.08691, 2023]."""
LINK_EFFICIENCY: Mapping[str, float] = {"ll": 0.15, "ll128": 0.57, "simple": 0.77}
"""Share of the link that a ring reaches inside a node, by protocol [comm.toml, nvswitch-ampere, 2026-11-30]."""
EXPERT_CHANNELS = 20
"""SMs that dispatch and combine of experts take [DeepSeek-V3, arXiv 2412.19437, section 3.2.2, 2024]."""
EXPERT_BYTES_PER_S = 50e9
"""Over the card of a GPU between nodes [DeepEP README, 43 to 58 GB/s, 2025]."""
TYPICAL_THREADS = 256.0
"""Threads of a block where the table does not say: PyTorch's elementwise kernels and most products use 128 or 256."""
MANY_BLOCKS = 1e6
"""Stands for a grid of many waves where the table does not say."""
NEIGHBOURS = 25
"""Launches on each side over which the share of time with a collective in flight is taken: about one layer."""

_CLUSTERS = (
    (r"H800", "h800-ndr"),
    (r"H100", "h100-ndr"),
    (r"H200", "h200-ndr"),
    (r"A100.*80GB", "a100-80gb-hdr"),
    (r"A100", "a100-40gb-hdr"),
    (r"V100", "v100-25gbe"),
    (r"MI300X", "mi300x-roce"),
)
"""Shipped cluster whose device and links stand for a GPU's name; first match."""
_KERNEL_CLUSTERS = ((r"sm90|hopper", "h100-ndr"), (r"ampere|sm80|_80_", "a100-40gb-hdr"), (r"volta", "v100-25gbe"))
"""The same by the names of kernels, where a table does not know the GPU."""
_FEW_BLOCKS = re.compile(r"GammaBeta|GradGammaBeta|cuComputePart", re.IGNORECASE)
"""Weight gradients of norms: a block for each 32 columns [PyTorch 2.1, layer_norm_kernel.cu, 2023]."""
_THREADS = re.compile(r"_(\d{1,2})x(\d{1,2})\b")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredOverlap:
    """One row.

    Attributes:
        cells: every column as text.
        alone_s: kernel alone; nan where not stated.
        overlap_fraction: of the kernel's time beside the collective.
        slowdown: measured, of the whole kernel; nan where not stated.
    """

    cells: Mapping[str, str]
    alone_s: float
    overlap_fraction: float
    slowdown: float

    @property
    def is_single_launch(self) -> bool:
        """The times are of one launch each, not means."""
        return self.cells.get("n_alone", "").strip() in ("1", "1.0")


def read_overlaps(path: Path) -> list[MeasuredOverlap]:
    """The rows of a CSV or CSV.gz table.

    Raises:
        SpecError: the file cannot be read, or a column is missing.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError("measured", str(path), "does not exist", "check the path") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise SpecError("measured", str(path), f"cannot be read: {error}", "give a CSV or CSV.gz file") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
    if missing:
        raise SpecError("measured", str(path), f"has no column {', '.join(missing)}", "see docs/interference.md")
    return [_row(cells, f"{path.name}: row {number}") for number, cells in enumerate(reader, start=1)]


def _row(cells: Mapping[str, str], where: str) -> MeasuredOverlap:
    clean = {str(name): value or "" for name, value in cells.items()}
    ratio = _number(clean, "overlap_ratio", where)
    if math.isnan(ratio) or not 0 <= ratio <= 1:
        raise SpecError(f"{where}: overlap_ratio", clean["overlap_ratio"], "must be a share from 0 to 1", "correct it")
    alone_us = _number(clean, "alone_us", where)
    if alone_us < 0:
        raise SpecError(f"{where}: alone_us", alone_us, "must not be negative", "correct it")
    slowdown = _number(clean, "slowdown", where)
    return MeasuredOverlap(cells=clean, alone_s=alone_us * 1e-6, overlap_fraction=ratio, slowdown=slowdown)


def _number(cells: Mapping[str, str], name: str, where: str) -> float:
    text = cells.get(name, "").strip()
    if not text:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if math.isinf(value):
        raise SpecError(f"{where}: {name}", text, "must be a finite number", "correct it or leave it empty")
    return value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """A kernel and the collective beside it on a GPU, as a row describes them.

    Attributes:
        overlap_fraction: of the kernel's time beside the collective.
    """

    kernel: KernelLoads
    traffic: Traffic
    chip: Chip
    overlap_fraction: float

    def slowdown(self, sharing: SharingCoefficients) -> float:
        """Predicted slowdown of the whole kernel: 1 + r (s - 1), r its overlapping share."""
        beside = kernel_slowdown(self.kernel, self.traffic, self.chip, sharing)
        return 1.0 + self.overlap_fraction * (float(beside[0]) - 1.0)


def scenes_of(rows: Sequence[MeasuredOverlap], coefficients: InterferenceCoefficients) -> list[Scene | None]:
    """What each row describes; None for an unknown GPU. Of the coefficients, only published counts are used."""
    moving = moving_fractions(rows)
    scenes: list[Scene | None] = []
    for row, cluster, fraction in zip(rows, _clusters_of(rows), moving.tolist(), strict=True):
        if cluster is None:
            scenes.append(None)
            continue
        chip = chip_of(cluster)
        traffic = _traffic(row, cluster, coefficients, fraction)
        scenes.append(
            Scene(kernel=_loads(row, chip), traffic=traffic, chip=chip, overlap_fraction=row.overlap_fraction)
        )
    return scenes


def predicted_slowdowns(rows: Sequence[MeasuredOverlap], coefficients: InterferenceCoefficients) -> Floats:
    """(num_rows,) predicted slowdown of the whole kernel; nan for unknown GPUs."""
    scenes = scenes_of(rows, coefficients)
    return np.array([np.nan if scene is None else scene.slowdown(coefficients.sharing) for scene in scenes])


def chip_of(cluster: ClusterSpec) -> Chip:
    """The GPU of the cluster."""
    device = cluster.device
    return Chip(num_sms=device.num_sms, memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s)


def moving_fractions(rows: Sequence[MeasuredOverlap]) -> Floats:
    """(num_rows,) share of its time that the collective beside each row moves bytes, rather than waits for a peer.

    A table of single launches in their order shows it: the same collectives, layer by layer, are in flight for longer
    when this rank is ahead of its peers, and move no more for it. With d the share of time in flight around a launch,
    and d0 its lower quartile over the source, d0 / d, at most 1. Tables of means over launches say nothing: 1.
    """
    moving = np.ones(len(rows))
    by_source: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        by_source.setdefault(row.cells.get("source", ""), []).append(number)
    for numbers in by_source.values():
        single = all(rows[i].is_single_launch for i in numbers)
        if not single or len(numbers) <= 2 * NEIGHBOURS:
            continue
        alone = np.nan_to_num(np.array([rows[i].alone_s for i in numbers]))
        busy = alone * np.array([rows[i].overlap_fraction for i in numbers])
        in_flight = _windowed(busy) / np.maximum(_windowed(alone), 1e-12)
        least = float(np.quantile(in_flight, 0.25))
        moving[numbers] = np.clip(least / np.maximum(in_flight, 1e-12), 0.0, 1.0)
    return moving


def _windowed(values: Floats) -> Floats:
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(values.shape[0])
    return np.asarray(total[np.minimum(at + NEIGHBOURS + 1, values.shape[0])] - total[np.maximum(at - NEIGHBOURS, 0)])


def _clusters_of(rows: Sequence[MeasuredOverlap]) -> list[ClusterSpec | None]:
    names: dict[str, str] = {}
    for row in rows:
        names[row.cells.get("source", "")] = names.get(row.cells.get("source", ""), "") + row.cells["compute_kernel"]
    known: dict[str, ClusterSpec] = {}
    found: list[ClusterSpec | None] = []
    for row in rows:
        name = _match(_CLUSTERS, row.cells["gpu"]) or _match(_KERNEL_CLUSTERS, names[row.cells.get("source", "")])
        if name is not None and name not in known:
            known[name] = load_cluster(name)
        found.append(None if name is None else known[name])
    return found


def _match(rules: Sequence[tuple[str, str]], text: str) -> str | None:
    return next((cluster for pattern, cluster in rules if re.search(pattern, text)), None)


def _loads(row: MeasuredOverlap, chip: Chip) -> KernelLoads:
    kind, kernel = row.cells["compute_class"], row.cells["compute_kernel"]
    few = bool(_FEW_BLOCKS.search(kernel))
    blocks = _product(row.cells.get("grid", ""))
    threads = _product(row.cells.get("block", ""))
    if threads is None:
        named = _THREADS.search(kernel) if few else None
        threads = float(named[1]) * float(named[2]) if named else TYPICAL_THREADS
    if blocks is None:
        blocks = float(chip.num_sms - 1) if few else MANY_BLOCKS
    memory = MEMORY_FRACTION.get(kind, MEMORY_FRACTION["other"])
    if few:  # less than MEMORY_BOUND: so few blocks cannot keep device memory busy
        memory = min(memory, 0.5)
    return KernelLoads(
        time_s=np.array([row.alone_s if row.alone_s > 0 else math.inf]),
        memory_fraction=np.array([memory]),
        arithmetic_fraction=np.array([ARITHMETIC_FRACTION.get(kind, 0.0)]),
        num_blocks=np.array([blocks]),
        threads_per_block=np.array([threads]),
    )


def _product(text: str) -> float | None:
    """Product of the sizes in `[8, 32, 1]`; None where there are none."""
    sizes = [float(size) for size in re.findall(r"\d+", text)]
    return math.prod(sizes) if sizes else None


def _traffic(
    row: MeasuredOverlap, cluster: ClusterSpec, coefficients: InterferenceCoefficients, moving: float
) -> Traffic:
    names = row.cells["comm_kernel"]
    link = cluster.node.link_bandwidth_bytes_per_s
    if re.search(r"\bep::|deep_ep|DeepEP", names):
        return Traffic(
            num_channels=EXPERT_CHANNELS,
            link_bytes_per_s=EXPERT_BYTES_PER_S,
            link_peak_bytes_per_s=link,
            chunk_bytes=coefficients.chunk_bytes["ll"],
            moving_fraction=moving,
            exclusive=True,
        )
    first = names.split(";")[0]
    protocol = "ll128" if "_LL128" in first else "ll" if "_LL_" in first else "simple"
    return Traffic(
        num_channels=coefficients.channels_of(cluster.device.architecture),
        link_bytes_per_s=LINK_EFFICIENCY[protocol] * link,
        link_peak_bytes_per_s=link,
        chunk_bytes=coefficients.chunk_bytes[protocol],
        moving_fraction=moving,
    )
