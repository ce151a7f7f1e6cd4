"""How wrong predictions of measured steps are.

Errors are signed, predicted / measured - 1. A run that is declined counts as an error of 100 % in its family and as a
miss everywhere else, so declining never pays. The headline is `family_score`: the mean over families (groups of one
source) of the family's median absolute error, families of fewer than 8 runs pooled into one. Ranking looks at groups
of runs that differ by layout alone: Kendall's tau over pairs whose measured times differ by more than 5 % (the noise of
the sources), and the extra time of the layout predicted to be fastest.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WORKLOAD = (
    *("family", "model_name", "num_layers", "hidden_size", "num_heads", "gpu", "num_gpus"),
    *("global_batch", "seq_len", "precision", "task"),
)
"""Runs that agree in these columns differ by layout alone."""
LAYOUT = (
    *("tp", "pp", "vpp", "dp", "cp", "ep", "sequence_parallel", "zero_stage_or_fsdp", "recompute", "micro_batch"),
    *("flash_attention", "overlap_flags"),
)
"""Runs that agree in these too repeat one measurement and count as their mean."""
NOISE = 0.05
"""Relative difference of measured times below which two layouts are not ranked."""
SMALL_FAMILY = 8
"""Families with fewer runs are pooled."""
MIN_LAYOUTS = 4
"""Groups with fewer distinct layouts are not ranked."""
MIN_PAIRS = 3
"""Groups with fewer pairs outside the noise have no tau."""
MIN_INTERVALS = 10
"""Families with fewer predicted runs do not enter interval_worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was predicted for one measured run.

    Attributes:
        cells: the run's columns as text.
        measured_s: measured step time.
        predicted_s: predicted step time; None where declined.
        low_s, high_s: ends of the interval; None where there is none.
        reason: why it was declined.
    """

    cells: Mapping[str, str]
    measured_s: float
    predicted_s: float | None
    low_s: float | None = None
    high_s: float | None = None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Signed relative error; None where declined."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1

    @property
    def relative_width(self) -> float | None:
        """(high - low) / predicted; None without a prediction or a proper interval."""
        if self.predicted_s is None or self.low_s is None or self.high_s is None:
            return None
        return (self.high_s - self.low_s) / self.predicted_s if 0 <= self.low_s <= self.high_s < math.inf else None

    @property
    def hit(self) -> bool:
        """The measured time lies inside the interval."""
        return self.low_s is not None and self.high_s is not None and self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyScore:
    """Errors of one family; `bias` is the median signed error of its predicted runs."""

    num_rows: int
    num_predicted: int
    median_abs_error: float
    mean_abs_error: float
    bias: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of a table; None where there is nothing to score.

    Attributes:
        coverage: share of runs predicted.
        family_score: the headline, see above.
        within_10: share of all runs within 10 %.
        interval_hit: share of predicted runs inside their interval; one without an interval is outside.
        interval_worst: the lowest such share of a family.
        interval_width: median of (high - low) / predicted.
        declined: number of declined runs by reason.
    """

    num_rows: int
    coverage: float
    family_score: float | None
    pooled_median: float | None
    pooled_mean: float | None
    within_10: float | None
    bias: float | None
    ranking_groups: int
    kendall_tau: float | None
    top1_regret: float | None
    interval_rows: int
    interval_hit: float | None
    interval_worst: float | None
    interval_width: float | None
    families: Mapping[str, FamilyScore]
    declined: Mapping[str, int]

    def text(self) -> str:
        """A table for people: families, reasons, then one `name value` a line."""
        lines = [f"{'family':26s} rows  pred  median|err|  mean|err|    bias"]
        for name, family in self.families.items():
            bias = "       -" if family.bias is None else f"{family.bias:+8.1%}"
            counts = f"{family.num_rows:4d} {family.num_predicted:5d}"
            lines.append(f"{name:26s} {counts} {family.median_abs_error:11.1%} {family.mean_abs_error:10.1%} {bias}")
        lines += [f"declined {count:4d} {reason}" for reason, count in self.declined.items()]
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                shown = f"{value:.4f}" if isinstance(value, float) else str(value)
                lines.append(f"{name.removeprefix('num_')} {shown}")
        return "\n".join(lines)


