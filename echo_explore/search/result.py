"""What a search found: the best layouts, what was covered, and where everything lies."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echo_explore.core import format_bytes, format_seconds
from echo_explore.search.driver import Ending
from echo_explore.search.failures import standing_failures
from echo_explore.search.objective import best_of, format_objective, time_unit
from echo_explore.search.ports import PARTS_OF_COMPUTE, TrialRecord
from echo_explore.search.ties import num_tied, tie_line

NUM_BEST = 10
"""Layouts in the table."""
EXIT_FOUND, EXIT_NOTHING, EXIT_INTERRUPTED = 0, 1, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Legal points by what became of them.

    Attributes:
        num_bounded: bounded away, with a trial of their own or (samplers) without.
        num_over_memory: of these, because they cannot fit.
        num_infeasible: evaluated, and over memory.
        num_failed: whose last trial failed.
    """

    num_legal: int
    num_evaluated: int
    num_bounded: int
    num_over_memory: int
    num_infeasible: int
    num_failed: int

    @property
    def covers_all(self) -> bool:
        """Every legal point was evaluated or bounded away."""
        return self.num_evaluated + self.num_bounded == self.num_legal


def count_trials(
    records: Sequence[TrialRecord], *, num_legal: int, num_untried_over_memory: int, num_untried_worse: int
) -> Counts:
    """The counts of a study.

    Args:
        records: its trials.
        num_legal: legal points of the space.
        num_untried_over_memory: points without a trial whose memory bound is above capacity.
        num_untried_worse: points without a trial whose bounds the best trials beat.
    """
    bounded = [record for record in records if record.state == "bounded"]
    evaluated = [record for record in records if record.state == "evaluated"]
    return Counts(
        num_legal=num_legal,
        num_evaluated=len(evaluated),
        num_bounded=len(bounded) + num_untried_over_memory + num_untried_worse,
        num_over_memory=sum(record.reason == "memory" for record in bounded) + num_untried_over_memory,
        num_infeasible=sum(not record.feasible for record in evaluated),
        num_failed=len(standing_failures(records)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The state of a study when the command ended.

    Attributes:
        ending: why it ended.
        certified: every legal point was evaluated or bounded away, and no bound was seen to fail.
        best: feasible trials, best first, at most `NUM_BEST`; with several objectives the Pareto front.
        timeline: file with the timeline of the best; None if there is none.
        next_command: how to go on where the study is not finished.
    """

    study: str
    folder: Path
    header: Mapping[str, Any]
    objectives: tuple[str, ...]
    counts: Counts
    ending: Ending
    certified: bool
    best: tuple[TrialRecord, ...]
    failures: tuple[str, ...]
    timeline: Path | None
    storage: str
    next_command: str = ""

    @property
    def exit_code(self) -> int:
        """0 found, 1 nothing feasible (or stopped by failures), 130 interrupted."""
        if self.ending == "interrupted":
            return EXIT_INTERRUPTED
        return EXIT_FOUND if self.best and self.ending != "failures" else EXIT_NOTHING

    def certificate(self) -> str:
        """One line: what was covered, and what follows."""
        counts = self.counts
        fit = counts.num_over_memory
        parts = f"{counts.num_evaluated:,} evaluated, {counts.num_bounded:,} bounded away ({fit:,} of them over memory)"
        line = f"{counts.num_legal:,} legal points: {parts}"
        if counts.num_failed:
            line += f", {counts.num_failed:,} failed"
        if counts.covers_all and not self.certified:
            return f"{line}; but a bound exceeded an evaluation, so this is no certificate: please report it"
        if not self.certified:
            left = counts.num_legal - counts.num_evaluated - counts.num_bounded
            return f"{line}; {left:,} left, so a better one may exist"
        if not self.best:
            return f"{line}; none of them fits"
        if len(self.objectives) > 1:
            return f"{line}; none of the others fits and improves on one below in every objective"
        name = self.objectives[0]
        better = {"step_time_s": "faster", "cost_usd": "cheaper"}.get(name, "better")
        return f"{line}; none of them can fit and be {better} than {format_objective(name, self.best[0].values[0])}"

    @property
    def num_tied(self) -> int:
        """Of the best by step time, how many predictions cannot tell from the first; 0 with other objectives."""
        return num_tied(self.best) if self.objectives == ("step_time_s",) else 0

    def _nothing(self) -> str:
        """What to say where there is no best."""
        if self.certified:
            return "no layout fits"
        return "none of those evaluated fits" if self.counts.num_evaluated else "no layout was evaluated"

    def to_json(self) -> dict[str, Any]:
        """The object that `search --json` prints."""
        return {
            "study": self.study,
            "folder": str(self.folder),
            "ledger": str(self.folder / "ledger.jsonl"),
            "storage": self.storage,
            "objectives": list(self.objectives),
            "ending": self.ending,
            "certified": self.certified,
            "certificate": self.certificate(),
            "counts": asdict(self.counts),
            "best": [record_row(record, self.objectives) for record in self.best],
            "num_tied": self.num_tied,
            "failures": list(self.failures),
            "timeline": str(self.timeline) if self.timeline else None,
            "header": dict(self.header),
        }

    def to_text(self) -> str:
        """The table of the best, the certificate and the paths, for people."""
        lines = [table(self.best, self.objectives) if self.best else self._nothing()]
        if line := tie_line(self.num_tied, len(self.best)):
            lines.append(line)
        lines.append(self.certificate())
        lines += [f"failed: {cause}" for cause in self.failures]
        if self.timeline:
            lines.append(f"timeline of the best (open in ui.perfetto.dev): {self.timeline}")
        lines.append(f"study {self.study}: {self.folder}")
        if self.next_command:
            lines.append(self.next_command)
        return "\n".join(lines)


def best_trials(records: Sequence[TrialRecord], objectives: Sequence[str]) -> tuple[TrialRecord, ...]:
    """Feasible trials, best first; with several objectives those of the Pareto front."""
    feasible = [record for record in records if record.feasible]
    if len(objectives) > 1:
        front = set(best_of(record.values for record in feasible))
        feasible = [record for record in feasible if record.values in front]
    ordered = sorted(feasible, key=lambda record: (record.values, record.point.order))
    return tuple(ordered[:NUM_BEST]) if len(objectives) == 1 else tuple(ordered)


def format_interval(low_s: float, high_s: float) -> str:
    """An interval of times for people, in one unit."""
    unit, scale = time_unit(low_s)
    return f"{low_s * scale:.2f}..{high_s * scale:.2f} {unit}"


def record_row(record: TrialRecord, objectives: Sequence[str]) -> dict[str, Any]:
    """One evaluated trial as a flat JSON object."""
    assert record.outcome is not None
    outcome = asdict(record.outcome)
    row: dict[str, Any] = {"trial": record.trial, "label": record.point.label(), "params": record.point.params()}
    row |= {"data_parallel": record.point.data_parallel} | outcome | {"fits": record.feasible}
    return row | dict(zip(objectives, record.values, strict=True)) | {"memory_overshoot": record.memory_overshoot}


def table(records: Sequence[TrialRecord], objectives: Sequence[str]) -> str:
    """Rank, layout, step time with its interval, MFU, memory, and the breakdown in per cent of the step.

    Causes in brackets are parts of compute.
    """
    extra = [name for name in objectives if name != "step_time_s"]
    causes = _causes(records)
    head = ["#", "layout", "step time", "interval", "MFU", "memory", *extra]
    rows = [[*head, *(_title(name) for name in causes)]]
    for rank, record in enumerate(records, start=1):
        outcome = record.outcome
        assert outcome is not None
        values = dict(zip(objectives, record.values, strict=True))
        interval = format_interval(outcome.step_time_low_s, outcome.step_time_high_s)
        row = [str(rank), record.point.label(), format_seconds(outcome.step_time_s), interval, f"{outcome.mfu:.1%}"]
        row += [format_bytes(outcome.peak_memory_bytes), *(format_objective(n, values[n]) for n in extra)]
        row += [f"{outcome.breakdown.get(name, 0.0) / outcome.step_time_s:.1%}" for name in causes]
        rows.append(row)
    return align(rows)


def _causes(records: Sequence[TrialRecord]) -> list[str]:
    """Causes that took time in any of the records, the largest share of the first record first."""
    shares: dict[str, float] = {}
    for record in records:
        assert record.outcome is not None
        for name, value in sorted(record.outcome.breakdown.items()):
            if value > 0.0:
                shares.setdefault(name, value if record is records[0] else 0.0)
    return sorted(shares, key=lambda name: (name in PARTS_OF_COMPUTE, -shares[name], name))


def _title(cause: str) -> str:
    name = cause.removesuffix("_s")
    return f"({name})" if cause in PARTS_OF_COMPUTE else name


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text with columns of equal width; the second column is left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i == 1 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
