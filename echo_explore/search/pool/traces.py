"""Each distinct trace is made once: which trials wait for which trace, and the tracers that make them."""

import collections
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import ray

from echo_explore.search.point import SearchPoint
from echo_explore.search.pool.actors import Setting, TraceAnswer, TracerActor
from echo_explore.search.ports import Evaluator
from echo_explore.tracing.request import TraceRequest

logger = logging.getLogger(__name__)

MAX_TRIES: Final = 3
"""Times that a trace is asked for when tracers die."""
TRACES_PER_TRACER: Final = 4
"""Waiting traces for which one more tracer is started: a tracer takes seconds and some hundred MiB to start."""
MAX_TRACERS: Final = 8
TRACER_CPUS: Final = 0.5


@dataclass(slots=True, kw_only=True)
class TraceEntry:
    """One distinct trace.

    Attributes:
        artefact: reference of its bytes; None while it is not made.
        trials: that wait for it.
    """

    request: TraceRequest
    state: Literal["wanted", "making", "made", "failed"] = "wanted"
    artefact: Any = None
    cause: str = ""
    num_tries: int = 0
    trials: list[tuple[int, SearchPoint]] = field(default_factory=list)


class TraceDesk:
    """Keeps traces by key, and makes those that are wanted."""

    def __init__(self, evaluator: Evaluator, setting: Setting, *, max_tracers: int) -> None:
        self._evaluator, self._setting = evaluator, setting
        self._max_tracers = max(1, min(max_tracers, MAX_TRACERS))
        self._actor_class: Any = ray.remote(TracerActor)
        self._entries: dict[str, TraceEntry] = {}
        self._wanted: collections.deque[str] = collections.deque()
        self._idle: list[Any] = []
        self._calls: dict[Any, tuple[Any, str, Any]] = {}  # reference of the answer -> tracer, key, artefact
        self.released: collections.deque[tuple[int, SearchPoint, str]] = collections.deque()
        self.failed: list[tuple[int, str]] = []

    @property
    def num_wanted(self) -> int:
        """Distinct traces asked for so far."""
        return len(self._entries)

    @property
    def num_made(self) -> int:
        """Of these, those that are there."""
        return sum(entry.state in ("made", "failed") for entry in self._entries.values())

    @property
    def references(self) -> list[Any]:
        """What to wait for."""
        return list(self._calls)

    def ask(self, trial: int, point: SearchPoint) -> None:
        """Hand the trial to `released` as soon as its trace is there, or to `failed`."""
        request = self._evaluator.trace_request(point)
        key = request.key({})
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = TraceEntry(request=request)
            cached = self._evaluator.load_trace(request)
            if cached is not None:
                entry.state, entry.artefact = "made", ray.put(cached)
            else:
                self._wanted.append(key)
        match entry.state:
            case "made":
                self.released.append((trial, point, key))
            case "failed":
                self.failed.append((trial, entry.cause))
            case _:
                entry.trials.append((trial, point))

    def ask_again(self, trial: int, point: SearchPoint, key: str) -> None:
        """The trace was lost with its node: make it again and hand the trial out afterwards."""
        entry = self._entries[key]
        if entry.state == "made" and entry.num_tries >= MAX_TRIES:
            self._settle(key, None, f"its trace was lost {MAX_TRIES} times with the node that held it")
        elif entry.state == "made":
            entry.state, entry.artefact = "wanted", None
            self._wanted.append(key)
        if entry.state == "failed":
            self.failed.append((trial, entry.cause))
        else:
            entry.trials.append((trial, point))

    def artefact(self, key: str) -> Any:
        """Reference of the bytes of a trace that was made."""
        return self._entries[key].artefact

    def dispatch(self) -> None:
        """Give wanted traces to tracers, starting tracers as the queue demands."""
        if not self._wanted:
            return
        num_tracers = len(self._idle) + len(self._calls)
        want = min(self._max_tracers, 1 + (len(self._wanted) - 1) // TRACES_PER_TRACER)
        while num_tracers < want:
            self._idle.append(self._start())
            num_tracers += 1
        while self._wanted and self._idle:
            key, tracer = self._wanted.popleft(), self._idle.pop()
            entry = self._entries[key]
            entry.state = "making"
            entry.num_tries += 1
            answer, artefact = tracer.trace.options(num_returns=2).remote(entry.request)
            self._calls[answer] = (tracer, key, artefact)

    def take(self, ready: Sequence[Any]) -> None:
        """Book the answers among the references that are ready.

        Raises:
            SpecError, MissingExtra, MissingCalibration: what stops the whole search.
        """
        for reference in ready:
            if reference not in self._calls:
                continue
            tracer, key, artefact = self._calls.pop(reference)
            try:
                answer: TraceAnswer = ray.get(reference)
            except ray.exceptions.RayError as error:
                self._tracer_died(tracer, key, error)
                continue
            self._idle.append(tracer)
            if answer.fatal is not None:
                raise answer.fatal
            self._settle(key, artefact, answer.cause)

    def close(self) -> None:
        """End all tracers."""
        tracers = [*self._idle, *(tracer for tracer, _, _ in self._calls.values())]
        closing = [tracer.close.remote() for tracer in self._idle]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=5.0)
        for tracer in tracers:
            ray.kill(tracer)
        self._idle.clear()
        self._calls.clear()

    def _start(self) -> Any:
        options = self._actor_class.options(num_cpus=TRACER_CPUS, max_restarts=0, scheduling_strategy="SPREAD")
        return options.remote(self._setting)

    def _tracer_died(self, tracer: Any, key: str, error: Exception) -> None:
        entry = self._entries[key]
        logger.debug("tracer died: %s", error)
        ray.kill(tracer)
        if entry.num_tries >= MAX_TRIES:
            self._settle(key, None, f"{MAX_TRIES} tracers died while making its trace ({type(error).__name__})")
        else:
            entry.state = "wanted"
            self._wanted.append(key)

    def _settle(self, key: str, artefact: Any, cause: str) -> None:
        entry = self._entries[key]
        entry.state, entry.artefact, entry.cause = ("failed" if cause else "made"), artefact, cause
        for trial, point in entry.trials:
            if cause:
                self.failed.append((trial, cause))
            else:
                self.released.append((trial, point, key))
        entry.trials.clear()
