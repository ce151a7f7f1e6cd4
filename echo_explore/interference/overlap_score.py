"""How wrong predicted slowdowns of measured kernels are, by GPU and class of kernel."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from echo_explore.interference.measured import MeasuredOverlap

MIN_ALONE_S = 20e-6
"""Shorter kernels are not judged: their times are mostly noise of the profiler."""
MIN_OVERLAP_FRACTION = 0.5
MIN_SLOWDOWN = 0.9
"""A kernel that got faster than this was another shape under the same name."""
MIN_LAUNCHES = 5
"""Launches each way of a mean that counts; tables of single launches count as a whole."""
MIN_ROWS = 5
"""Smaller groups are not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """Mean |log(predicted / measured)| of one group.

    Attributes:
        model: of the predictions; a row without one counts as log 10.
        none: of no slowdown at all.
        constant: of the constant that is best for this group, its median slowdown.
    """

    gpu: str
    kernel_class: str
    num_rows: int
    model: float
    none: float
    constant: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapScore:
    """Scores of all groups."""

    groups: tuple[GroupScore, ...]

    @property
    def model(self) -> float:
        """Mean over groups; nan where there are none."""
        return statistics.fmean(group.model for group in self.groups) if self.groups else math.nan

    @property
    def none(self) -> float:
        """The same of no slowdown at all."""
        return statistics.fmean(group.none for group in self.groups) if self.groups else math.nan

    def text(self) -> str:
        """A table, and the means."""
        if not self.groups:
            return f"no score: no group of GPU and class has {MIN_ROWS} rows that count"
        lines = [f"{'gpu':26s} {'class':12s} rows   model    none  median"]
        lines += [
            f"{g.gpu:26.26s} {g.kernel_class:12.12s} {g.num_rows:4d} {g.model:7.3f} {g.none:7.3f} {g.constant:7.3f}"
            for g in self.groups
        ]
        return "\n".join([*lines, f"mean over groups: {self.model:.4f}; no slowdown: {self.none:.4f}"])


def judged(row: MeasuredOverlap, *, single: bool) -> bool:
    """Whether the row counts.

    Args:
        row: measured.
        single: its source lists single launches, not means over launches.
    """
    return not why_not(row, single=single)


def why_not(row: MeasuredOverlap, *, single: bool) -> str:
    """Why the row does not count, as a rule; empty if it does. A table without columns of launches has enough."""
    counts = [row.cells[name].strip() for name in ("n_alone", "n_overlap") if name in row.cells]
    rules = (
        (row.slowdown >= MIN_SLOWDOWN, f"slowdown must be given, {MIN_SLOWDOWN:g} or more"),
        (row.alone_s >= MIN_ALONE_S * (1 - 1e-9), f"alone_us must be {MIN_ALONE_S * 1e6:g} or more"),  # its decimals
        (row.overlap_fraction >= MIN_OVERLAP_FRACTION, f"overlap_ratio must be {MIN_OVERLAP_FRACTION:g} or more"),
        (
            single or all(count and float(count) >= MIN_LAUNCHES for count in counts),
            f"n_alone and n_overlap must be {MIN_LAUNCHES} or more",
        ),
    )
    return next((rule for holds, rule in rules if not holds), "")


def judged_rows(rows: Sequence[MeasuredOverlap]) -> list[int]:
    """Numbers of the rows that count."""
    single = single_launch_sources(rows)
    return [i for i, row in enumerate(rows) if judged(row, single=row.cells.get("source", "") in single)]


def reasons_not(rows: Sequence[MeasuredOverlap]) -> str:
    """Why rows do not count, most frequent first: `2 rows (row 1 first): alone_us must be ...`; empty if all do."""
    single = single_launch_sources(rows)
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows, start=1):
        rule = why_not(row, single=row.cells.get("source", "") in single)
        if rule:
            found.setdefault(rule, []).append(number)
    most = sorted(found.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{len(numbers)} rows (first row {numbers[0]}): {rule}" for rule, numbers in most)


def single_launch_sources(rows: Sequence[MeasuredOverlap]) -> set[str]:
    """Sources of at least 50 rows that list single launches only, in the order in which they ran."""
    seen: dict[str, list[bool]] = {}
    for row in rows:
        seen.setdefault(row.cells.get("source", ""), []).append(row.is_single_launch)
    return {source for source, singles in seen.items() if all(singles) and len(singles) >= 50}


def score_overlap(
    rows: Sequence[MeasuredOverlap], predicted: Sequence[float], *, all_count: bool = False
) -> OverlapScore:
    """The scores of predicted slowdowns, one a row (nan: none given); with `all_count`, rows were chosen already."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for i in range(len(rows)) if all_count else judged_rows(rows):
        guess = float(predicted[i])
        truth = math.log(rows[i].slowdown)
        log_guess = math.log(guess) if 0 < guess < math.inf else truth + math.log(10)
        groups.setdefault((rows[i].cells["gpu"], rows[i].cells["compute_class"]), []).append((truth, log_guess))
    return OverlapScore(
        groups=tuple(
            _group(gpu, kind, pairs) for (gpu, kind), pairs in sorted(groups.items()) if len(pairs) >= MIN_ROWS
        )
    )


def _group(gpu: str, kind: str, pairs: Sequence[tuple[float, float]]) -> GroupScore:
    middle = statistics.median(truth for truth, _ in pairs)
    return GroupScore(
        gpu=gpu,
        kernel_class=kind,
        num_rows=len(pairs),
        model=statistics.fmean(abs(truth - guess) for truth, guess in pairs),
        none=statistics.fmean(abs(truth) for truth, _ in pairs),
        constant=statistics.fmean(abs(truth - middle) for truth, _ in pairs),
    )