def score(outcomes: Sequence[Outcome]) -> Scores:
    """The scores of `outcomes`."""
    by_family = _families(outcomes)
    families = {name: _family_score(members) for name, members in sorted(by_family.items())}
    errors = [o.error for o in outcomes if o.error is not None]
    groups = [group for group in _layout_groups(outcomes) if len(group) >= MIN_LAYOUTS]
    taus = [tau for tau in map(kendall_tau, groups) if tau is not None]
    predicted = [o for o in outcomes if o.predicted_s is not None]
    widths = [width for o in predicted if (width := o.relative_width) is not None]
    return Scores(
        num_rows=len(outcomes),
        coverage=len(predicted) / len(outcomes) if outcomes else 0.0,
        family_score=_mean(f.median_abs_error for f in families.values()),
        pooled_median=statistics.median(map(abs, errors)) if errors else None,
        pooled_mean=_mean(map(abs, errors)),
        within_10=sum(abs(e) <= 0.10 for e in errors) / len(outcomes) if outcomes else None,
        bias=statistics.median(errors) if errors else None,
        ranking_groups=len(groups),
        kendall_tau=_mean(taus),
        top1_regret=_mean(map(top1_regret, groups)),
        interval_rows=len(widths),
        interval_hit=_share(o.hit for o in predicted) if widths else None,
        interval_worst=_worst_share(predicted) if widths else None,
        interval_width=statistics.median(widths) if widths else None,
        families=families,
        declined=dict(Counter(o.reason or "no reason given" for o in outcomes if o.predicted_s is None).most_common()),
    )


def kendall_tau(group: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation of (predicted, measured) times over pairs outside the noise; None for too few pairs."""
    agree = total = 0
    for index, (predicted_a, measured_a) in enumerate(group):
        for predicted_b, measured_b in group[:index]:
            if max(measured_a, measured_b) / min(measured_a, measured_b) - 1 <= NOISE:
                continue
            total += 1
            order = (predicted_a > predicted_b) - (
                predicted_a < predicted_b
            )  # declined layouts are infinite: no difference
            agree += order * (1 if measured_a > measured_b else -1)
    return agree / total if total >= MIN_PAIRS else None


def top1_regret(group: Sequence[tuple[float, float]]) -> float:
    """Extra measured time of the layout predicted to be fastest, as a fraction; predicted ties count as their mean."""
    fastest = min(predicted for predicted, _ in group)
    chosen = [measured for predicted, measured in group if predicted <= fastest * (1 + 1e-9)]
    return statistics.fmean(chosen) / min(measured for _, measured in group) - 1


def _families(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Runs by family, small families pooled."""
    named: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        named[outcome.cells.get("family", "")].append(outcome)
    families: dict[str, list[Outcome]] = defaultdict(list)
    for name, members in named.items():
        families[name if len(members) >= SMALL_FAMILY else "small families"] += members
    return families


def _family_score(members: Sequence[Outcome]) -> FamilyScore:
    errors = [o.error for o in members if o.error is not None]
    charged = [1.0 if o.error is None else abs(o.error) for o in members]
    return FamilyScore(
        num_rows=len(members),
        num_predicted=len(errors),
        median_abs_error=statistics.median(charged),
        mean_abs_error=statistics.fmean(charged),
        bias=statistics.median(errors) if errors else None,
    )


def _layout_groups(outcomes: Iterable[Outcome]) -> list[list[tuple[float, float]]]:
    """Groups of (predicted, measured) of runs that differ by layout alone, repeats averaged; declined is infinite."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        workload, layout = (tuple(outcome.cells.get(name, "") for name in names) for names in (WORKLOAD, LAYOUT))
        groups[workload][layout].append(outcome)
    return [
        [
            (
                statistics.fmean(math.inf if o.predicted_s is None else o.predicted_s for o in repeats),
                statistics.fmean(o.measured_s for o in repeats),
            )
            for repeats in group.values()
        ]
        for group in groups.values()
    ]


def _worst_share(predicted: Iterable[Outcome]) -> float | None:
    by_family: dict[str, list[bool]] = defaultdict(list)
    for outcome in predicted:
        by_family[outcome.cells.get("family", "")].append(outcome.hit)
    return min((_share(hits) for hits in by_family.values() if len(hits) >= MIN_INTERVALS), default=None)


def _share(values: Iterable[bool]) -> float:
    held = list(values)
    return sum(held) / len(held)


def _mean(values: Iterable[float]) -> float | None:
    held = list(values)
    return statistics.fmean(held) if held else None
