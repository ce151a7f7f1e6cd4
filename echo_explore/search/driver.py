"""The driver: proposes trials, prunes by bounds, collects results in any order and counts them in trial order.

Trial n is proposed, and bounded away or not, from the results of trials <= n - window alone. So the study is a function
of space, seed and window: one process and a cluster of any size give the same trials. A study that was interrupted is
continued by the same loop: results that the ledger holds take the place of evaluations. Where failures are retried, the
retries are the next trials after those that the ledger holds, before anything new is proposed.
"""

import collections
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from echo_explore.core import StudyError
from echo_explore.search.enumerate import BoundedPoint, EnumerateProposer
from echo_explore.search.failures import standing_failures, too_many
from echo_explore.search.ledger import Ledger
from echo_explore.search.objective import add_to_front, dominates, format_objective, objective_values
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Completed, Mirror, Pool, Proposer, TrialRecord
from echo_explore.search.progress import Progress, ProgressState
from echo_explore.specs import ClusterSpec

logger = logging.getLogger(__name__)

_WAIT_S = 0.2

Ending = Literal["exhausted", "trials", "failures", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """What a driver needs to know of the study.

    Attributes:
        num_legal: legal points of the space.
        max_trials: trials after which the study ends; None: when nothing is left to try.
        window: trials by which proposals lag behind results.
        retry_failures: evaluate again what the ledger holds as failed; what failed once does not stop the study.
    """

    num_legal: int
    max_trials: int | None
    window: int
    objectives: tuple[str, ...]
    retry_failures: bool = False


class Driver:
    """One study's driver."""

    def __init__(
        self,
        options: DriverOptions,
        *,
        cluster: ClusterSpec,
        ledger: Ledger,
        proposer: Proposer,
        bounds: Callable[[SearchPoint], BoundedPoint],
        pool: Pool,
        mirror: Mirror,
        progress: Progress,
        stop: Callable[[], bool],
    ) -> None:
        self._options = options
        self._cluster = cluster
        self._ledger = ledger
        self._proposer = proposer
        self._bounds = bounds
        self._pool = pool
        self._mirror = mirror
        self._progress = progress
        self._stop = stop
        self._replay = tuple(ledger.records)
        failed = [record.point for record in standing_failures(self._replay)] if options.retry_failures else []
        self._retries = collections.deque(failed)
        self._forgiven = frozenset(record.point for record in self._replay if record.state == "failed")
        self._failed: set[SearchPoint] = set()  # of the trials gone through again
        self._num_retries = 0
        self._points: list[SearchPoint] = []  # of every proposed trial
        self._ready: dict[int, TrialRecord] = {}  # ended but not yet counted
        self._num_told = 0
        self._front: list[tuple[float, ...]] = []  # feasible objective values of told trials
        self._exhausted = False

    @property
    def records(self) -> list[TrialRecord]:
        """Trials counted so far: those of the ledger."""
        return self._ledger.records

    def run(self) -> Ending:
        """Run to an end; everything counted by then is in the ledger.

        Raises:
            StudyError: the ledger cannot be continued: it holds other trials than this search proposes.
        """
        if self._replay:
            self._mirror.offer(self._replay)
        while True:
            self._propose()
            self._count()
            if self._too_many_failures():
                return "failures"
            if self._finished() and not self._retries and self._num_proposed == len(self.records):
                return "exhausted" if self._exhausted else "trials"
            if self._stop():
                return "interrupted"
            if self._can_propose():
                continue
            for completed in self._pool.wait(_WAIT_S):
                if self._stop() and completed.outcome is None:
                    continue  # an evaluation cut short by the interrupt did not fail
                self._take(completed)
            self._show()

    @property
    def _num_proposed(self) -> int:
        return len(self._points)

    def _finished(self) -> bool:
        limit = self._options.max_trials
        if limit is None or self._num_proposed < len(self._replay):
            return self._exhausted
        return self._exhausted or self._num_proposed - self._num_retries >= limit

    def _num_counted(self) -> int:
        """Trials whose results may be told: during replay no more than were proposed."""
        return min(len(self.records), self._num_proposed)

    def _can_propose(self) -> bool:
        wanted = bool(self._retries) or not self._finished()
        return wanted and self._num_proposed - self._options.window < self._num_counted()

    def _propose(self) -> None:
        """Propose as far as the window allows."""
        while self._can_propose() and not self._stop():
            trial = self._num_proposed
            while self._num_told <= trial - self._options.window:
                self._tell(self.records[self._num_told])
            point = self._next_point(trial)
            if point is None:
                self._exhausted = True
                return
            self._points.append(point)
            if trial < len(self._replay):
                self._check_replay(trial, point)
                continue
            bounded = self._bounded_away(trial, point)
            if bounded is not None:
                self._ready[trial] = bounded
            else:
                self._pool.submit(trial, point)

    def _next_point(self, trial: int) -> SearchPoint | None:
        """The point of a trial: a retry, or what the proposer, which knows nothing of retries, proposes next."""
        if trial < len(self._replay):
            record = self._replay[trial]
            is_retry = record.point in self._failed
            if record.state == "failed":
                self._failed.add(record.point)
            if is_retry:
                self._num_retries += 1
                return record.point
        elif self._retries:
            self._num_retries += 1
            return self._retries.popleft()
        return self._proposer.propose(trial - self._num_retries)

    def _tell(self, record: TrialRecord) -> None:
        self._proposer.tell(record)
        if record.feasible:
            self._front = add_to_front(self._front, record.values)
        self._num_told += 1

    def _check_replay(self, trial: int, point: SearchPoint) -> None:
        have = self._replay[trial].point
        if have != point:
            raise StudyError(
                f"trial {trial}",
                point.label(),
                f"the ledger {self._ledger.path} has {have.label()} there, so it was made by another version",
                "give another name with --study",
            )

    def _bounded_away(self, trial: int, point: SearchPoint) -> TrialRecord | None:
        """The record of a trial that its bounds settle, or None."""
        bounds = self._bounds(point)
        if bounds.memory_overshoot > 0.0:
            reason = "memory"
        elif any(dominates(known, bounds.values) for known in self._front):
            reason = "objective"
        else:
            return None
        return TrialRecord(
            trial=trial,
            point=point,
            state="bounded",
            values=bounds.values,
            memory_overshoot=bounds.memory_overshoot,
            reason=reason,
        )

    def _take(self, completed: Completed) -> None:
        trial = completed.trial
        if trial in self._ready or trial < len(self.records):
            return  # evaluated a second time after a fault: counted once
        point = self._points[trial]
        outcome = completed.outcome
        if outcome is None or not math.isfinite(outcome.step_time_s):
            cause = completed.cause or f"the predicted step time is {outcome.step_time_s if outcome else None}"
            logger.warning("trial %d (%s) failed: %s", trial, point.label(), cause)
            self._ready[trial] = TrialRecord(trial=trial, point=point, state="failed", reason=cause)
            return
        values = objective_values(
            self._options.objectives, step_time_s=outcome.step_time_s, point=point, cluster=self._cluster
        )
        self._ready[trial] = TrialRecord(
            trial=trial,
            point=point,
            state="evaluated",
            values=values,
            memory_overshoot=outcome.memory_overshoot,
            outcome=outcome,
        )

    def _count(self) -> None:
        """Append to the ledger whatever is next in trial order."""
        batch: list[TrialRecord] = []
        while (record := self._ready.pop(len(self.records) + len(batch), None)) is not None:
            batch.append(record)
        if batch:
            self._ledger.append(batch)
            self._mirror.offer(batch)
            self._show()

    def _too_many_failures(self) -> bool:
        forgiven = self._forgiven if self._options.retry_failures else frozenset()
        planned = self._options.max_trials or self._options.num_legal
        return too_many(self.records, forgiven=forgiven, num_planned=planned)

    def _show(self) -> None:
        status = self._pool.status()
        states = [record.state for record in self.records]
        self._progress.update(
            ProgressState(
                num_evaluated=states.count("evaluated"),
                num_bounded=states.count("bounded"),
                num_failed=len(standing_failures(self.records)),
                num_left=self._num_left(),
                num_workers=status.num_workers,
                num_running=status.num_running,
                num_traces_made=status.num_traces_made,
                num_traces_wanted=status.num_traces_wanted,
                incumbent=self._incumbent(),
            )
        )

    def _num_left(self) -> int:
        """Evaluations that may still be due: points not yet counted that the best so far does not bound away."""
        limit = min(self._options.max_trials or self._options.num_legal, self._options.num_legal)
        num_tried = len(self.records) - self._num_retries
        left = limit - num_tried
        if not isinstance(self._proposer, EnumerateProposer) or len(self._options.objectives) > 1:
            return left
        best = min((r.values[0] for r in self.records if r.feasible), default=math.inf)
        rest = self._proposer.order[num_tried:limit]
        return sum(1 for b in rest if b.memory_overshoot <= 0.0 and b.values[0] <= best)

    def _incumbent(self) -> str:
        feasible = [record for record in self.records if record.feasible]
        if not feasible:
            return ""
        best = min(feasible, key=lambda record: (record.values, record.trial))
        assert best.outcome is not None
        return f"{format_objective('step_time_s', best.outcome.step_time_s)} {best.point.label()}"
