"""Corrections of kernel times from measured kernels: medians of measured over predicted along their length."""

import datetime
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from echo_explore.calibration.kernel_rows import MeasuredKernels
from echo_explore.compute import Calibration, RooflineModel
from echo_explore.compute.corrections import CORRECTIONS, FEWEST, Clock, Correction
from echo_explore.compute.pricing import LARGEST_EXTENT
from echo_explore.core import SpecError
from echo_explore.core.files import write_atomic
from echo_explore.graph import DType, OpClass, OpRow, build_graph
from echo_explore.specs import DeviceSpec, StackProfile, load_stack

Floats = npt.NDArray[np.float64]
ROWS_A_KNOT = 12
MOST_KNOTS = 6
SMALLEST_SIGMA_LOG = 0.03
"""No measurement repeats better between machines: spread of two frameworks on one GPU (tables, 2026-11-30)."""
FASTEST = 20.0
"""No kernel is this many times faster than predicted: at most 4 times in 60,000 rows of products and attention
(2026-12-01); a mistaken unit is a thousand."""
WIDEST = 200.0
"""Kernels of one class never lie so far from their middle, each over its prediction: at most 10 times in those rows
(2026-12-01); a mistaken unit is a thousand."""
_MATRIX = {OpClass.GEMM: "gemm", OpClass.GROUPED_GEMM: "gemm", OpClass.ATTENTION: "attention"}


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured kernel: what the model says, what was measured, and where it is from."""

    predicted_s: float
    time_s: float
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """Corrections and how much they help.

    Attributes:
        device: calibration key that they are for.
        corrections: one a class, data type and clock.
        before, after: mean absolute error by correction, in the same order, of the shipped and the corrected model.
        skipped: classes with too few rows, or reasons why rows were ignored, with their number.
        source: what was read.
    """

    device: str
    corrections: tuple[Correction, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    skipped: dict[str, int]
    source: str

    def text(self) -> str:
        """A table for people."""
        lines = [f"{'class':14s} {'dtype':6s} {'clock':9s}  rows  error before  after"]
        for c, before, after in zip(self.corrections, self.before, self.after, strict=True):
            lines.append(f"{c.op_class:14s} {c.dtype:6s} {c.measured:9s} {c.num_rows:5d} {before:13.1%} {after:6.1%}")
        lines += [f"left out: {count} {reason}" for reason, count in self.skipped.items()]
        return "\n".join(lines)


def fit_kernels(
    measured: Sequence[MeasuredKernels], device: DeviceSpec, calibration: Calibration, stack: StackProfile | None = None
) -> KernelFit:
    """Corrections that bring the compute model to what was measured on `device`.

    Args:
        measured: at least one set of kernels.
        device: the GPU they ran on.
        calibration: the model to correct.
        stack: names kernels and sources; default megatron-core.

    Raises:
        SpecError: no class has enough measurements.
    """
    groups: dict[tuple[str, str, Clock], list[Measured]] = defaultdict(list)
    skipped: dict[str, int] = defaultdict(int)
    for part in measured:
        for reason, count in part.num_ignored.items():
            skipped[reason] += count
        kept = []
        for number, row in enumerate(part.rows):
            if reason := _out_of_domain(row, device):
                skipped[reason] += 1
            else:
                kept.append(number)
        if not kept:
            continue
        model = RooflineModel(calibration, sustained=part.measured == "sustained")
        graph = build_graph([part.rows[number] for number in kept])
        priced = model.kernel_times(graph, device, stack or load_stack("megatron-core")).time_s
        for number, predicted in zip(kept, priced.tolist(), strict=True):
            row, time = part.rows[number], float(part.time_s[number])
            groups[_class_of(row), _dtype_of(row), part.measured].append(
                Measured(predicted, time, f"{part.source}: {_class_of(row)} of {list(row.dims)}")
            )
    corrections, before, after = [], [], []
    for (name, dtype, clock), pairs in sorted(groups.items()):
        if len(pairs) < FEWEST:
            skipped[f"kernels of {name} {dtype}: fewer than {FEWEST}"] += len(pairs)
            continue
        _check_units(f"{name} {dtype} {clock}", pairs)
        predicted, time = np.array([(p.predicted_s, p.time_s) for p in pairs]).T
        found = _fit(predicted, time, device.calibration, name, dtype, clock)
        corrections.append(found)
        before.append(float(np.mean(np.abs(predicted / time - 1))))
        after.append(float(np.mean(np.abs(found.applied(predicted) / time - 1))))
    if not corrections:
        said = "; ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise SpecError("measured kernels", said, f"no class has {FEWEST} of them", "measure more kernels")
    return KernelFit(
        device=device.calibration,
        corrections=tuple(corrections),
        before=tuple(before),
        after=tuple(after),
        skipped=dict(skipped),
        source=", ".join(part.source for part in measured),
    )


def _class_of(row: OpRow) -> str:
    return _MATRIX.get(row.op_class, row.op_class.name.lower())


def _dtype_of(row: OpRow) -> str:
    return DType(row.dtype).name.lower() if row.op_class in _MATRIX else "any"


def _out_of_domain(row: OpRow, device: DeviceSpec) -> str:
    """Why the model has no time for a measured kernel that a correction could multiply; empty where it has one."""
    if row.op_class not in _MATRIX:
        return ""
    if max(row.dims) > LARGEST_EXTENT:
        return f"kernels of {_class_of(row)} with a size beyond {LARGEST_EXTENT}"
    dtype = _dtype_of(row)
    return "" if dtype in device.peak_flop_per_s else f"kernels in {dtype}, which {device.name} has no rate for"


def _check_units(what: str, rows: Sequence[Measured]) -> None:
    """Refuse times that no GPU of this kind has, or of more than one unit.

    Raises:
        SpecError: names the rows.
    """
    ratio = np.array([row.time_s / row.predicted_s for row in rows])
    fast = np.flatnonzero(ratio < 1.0 / FASTEST)
    if fast.size:
        row = rows[int(fast[0])]
        raise SpecError(
            f"{row.where}: time", f"{row.time_s * 1e6:.4g} us",
            f"is {1.0 / ratio[fast[0]]:.0f} times below the {row.predicted_s * 1e6:.4g} us that the GPU takes, and so "
            f"are {fast.size} of {len(rows)} kernels of {what} (more than {FASTEST:.0f} times)",
            "give all times in microseconds, or leave those rows out",
        )  # fmt: skip
    middle = float(np.exp(np.median(np.log(ratio))))
    slow = np.flatnonzero(np.abs(np.log(ratio / middle)) > math.log(WIDEST))
    if slow.size:
        row = rows[int(slow[0])]
        raise SpecError(
            f"{row.where}: time", f"{row.time_s * 1e6:.4g} us",
            f"differs from the middle of {what} by more than {WIDEST:.0f} times, as {slow.size} of {len(rows)} kernels "
            "do, each over its predicted time",
            "give all times in microseconds, or leave those rows out",
        )  # fmt: skip


def _fit(predicted: Floats, time: Floats, device: str, op_class: str, dtype: str, clock: Clock) -> Correction:
    """Medians of the log ratio in bins of equal number along the predicted time."""
    order = np.argsort(predicted, kind="stable")
    log = np.log(time / predicted)[order]
    at = np.log(predicted)[order]
    count = int(np.clip(len(at) // ROWS_A_KNOT, 1, MOST_KNOTS))
    knots: list[float] = []
    factors: list[float] = []
    for bin_at, bin_log in zip(np.array_split(at, count), np.array_split(log, count), strict=True):
        place, factor = float(np.median(bin_at)), float(np.median(bin_log))
        if knots and place - knots[-1] < 1e-3:
            continue
        if knots:
            factor = max(factor, factors[-1] - 0.99 * (place - knots[-1]))  # longer kernels stay longer
        knots.append(place)
        factors.append(factor)
    left = log - np.interp(at, knots, factors)
    spread = max(1.4826 * float(np.median(np.abs(left))), float(np.percentile(np.abs(left), 80)) / 1.2816)
    return Correction(
        device=device,
        op_class=op_class,
        dtype=dtype,
        measured=clock,
        time_s=np.exp(knots),
        factor=np.exp(factors),
        sigma_log=max(spread, SMALLEST_SIGMA_LOG),
        num_rows=len(at),
    )


def write_corrections(path: Path, fit: KernelFit) -> None:
    """Write a calibration file that `predict --calibration` reads.

    Raises:
        SpecError: the file exists or cannot be written.
    """
    today = datetime.date.today().isoformat()
    lines = [
        "# Corrections of kernel times, written by `echo-explore calibrate kernels`; keys: docs/compute_model.md.",
        "schema = 1",
        f'kind = "{CORRECTIONS}"',
        f"reference = {_quoted(f'{fit.source}, {today}')}",
        f'fitted_on = "{today}"',
    ]
    for c, before, after in zip(fit.corrections, fit.before, fit.after, strict=True):
        lines += [
            "",
            f"# {c.num_rows} kernels; mean error before {before:.1%}, after {after:.1%}",
            "[[correction]]",
            f"device = {_quoted(c.device)}",
            f'op_class = "{c.op_class}"',
            f'dtype = "{c.dtype}"',
            f'measured = "{c.measured}"',
            "time_us = [" + ", ".join(f"{t * 1e6:.6g}" for t in c.time_s) + "]",
            "factor = [" + ", ".join(f"{f:.6g}" for f in c.factor) + "]",
            f"sigma_log = {c.sigma_log:.4g}",
            f"num_rows = {c.num_rows}",
        ]
    try:
        write_atomic(path, ("\n".join(lines) + "\n").encode(), overwrite=False)
    except FileExistsError:
        raise SpecError("out", str(path), "exists, and nothing is overwritten", "give another file") from None
    except OSError as error:
        raise SpecError("out", str(path), f"cannot be written: {error.strerror}", "give a folder of yours") from None


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else "'" for c in text) + '"'
