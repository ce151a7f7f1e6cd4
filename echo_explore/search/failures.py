"""Failed trials: which points still stand as failed, and when a study has too many of them.

A point is proposed once. A later trial of a point that had failed is a retry, with a number of its own; the last trial
of a point is what counts.
"""

import math
from collections.abc import Sequence
from typing import Final

from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import TrialRecord

MAX_FAILURES: Final = 3
"""Failures of different candidates after which a study stops."""
MAX_FAILURE_FRACTION: Final = 0.05
"""Failures over planned trials at which it stops even before: one is enough where 20 trials or fewer are planned."""


def standing_failures(records: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Of each point whose last trial failed, that trial; in trial order."""
    failed = {record.point for record in records if record.state == "failed"}
    last = {record.point: record for record in records if record.point in failed} if failed else {}
    return tuple(sorted((r for r in last.values() if r.state == "failed"), key=lambda r: r.trial))


def too_many(records: Sequence[TrialRecord], *, forgiven: frozenset[SearchPoint], num_planned: int) -> bool:
    """Whether the study should stop.

    Args:
        records: its trials.
        forgiven: points whose failures do not count.
        num_planned: trials that it would have.
    """
    failed = {record.point for record in standing_failures(records)} - forgiven
    return len(failed) >= max(1, min(MAX_FAILURES, math.ceil(MAX_FAILURE_FRACTION * num_planned)))
