"""What one scalar a GPU type would change: the only fit to step times, shown beside the headline and never shipped."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echo_explore.validation import Outcome

SCALARS = tuple(round(0.70 + 0.01 * i, 2) for i in range(91))
"""Factors on the time of kernels that are tried: a sustained clock of 1 / factor of what the model takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A scored run and how much of its predicted step is kernels.

    Attributes:
        outcome: measured and predicted.
        compute_s: predicted time of kernels.
    """

    outcome: Outcome
    compute_s: float

    @property
    def gpu(self) -> str:
        """The GPU type, as the table names it."""
        return self.outcome.cells["gpu"]

    @property
    def family(self) -> str:
        """The source."""
        return self.outcome.cells["family"]

    def scaled(self, factor: float) -> Outcome:
        """The outcome with the time of kernels multiplied."""
        if self.outcome.predicted_s is None:
            return self.outcome
        change = (self.outcome.predicted_s + (factor - 1.0) * self.compute_s) / self.outcome.predicted_s
        low, high = self.outcome.low_s, self.outcome.high_s
        return replace(
            self.outcome,
            predicted_s=self.outcome.predicted_s * change,
            low_s=None if low is None else low * change,
            high_s=None if high is None else high * change,
        )


def fit_scalars(runs: Sequence[Run]) -> dict[str, float]:
    """For each GPU type the factor with the least error: mean over families of the median |log predicted/measured|."""
    by_gpu: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.outcome.predicted_s is not None:
            by_gpu[run.gpu][run.family].append(run)

    def error(families: Mapping[str, Sequence[Run]], factor: float) -> float:
        return statistics.mean(
            statistics.median(
                abs(math.log((scaled.predicted_s or math.inf) / scaled.measured_s))
                for scaled in (run.scaled(factor) for run in family)
            )
            for family in families.values()
        )

    return {gpu: min(SCALARS, key=lambda f: (error(families, f), abs(f - 1.0))) for gpu, families in by_gpu.items()}


def fitted(runs: Sequence[Run], scalars: Mapping[str, float]) -> list[Outcome]:
    """The outcomes under the scalars; GPU types without one keep 1."""
    return [run.scaled(scalars.get(run.gpu, 1.0)) for run in runs]


def leave_one_family_out(runs: Sequence[Run]) -> list[Outcome]:
    """The outcomes of every family under scalars that were fitted without it."""
    left_out: list[Outcome] = []
    for family in sorted({run.family for run in runs}):
        scalars = fit_scalars([run for run in runs if run.family != family])
        left_out += fitted([run for run in runs if run.family == family], scalars)
    return left_out
