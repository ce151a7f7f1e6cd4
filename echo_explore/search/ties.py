"""Which of the best layouts a prediction cannot tell apart.

Predictions of two layouts of one job share most of their error, so their intervals say too little. What is left was
measured: on pairs of runs that differ by layout alone, how far the two errors lie apart.
"""

import math
from collections.abc import Sequence

from echo_explore.search.ports import TrialRecord

TIE_LOG = 0.146
"""80 % quantile of |log(p1/m1) - log(p2/m2)| over all pairs inside 36 groups of one workload (285 measured runs that
differ by layout alone; scripts/accuracy_report.py, MODEL_VERSION 5, 2026-12-01). Layouts whose predictions differ by
less are tied at that level."""


def num_tied(best: Sequence[TrialRecord]) -> int:
    """How many of the layouts, in order of step time, are tied with the first, itself included; 0 of none."""
    times = [record.outcome.step_time_s for record in best if record.outcome is not None]
    return sum(time <= times[0] * math.exp(TIE_LOG) for time in times)


def tie_line(count: int, listed: int) -> str:
    """One line for people; empty where nothing is tied."""
    if count < 2:
        return ""
    several = "all of these are" if count == listed else f"1 to {count} are"
    return (
        f"{several} tied: 8 of 10 measured pairs of layouts of one job are told apart only from "
        f"{math.exp(TIE_LOG) - 1:.0%} on; break ties by running them"
    )
