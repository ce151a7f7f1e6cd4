"""Predictions beside a table of measured kernels, and how wrong they are by group."""

import csv
import gzip
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from echo_explore.compute import Calibration
from echo_explore.compute.chip import Chip
from echo_explore.compute.kernel_table import KernelTable, read_kernel_table
from echo_explore.compute.table_times import TableTimes, table_times
from echo_explore.core import SpecError
from echo_explore.core.files import write_atomic

Floats = npt.NDArray[np.float64]
SMALLEST_SCORED_US = 10.0
"""Shorter kernels are launches; the tables scatter by the clock of the timer there."""
FAR_OFF = 20.0
"""Rows this many times off are of another unit rather than of a kernel that the model misses: 90,000 rows of our tables
are within 10, but for differences of two kernels (2026-12-01)."""
LARGE_FLOP = 1e11
"""Products of training steps are of this size and above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """Relative errors of one group; a declined row counts as 100 %.

    Attributes:
        num_rows: rows of at least 10 us.
        coverage_fraction: share of them that was predicted.
        median, mean, p90: of the absolute error.
        bias: median signed error.
        large_mean: mean absolute error of products of 1e11 FLOP and more; NaN without any.
    """

    num_rows: int
    coverage_fraction: float
    median: float
    mean: float
    p90: float
    bias: float
    large_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelScores:
    """Scores by group, and what was left out.

    Attributes:
        groups: by name.
        num_rows: rows of the table.
        num_short: rows with a time below 10 us.
        untimed: numbers in the file of the rows without a time above 0.
        far_off: of the rows whose time is more than 20 times off the prediction.
        num_declined: rows without a prediction.
        num_fallbacks: rows priced by the roofline alone.
        reasons: why rows were declined, with their number.
    """

    groups: Mapping[str, GroupScore]
    num_rows: int
    num_short: int
    untimed: Sequence[int]
    far_off: Sequence[int]
    num_declined: int
    num_fallbacks: int
    reasons: Mapping[str, int]

    @property
    def mean_of_means(self) -> float:
        """Mean over groups of their mean error: every group counts the same."""
        return float(np.mean([g.mean for g in self.groups.values()])) if self.groups else float("nan")

    def text(self) -> str:
        """A table for people."""
        lines = [f"{'group':44s}    rows  cover  median    mean     p90    bias   large"]
        for name, g in self.groups.items():
            large = "      -" if np.isnan(g.large_mean) else f"{g.large_mean:7.1%}"
            lines.append(
                f"{name:44.44s} {g.num_rows:7d} {g.coverage_fraction:6.1%} {g.median:7.1%} {g.mean:7.1%} {g.p90:7.1%} "
                f"{g.bias:+7.1%} {large}"
            )
        if self.groups:
            lines.append(f"mean over groups of the mean error: {self.mean_of_means:.1%}")
        else:
            lines.append(f"no score: no row has a time of {SMALLEST_SCORED_US:.0f} us or more")
        lines.append(
            f"{self.num_rows} rows, {self.num_short} below {SMALLEST_SCORED_US:.0f} us"
            f", {len(self.untimed)} without a time"
            f", {self.num_declined} declined, {self.num_fallbacks} by the roofline alone"
        )
        if self.untimed:
            lines.append(f"latency_us is empty or not above 0 in {_listed(self.untimed)}: predicted, not scored")
        if self.far_off:
            lines.append(
                f"warning: latency_us is more than {FAR_OFF:.0f} times off the prediction in {_listed(self.far_off)}: "
                "all times must be in microseconds"
            )
        lines += [f"declined {count}: {reason}" for reason, count in self.reasons.items()]
        return "\n".join(lines)


def validate_kernels(
    measured: Path,
    out: Path,
    calibration: Calibration,
    *,
    chips: Mapping[str, Chip] | None = None,
    allow_fallback: bool = False,
) -> KernelScores:
    """Predict every row of a table, write the table with `predicted_us` and `reason`, and score it.

    Args:
        measured: CSV or CSV.gz; columns in docs/compute_model.md.
        out: file to write; must not exist.
        calibration: of the compute model.
        chips: GPUs of your own by the name in the table.
        allow_fallback: price rows without a model by the roofline.

    Raises:
        SpecError: the table or `out` is wrong, or no row has a measured time.
    """
    if out.exists():
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file")
    table = read_kernel_table(measured)
    latency = table.latency_us()
    if not (latency > 0).any():
        raise SpecError(f"{table.name}: latency_us", 0, "no row has a measured time above 0", "measure again")
    times = table_times(table, calibration, chips=chips, allow_fallback=allow_fallback)
    _write(out, table, times)
    return _scores(table, times, latency)


def _scores(table: KernelTable, times: TableTimes, latency: Floats) -> KernelScores:
    names = ["gpu", "dtype", *({"attention": ("kv_dtype", "pass")}.get(table.kind, ()))]
    words = zip(*(table.text(name) for name in names), strict=True)
    groups: dict[str, list[int]] = defaultdict(list)
    for row, word in enumerate(words):
        if latency[row] >= SMALLEST_SCORED_US:
            groups[" ".join(w or "-" for w in word)].append(row)
    flop = np.zeros(table.num_rows)
    if table.kind == "gemm":
        flop = 2.0 * np.prod([table.numbers(name) for name in ("batch", "m", "n", "k")], axis=0)
    predicted = np.nan_to_num(times.predicted_s * 1e6, nan=0.0)
    reasons: dict[str, int] = defaultdict(int)
    for reason in times.reason.values():
        reasons[reason] += 1
    return KernelScores(
        groups={name: _score(np.array(groups[name]), predicted, latency, flop) for name in sorted(groups)},
        num_rows=table.num_rows,
        num_short=int(((latency > 0) & (latency < SMALLEST_SCORED_US)).sum()),
        untimed=(np.flatnonzero(latency <= 0) + 2).tolist(),
        far_off=(np.flatnonzero((latency > 0) & (predicted > 0) & ~_near(predicted, latency)) + 2).tolist(),
        num_declined=len(times.reason),
        num_fallbacks=times.num_fallbacks,
        reasons=dict(reasons),
    )


def _near(predicted: Floats, latency: Floats) -> npt.NDArray[np.bool_]:
    return (predicted < FAR_OFF * latency) & (latency < FAR_OFF * predicted)


def _listed(rows: Sequence[int]) -> str:
    """`2 rows (2, 5)`; no more than five of them by number."""
    more = ", ..." if len(rows) > 5 else ""
    return f"{len(rows)} rows (row {', '.join(map(str, rows[:5]))}{more})"


def _score(
    rows: npt.NDArray[np.intp],
    predicted: Floats,
    latency: Floats,
    flop: Floats,
) -> GroupScore:
    signed = predicted[rows] / latency[rows] - 1
    error = np.abs(signed)
    large = flop[rows] >= LARGE_FLOP
    covered = predicted[rows] > 0
    return GroupScore(
        num_rows=rows.size,
        coverage_fraction=float(covered.mean()),
        median=float(np.median(error)),
        mean=float(error.mean()),
        p90=float(np.percentile(error, 90)),
        bias=float(np.median(signed[covered])) if covered.any() else -1.0,
        large_mean=float(error[large].mean()) if large.any() else float("nan"),
    )


def _write(out: Path, table: KernelTable, times: TableTimes) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    kept = [name for name in table.columns if name not in ("predicted_us", "reason")]
    writer.writerow([*kept, "predicted_us", "reason"])
    cells = zip(*(table.columns[name] for name in kept), strict=True)
    for row, (values, seconds) in enumerate(zip(cells, times.predicted_s.tolist(), strict=True)):
        shown = "" if row in times.reason else f"{seconds * 1e6:.6g}"
        writer.writerow([*values, shown, times.reason.get(row, "")])
    data = buffer.getvalue().encode()
    try:
        write_atomic(out, gzip.compress(data, 6, mtime=0) if out.suffix == ".gz" else data, overwrite=False)
    except FileExistsError:
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file") from None
    except OSError as error:
        raise SpecError("out", str(out), f"cannot be written: {error.strerror}", "give a folder of yours") from None
