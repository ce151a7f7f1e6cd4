"""Tables of kernels measured alone and beside a collective: rows read, and what each asks of its GPU.

Columns: docs/interference.md. A table says little of a kernel (class, name, sometimes the grid) and of the collective
(the name of its kernel), so typical shares of its class stand for what is missing.
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError, nearest, plain_bytes
from echo_explore.interference.coefficients import InterferenceCoefficients, SharingCoefficients
from echo_explore.interference.contention import kernel_slowdown
from echo_explore.interference.graph_loads import chip_of_device, l2_bytes_per_flop
from echo_explore.interference.loads import EXPERT_CHANNELS, Chip, Floats, KernelLoads, Traffic
from echo_explore.interference.residual import Residual
from echo_explore.specs import ClusterSpec, load_cluster

REQUIRED = ("gpu", "compute_class", "compute_kernel", "comm_kernel", "alone_us", "overlap_ratio")
"""Columns that a table must have; grid, block, n_alone, source and slowdown are used where they are there."""
CLASSES = ("gemm", "attention", "norm", "elementwise", "mixed", "other")
"""What `compute_class` may say; `mixed` is priced as `other`."""

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
"""Share of NVLink that a ring reaches inside a node, by protocol [comm.toml, nvswitch-ampere, 2026-11-30]."""
PCIE_EFFICIENCY = {True: 0.32, False: 0.86}
"""Share of PCIe each way between two GPUs of a host: while both send, 10 GB/s, as buckets of known size were under way
[NetX-lab/Echo-slowdown merged_features.csv, 2024]; while one does, peer writes of 54 of 63 GB/s [voipmonitor/rtx6kpro,
hardware/pcie-bandwidth.md, 2025]."""
LL_CHANNELS = 4
"""Of a message of 128 KiB, as LL serves: over 512 threads x 8 bytes x 8 ranks [NCCL 2.18 src/enqueue.cc, 2023]."""
MESSAGE_BYTES = 25 * 2.0**20
"""Where the table does not say: a bucket of DistributedDataParallel [PyTorch 2.1, bucket_cap_mb, 2023]."""
NUM_RANKS = 8
"""Where the table does not say."""
EXPERT_BYTES_PER_S = 50e9
"""Over the card of a GPU between nodes [DeepEP README, 43 to 58 GB/s, 2025]."""
TYPICAL_THREADS = 256.0
"""Threads of a block where the table does not say: PyTorch's elementwise kernels and most products use 128 or 256."""
SM_THREADS = 2048.0
SM_REGISTERS = 65536.0
"""Of an SM, Volta to Hopper [NVIDIA CUDA C programming guide, compute capabilities, 2024]."""
OTHER_REGISTERS = 48.0
"""Of a thread of a product beside its accumulators: fragments and addresses (assumed, 2026-12)."""
STREAM_BLOCK_BYTES = 12288.0
"""That a block of a streaming kernel moves: 256 threads x 4 elements x 4 bytes x 3 arrays [PyTorch 2.1 Loops.cuh,
2023]."""
TILE_OUTPUTS = 128.0
"""Of a thread of a large product whose tile is not named: 128 x 256 over 256 threads [CUTLASS 2.x default, 2023]."""
MOST_PERSISTENT = 8
"""Blocks of an SM up to which a grid that is a multiple of the SMs is taken as cut to them (assumed, 2026-12)."""
MANY_BLOCKS = 1e6
"""Stands for a grid of many waves where the table does not say."""
FEW_BLOCKS = 32.0
"""Of a weight gradient of a norm where the table does not say: one for each 32 of 1,024 columns."""
NEIGHBOURS = 25
"""Launches on each side over which the share of time with a collective in flight is taken: about one layer."""
WHOLE = 0.9
"""Least overlap of a launch that counts as beside a collective to its end."""
IN_STEP = 0.5
"""Least share of the time in flight that the collective moves, from which the peers count as in step."""

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
_TILE = re.compile(r"_(\d{2,3})x(\d{2,3})_")
_SWITCHED = re.compile(r"SXM|HGX|PG5|[HB][128]00|MI3")
"""Names of GPUs whose links are faster than PCIe; others are taken as cards."""


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
        SpecError: the file cannot be read, has no rows or lacks a column, or a row is not complete or not possible.
    """
    try:
        data = path.read_bytes()
        text = plain_bytes(data).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        names = reader.fieldnames or ()
        lines = [(reader.line_num, cells) for cells in reader]
    except FileNotFoundError:
        raise SpecError("measured", str(path), "does not exist", "check the path") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError("measured", str(path), f"cannot be read: {error}", "give a CSV or CSV.gz file") from None
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise SpecError("measured", str(path), f"has no column {', '.join(missing)}", "see docs/interference.md")
    rows = []
    for number, cells in lines:
        where = f"{path.name}: line {number}"
        given = sum(value is not None for name, value in cells.items() if name is not None)
        given += len(cells.get(None, ()))  # where the csv module puts what is too much
        if given != len(names):
            rule = f"the header names {len(names)} columns"
            raise SpecError(where, f"{given} cells", rule, "complete the line, or delete it")
        rows.append(_row(cells, where))
    if not rows:
        raise SpecError("measured", str(path), "has no row below its header", "give a table of measured kernels")
    return rows


def _row(clean: Mapping[str, str], where: str) -> MeasuredOverlap:
    kind = clean["compute_class"]
    if kind not in CLASSES:
        near = ", ".join(nearest(kind, CLASSES))
        fix = (f"did you mean {near}? " if near else "") + f"All: {', '.join(CLASSES)}"
        raise SpecError(f"{where}: compute_class", kind, "is no class of kernels", fix)
    ratio = _number(clean, "overlap_ratio", where)
    if math.isnan(ratio) or not 0 <= ratio <= 1:
        raise SpecError(f"{where}: overlap_ratio", clean["overlap_ratio"], "must be a share from 0 to 1", "correct it")
    alone_us = _number(clean, "alone_us", where)
    if alone_us <= 0:
        raise SpecError(f"{where}: alone_us", clean["alone_us"], "must be above 0", "correct it or leave it empty")
    slowdown = _number(clean, "slowdown", where)
    if slowdown <= 0:
        raise SpecError(f"{where}: slowdown", slowdown, "must be above 0", "correct it or leave it empty")
    if _number(clean, "message_bytes", where) <= 0:
        raise SpecError(f"{where}: message_bytes", clean["message_bytes"], "must be above 0", "correct it")
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

    def slowdown(self, sharing: SharingCoefficients, residual: Residual | None = None) -> float:
        """Predicted slowdown of the whole kernel: 1 + r (s - 1), r its overlapping share."""
        beside = kernel_slowdown(self.kernel, self.traffic, self.chip, sharing)
        if residual is not None:
            beside = residual.applied(beside, self.kernel, self.traffic, self.chip)
        return 1.0 + self.overlap_fraction * (float(beside[0]) - 1.0)


def scenes_of(rows: Sequence[MeasuredOverlap], coefficients: InterferenceCoefficients) -> list[Scene | None]:
    """What each row describes; None for an unknown GPU. Of the coefficients, only published counts are used."""
    moving = moving_fractions(rows)
    first = first_beside(rows)
    scenes: list[Scene | None] = []
    for i, (row, cluster) in enumerate(zip(rows, _clusters_of(rows), strict=True)):
        if cluster is None:
            scenes.append(None)
            continue
        chip = chip_of_device(cluster.device, coefficients)
        in_step = bool(moving[i] >= IN_STEP)
        traffic = _traffic(row, cluster, coefficients, in_step=in_step, moves=in_step or bool(first[i]))
        scenes.append(
            Scene(kernel=_loads(row, cluster, chip), traffic=traffic, chip=chip, overlap_fraction=row.overlap_fraction)
        )
    return scenes


def predicted_slowdowns(rows: Sequence[MeasuredOverlap], coefficients: InterferenceCoefficients) -> Floats:
    """(num_rows,) predicted slowdown of the whole kernel; nan for unknown GPUs."""
    scenes = scenes_of(rows, coefficients)
    return np.array(
        [np.nan if scene is None else scene.slowdown(coefficients.sharing, coefficients.residual) for scene in scenes]
    )


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
        if not all(rows[i].is_single_launch for i in numbers) or len(numbers) <= 2 * NEIGHBOURS:
            continue
        alone = np.nan_to_num(np.array([rows[i].alone_s for i in numbers]))
        busy = alone * np.array([rows[i].overlap_fraction for i in numbers])
        in_flight = _windowed(busy) / np.maximum(_windowed(alone), 1e-12)
        least = float(np.quantile(in_flight, 0.25))
        moving[numbers] = np.clip(least / np.maximum(in_flight, 1e-12), 0.0, 1.0)
    return moving


def first_beside(rows: Sequence[MeasuredOverlap]) -> npt.NDArray[np.bool_]:
    """(num_rows,) whether the collective started with this launch: the launch before it was beside none to its end.

    A collective that waits for its peer moves only what it may send at its start. True where the order says nothing.
    """
    first = np.ones(len(rows), dtype=np.bool_)
    single = _single_sources(rows)
    for i in range(1, len(rows)):
        source = rows[i].cells.get("source", "")
        if source in single and rows[i - 1].cells.get("source", "") == source:
            first[i] = rows[i - 1].overlap_fraction < WHOLE
    return first


def _single_sources(rows: Sequence[MeasuredOverlap]) -> set[str]:
    """Sources that list single launches only, in the order in which they ran."""
    seen: dict[str, bool] = {}
    for row in rows:
        source = row.cells.get("source", "")
        seen[source] = seen.get(source, True) and row.is_single_launch
    return {source for source, single in seen.items() if single}


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


def _loads(row: MeasuredOverlap, cluster: ClusterSpec, chip: Chip) -> KernelLoads:
    kind, kernel = row.cells["compute_class"], row.cells["compute_kernel"]
    few = bool(_FEW_BLOCKS.search(kernel))
    known = _product(row.cells.get("grid", ""))
    arithmetic = ARITHMETIC_FRACTION.get(kind, 0.0)
    memory = MEMORY_FRACTION.get(kind, MEMORY_FRACTION["other"])
    if few:  # so few blocks cannot keep device memory busy
        memory = min(memory, 0.5)
    threads = _product(row.cells.get("block", ""))
    if threads is None:
        named = _THREADS.search(kernel) if few else None
        threads = float(named[1]) * float(named[2]) if named else TYPICAL_THREADS
    alone_s = row.alone_s if row.alone_s > 0 else math.inf
    if known is not None:
        blocks = known
    elif few:
        blocks = FEW_BLOCKS
    elif arithmetic or not math.isfinite(alone_s):
        blocks = MANY_BLOCKS
    else:
        blocks = max(1.0, alone_s * memory * chip.memory_bandwidth_bytes_per_s / STREAM_BLOCK_BYTES)
    per_sm = SM_THREADS // threads
    if known is not None and known % chip.num_sms == 0 and known <= MOST_PERSISTENT * chip.num_sms:
        per_sm = min(per_sm, known / chip.num_sms)  # a grid cut to the SMs is persistent and resident as a whole
    if arithmetic:
        tile = _TILE.search(kernel)
        outputs = float(tile[1]) * float(tile[2]) / threads if tile else TILE_OUTPUTS
        per_sm = min(per_sm, SM_REGISTERS // (threads * min(outputs + OTHER_REGISTERS, 255.0)))
    return KernelLoads(
        time_s=np.array([alone_s]),
        memory_fraction=np.array([memory]),
        l2_fraction=np.array([_l2_fraction(arithmetic, memory, cluster, chip)]),
        arithmetic_fraction=np.array([arithmetic]),
        num_blocks=np.array([max(1.0, blocks)]),
        blocks_per_sm=np.array([max(1.0, per_sm)]),
        fixed_grid=np.array([known is not None or few]),
    )


def _l2_fraction(arithmetic: float, memory: float, cluster: ClusterSpec, chip: Chip) -> float:
    """Share of the L2 cache's bandwidth: of products in 16 bits at that share of the peak, of others their bytes."""
    peak = cluster.device.peak_flop_per_s
    flop_per_s = arithmetic * max(peak.get("fp16", 0.0), peak.get("bf16", 0.0))
    wanted = flop_per_s * l2_bytes_per_flop(cluster.device.architecture, element_bytes=2.0)
    return min(1.0, max(wanted, memory * chip.memory_bandwidth_bytes_per_s) / chip.l2_bandwidth_bytes_per_s)


