"""What a prediction says, with where it comes from and how sure it is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_explore.core.hashing import finite_or_none

INTERVAL_LEVEL = 0.8
"""Probability with which the measured step time should lie inside the interval."""
UNSEEN_SIGMA_LOG = 0.06
"""What residuals of parts do not show: versions of kernels and libraries, stragglers, host work that overlaps nothing.
The spread that measured steps keep beyond their parts (docs/accuracy.md; chosen under MODEL_VERSION 4, 2026-12-01):
79 % of 582 lie inside under MODEL_VERSION 5."""
_NORMAL_QUANTILE = 1.2815515655446004
"""Standard normal quantile of (1 + INTERVAL_LEVEL) / 2 [scipy.stats.norm.ppf(0.9), 2026-11-30]."""


def interval(time_s: float, sigma_log: float) -> tuple[float, float]:
    """Ends of the interval around a predicted time, in seconds."""
    width = math.exp(_NORMAL_QUANTILE * sigma_log)
    return time_s / width, time_s * width


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted step of one candidate; keys and units in docs/outputs.md.

    Attributes:
        step_time_s: predicted time of one training step.
        step_sigma_log: standard deviation of the log of the step time: the residuals of the parts and UNSEEN_SIGMA_LOG.
        memory: bytes by stage and part.
        memory_details: what the parts of each stage consist of.
        breakdown: seconds by cause; the parts add up to step_time_s.
        references: the models used, with versions.
        explanation: critical path, exposed transfers and bubbles, if asked for.
    """

    label: str
    step_time_s: float
    step_sigma_log: float
    tokens_per_s: float
    mfu: float
    mfu_causal: float
    hfu: float
    peak_memory_bytes: float
    reserved_memory_bytes: float
    memory_capacity_bytes: float
    memory: tuple[Mapping[str, float | int], ...]
    breakdown: Mapping[str, float]
    num_ranks: int
    num_rank_classes: int
    num_simulated_ops: int
    num_micro_batches: int
    fidelity: str
    elapsed: Mapping[str, float]
    versions: Mapping[str, Any]
    references: tuple[str, ...]
    warnings: tuple[str, ...]
    explanation: Mapping[str, Any] | None = None
    memory_details: tuple[Mapping[str, Any], ...] = ()

    @property
    def fits(self) -> bool:
        """The peak of every stage is within a GPU's memory."""
        return self.peak_memory_bytes <= self.memory_capacity_bytes

    @property
    def step_time_low_s(self) -> float:
        """Lower end of the interval."""
        return interval(self.step_time_s, self.step_sigma_log)[0]

    @property
    def step_time_high_s(self) -> float:
        """Upper end of the interval."""
        return interval(self.step_time_s, self.step_sigma_log)[1]

    def to_json(self) -> dict[str, Any]:
        """The object that `predict --json` prints."""
        names = (
            "label",
            "step_time_s",
            "step_time_low_s",
            "step_time_high_s",
            "tokens_per_s",
            "mfu",
            "mfu_causal",
            "hfu",
            "peak_memory_bytes",
            "reserved_memory_bytes",
            "memory_capacity_bytes",
            "fits",
            "num_ranks",
            "num_rank_classes",
            "num_simulated_ops",
            "num_micro_batches",
            "fidelity",
        )
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values = {k: finite_or_none(v) if isinstance(v, float) else v for k, v in values.items()}
        return values | {
            "interval_level": INTERVAL_LEVEL,
            "memory": [dict(stage) for stage in self.memory],
            "memory_details": [dict(stage) for stage in self.memory_details],
            "breakdown": dict(self.breakdown),
            "elapsed_s": dict(self.elapsed),
            "versions": dict(self.versions),
            "references": list(self.references),
            "warnings": list(self.warnings),
            **({"explanation": dict(self.explanation)} if self.explanation is not None else {}),
        }
