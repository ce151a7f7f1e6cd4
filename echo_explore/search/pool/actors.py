"""The actors: evaluators, which load traces, and tracers, which make them. Both hand errors back as values."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from echo_explore.search.local_pool import cause_of, fatal_of
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Evaluator, EvaluatorFactory, Outcome
from echo_explore.tracing.request import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an evaluator says of one trial.

    Attributes:
        outcome: None where there is a cause, a fatal error, or no trace.
        cause: one line; the trial fails.
        fatal: an error of the whole search.
        lost_trace: the trace could not be fetched; it must be made again.
    """

    trial: int
    outcome: Outcome | None = None
    cause: str = ""
    fatal: Exception | None = None
    lost_trace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """What an evaluator says of one call.

    Attributes:
        elapsed_s: of the whole call.
    """

    answers: tuple[Answer, ...]
    elapsed_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAnswer:
    """What a tracer says of one trace."""

    cause: str = ""
    fatal: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One trial of a call.

    Attributes:
        trace_key: of the trace that it needs.
    """

    trial: int
    point: SearchPoint
    trace_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an actor is made with.

    Attributes:
        models: the pickled reference of the shared models. As a bare argument Ray would print at every start that a
            restart needs the object; it lives as long as the driver, and so does the search.
        environment: variables of the driver that say where state lies.
    """

    factory: EvaluatorFactory
    models: bytes
    environment: Mapping[str, str] = field(default_factory=dict)


class EvaluatorActor:
    """Evaluates points. The models come as one object that all actors share, read-only, from Ray's object store."""

    def __init__(self, setting: Setting) -> None:
        self._evaluator = _build(setting)
        self._present: set[str] = set()

    def ready(self) -> str:
        """The node that it runs on, once it can work."""
        return _node()

    def evaluate(self, items: Sequence[Item], artefacts: Mapping[str, Any]) -> BatchAnswer:
        """Evaluate the trials of a call, one after the other; one that fails does not harm the others.

        Args:
            items: the trials.
            artefacts: trace key to reference of the trace's bytes, fetched only if this node has not got the trace.
        """
        start = time.perf_counter()
        answers = tuple(self._answer(item, artefacts.get(item.trace_key)) for item in items)
        return BatchAnswer(answers=answers, elapsed_s=time.perf_counter() - start, node=_node())

    def _answer(self, item: Item, artefact: Any) -> Answer:
        try:
            if not self._fetch(item, artefact):
                return Answer(trial=item.trial, lost_trace=True)
            return Answer(trial=item.trial, outcome=self._evaluator.evaluate(item.point))
        except Exception as error:
            fatal = fatal_of(error)
            return Answer(trial=item.trial, fatal=fatal, cause="" if fatal else cause_of(error))

    def _fetch(self, item: Item, artefact: Any) -> bool:
        """Fetch the trace if this node has not got it; False if it was lost with the node that held it."""
        if item.trace_key in self._present:
            return True
        request = self._evaluator.trace_request(item.point)
        if self._evaluator.load_trace(request) is None:
            try:
                data = ray.get(artefact) if artefact is not None else None
            except ray.exceptions.RayError:
                return False
            if data is not None:  # else the evaluation makes it
                self._evaluator.store_trace(request, data)
        self._present.add(item.trace_key)
        return True


class TracerActor:
    """Makes traces, one at a time, in the trace child that its evaluator starts."""

    def __init__(self, setting: Setting) -> None:
        self._evaluator = _build(setting)

    def trace(self, request: TraceRequest) -> tuple[TraceAnswer, bytes | None]:
        """Make a trace and put it into this node's cache; its bytes go to the object store, for other nodes."""
        try:
            self._evaluator.make_trace(request)
            return TraceAnswer(), self._evaluator.load_trace(request)
        except Exception as error:
            fatal = fatal_of(error)
            return TraceAnswer(fatal=fatal, cause="" if fatal else cause_of(error)), None

    def ready(self) -> str:
        """The node that it runs on."""
        return _node()

    def close(self) -> None:
        """End the trace child."""
        self._evaluator.close()


def _build(setting: Setting) -> Evaluator:
    os.environ.update(setting.environment)
    return setting.factory.build(ray.get(ray.cloudpickle.loads(setting.models)))


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())