def _product(text: str) -> float | None:
    """Product of the sizes in `[8, 32, 1]`; None where there are none."""
    sizes = [float(size) for size in re.findall(r"\d+", text)]
    return math.prod(sizes) if sizes else None


def _traffic(
    row: MeasuredOverlap, cluster: ClusterSpec, coefficients: InterferenceCoefficients, *, in_step: bool, moves: bool
) -> Traffic:
    names = row.cells["comm_kernel"]
    moving = 1.0 if moves else 0.0
    link = cluster.node.link_bandwidth_bytes_per_s
    if re.search(r"\bep::|deep_ep|DeepEP", names):
        return Traffic(
            num_channels=EXPERT_CHANNELS,
            link_bytes_per_s=EXPERT_BYTES_PER_S,
            link_peak_bytes_per_s=link,
            burst_bytes=EXPERT_CHANNELS * coefficients.chunk_bytes["ll"],
            moving_fraction=moving,
            exclusive=True,
        )
    first = names.split(";")[0]
    protocol = "ll128" if "_LL128" in first else "ll" if "_LL_" in first else "simple"
    if _SWITCHED.search(row.cells["gpu"]) or protocol != "simple":
        rate = LINK_EFFICIENCY[protocol] * link
        channels = LL_CHANNELS if protocol == "ll" else coefficients.channels_of(cluster.device.architecture)
    else:
        link = cluster.node.pcie_bandwidth_bytes_per_s
        rate, channels = PCIE_EFFICIENCY[in_step] * link, coefficients.channels_of("pcie")
    return Traffic(
        num_channels=channels,
        link_bytes_per_s=rate,
        link_peak_bytes_per_s=link,
        burst_bytes=min(channels * coefficients.chunk_bytes[protocol], _message_bytes(row) / _num_ranks(row)),
        moving_fraction=moving,
    )


def _num_ranks(row: MeasuredOverlap) -> int:
    named = re.search(r"(\d+) GPUs", row.cells["comm_kernel"])
    return max(2, int(named[1])) if named else NUM_RANKS


def _message_bytes(row: MeasuredOverlap) -> float:
    size = _number(row.cells, "message_bytes", row.cells["comm_kernel"])
    return MESSAGE_BYTES if math.isnan(size) else size
