"""Evaluation in this process, one point after the other: `--address none`, tests, small spaces."""

import collections
import logging
import traceback
from collections.abc import Sequence

from echo_explore.core import MissingCalibration, MissingExtra, SpecError
from echo_explore.core.home import home
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Completed, Evaluator, PoolStatus

logger = logging.getLogger(__name__)

FATAL = (SpecError, MissingCalibration, MissingExtra)
"""What is wrong with the whole search, not with one point: it stops the search instead of failing a trial."""


def fatal_of(error: BaseException) -> Exception | None:
    """The error that stops the search if `error` says nothing about the point that was evaluated, else None.

    What the machine refuses (a full disk, missing rights, a broken disk) is no property of a layout: it must not make a
    layout fail for good.
    """
    if isinstance(error, FATAL):
        return error
    if isinstance(error, OSError):
        what = str(error.filename) if error.filename is not None else str(home())
        why = f"cannot be read or written ({error.strerror or cause_of(error)})"
        return SpecError("file", what, why, "check space, path and rights, then start the same command")
    return None


def cause_of(error: BaseException) -> str:
    """One line that says what an evaluation died of, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    text = str(error).splitlines()[0][:300] if str(error) else ""
    return f"{type(error).__name__}: {text}{where}"


def evaluate_one(evaluator: Evaluator, trial: int, point: SearchPoint) -> Completed:
    """The result of one trial; what the point makes fail becomes a cause, what is wrong with the search is raised.

    Raises:
        SpecError, MissingCalibration, MissingExtra: no point of the search can be evaluated.
    """
    try:
        return Completed(trial=trial, outcome=evaluator.evaluate(point))
    except Exception as error:
        fatal = fatal_of(error)
        if fatal is not None:
            raise fatal from (None if fatal is error else error)
        logger.debug("trial %d failed", trial, exc_info=True)
        return Completed(trial=trial, cause=cause_of(error))


class LocalPool:
    """Evaluates in the order of submission, inside `wait`."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._waiting: collections.deque[tuple[int, SearchPoint]] = collections.deque()
        self._wanted: set[str] = set()
        self._made: set[str] = set()

    def submit(self, trial: int, point: SearchPoint) -> None:
        """Queue a trial."""
        self._waiting.append((trial, point))
        self._wanted.add(self._trace_key(point))

    def wait(self, timeout_s: float) -> Sequence[Completed]:
        """Evaluate the next trial; it takes what it takes."""
        if not self._waiting:
            return []
        trial, point = self._waiting.popleft()
        done = evaluate_one(self._evaluator, trial, point)
        self._made.add(self._trace_key(point))
        return [done]

    def status(self) -> PoolStatus:
        """One worker, and traces counted by what was evaluated."""
        return PoolStatus(
            num_workers=1,
            num_traces_made=len(self._made),
            num_traces_wanted=len(self._wanted),
            num_running=len(self._waiting),
        )

    def bring_trace(self, point: SearchPoint) -> None:
        """It was made here."""

    def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _trace_key(self, point: SearchPoint) -> str:
        return self._evaluator.trace_request(point).key({})
