"""What a search needs from the rest of the program, and what it passes around.

A search knows nothing of simulators: it proposes points, asks an `Evaluator` (here, or in Ray actors) and keeps books.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from echo_explore.search.point import SearchPoint
from echo_explore.tracing.request import TraceRequest

PARTS_OF_COMPUTE: Final = ("recompute_s", "interference_s", "straggler_s")
"""Keys of a breakdown that are parts of `compute_s`; the others add up to the step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What no evaluation of a point can be below, known without a trace.

    Attributes:
        step_time_s: at most the predicted step time.
        peak_memory_bytes: at most the predicted peak of the fullest GPU.
        memory_capacity_bytes: what one GPU has.
    """

    step_time_s: float
    peak_memory_bytes: float
    memory_capacity_bytes: float

    @property
    def memory_overshoot(self) -> float:
        """Memory over capacity minus 1; above 0 the point cannot fit."""
        return self.peak_memory_bytes / self.memory_capacity_bytes - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an evaluation found.

    Attributes:
        step_time_low_s: lower end of the interval that the prediction carries.
        step_time_high_s: upper end of it.
        breakdown: seconds of the step by cause; those outside `PARTS_OF_COMPUTE` add up to step_time_s.
        memory: bytes at the peak by part.
        warnings: what the prediction warns of.
    """

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    mfu: float
    mfu_causal: float
    hfu: float
    tokens_per_s: float
    peak_memory_bytes: float
    memory_capacity_bytes: float
    breakdown: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def memory_overshoot(self) -> float:
        """Peak memory over capacity minus 1; at most 0 if it fits."""
        return self.peak_memory_bytes / self.memory_capacity_bytes - 1.0

    @property
    def fits(self) -> bool:
        """Whether the peak is within capacity."""
        return self.memory_overshoot <= 0.0


class Evaluator(Protocol):
    """Evaluates points of one search space; the same point gives the same outcome everywhere."""

    def evaluate(self, point: SearchPoint) -> Outcome:
        """The outcome of a legal point; may make the trace that it needs."""

    def lower_bounds(self, point: SearchPoint) -> Bounds:
        """Bounds of a legal point, in well under a millisecond and without a trace."""

    def trace_request(self, point: SearchPoint) -> TraceRequest:
        """The trace that the point needs."""

    def make_trace(self, request: TraceRequest) -> None:
        """Put that trace into this machine's trace cache, if it is not there."""

    def load_trace(self, request: TraceRequest) -> bytes | None:
        """The trace file in this machine's cache, as bytes; None if it is not there."""

    def store_trace(self, request: TraceRequest, artefact: bytes) -> None:
        """Put a trace file that another machine made into this machine's cache."""

    def write_timeline(self, point: SearchPoint, path: Path) -> None:
        """Write the timeline of a point to a file that Perfetto opens."""

    def close(self) -> None:
        """End the processes that it started."""


class EvaluatorFactory(Protocol):
    """Makes the evaluator in whatever process needs one; small and picklable."""

    def identity(self) -> dict[str, str]:
        """Names and hashes of what moves outcomes and is not in the space: calibration, model references."""

    def shared(self) -> object:
        """Compute, collective and interference models, loaded once and shared by all evaluators."""

    def build(self, shared: object) -> Evaluator:
        """An evaluator that uses the shared models."""


State = Literal["evaluated", "bounded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """What the ledger says of one trial.

    Attributes:
        trial: number, from 0 without gaps.
        state: `evaluated`; `bounded`: cannot be feasible and better than what was known; `failed`: a crash of ours.
        values: of the objectives; where bounded, their lower bounds; empty where failed.
        memory_overshoot: peak memory over capacity minus 1 (where bounded: of the bound); above 0 is infeasible.
        reason: where bounded: `objective` or `memory`; where failed: the cause.
        outcome: where evaluated.
    """

    trial: int
    point: SearchPoint
    state: State
    values: tuple[float, ...] = ()
    memory_overshoot: float = 0.0
    reason: str = ""
    outcome: Outcome | None = None

    @property
    def feasible(self) -> bool:
        """Evaluated, and it fits."""
        return self.state == "evaluated" and self.memory_overshoot <= 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What a pool hands back for one trial: an outcome or a cause."""

    trial: int
    outcome: Outcome | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """What a pool is doing, for the progress line."""

    num_workers: int
    num_traces_made: int
    num_traces_wanted: int
    num_running: int


class Pool(Protocol):
    """Evaluates points somewhere. Evaluation is at least once; the driver counts each trial once."""

    def submit(self, trial: int, point: SearchPoint) -> None:
        """Take on a trial; returns at once."""

    def wait(self, timeout_s: float) -> Sequence[Completed]:
        """Trials that ended, in any order; empty if none did within about `timeout_s`."""

    def status(self) -> PoolStatus:
        """What it is doing."""

    def bring_trace(self, point: SearchPoint) -> None:
        """See to it that the driver's machine has the trace of a point that was evaluated."""

    def close(self) -> None:
        """Give everything back; no process stays behind."""


class Proposer(Protocol):
    """Says which point is tried next, from what it was told."""

    def propose(self, trial: int) -> SearchPoint | None:
        """The point of this trial; None when there is nothing left to try."""

    def tell(self, record: TrialRecord) -> None:
        """Learn the result of a trial; called in trial order."""


class Mirror(Protocol):
    """A view of the ledger kept somewhere else."""

    def offer(self, records: Sequence[TrialRecord]) -> None:
        """Take records that the ledger holds; returns at once."""

    def close(self) -> None:
        """Write what is left."""
