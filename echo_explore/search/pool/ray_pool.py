"""Evaluation by Ray actors: batched calls two deep, deadlines, quarantine for actors whose process or node died."""

import collections
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from echo_explore.core import EchoError
from echo_explore.search.point import SearchPoint
from echo_explore.search.pool.actors import BatchAnswer, EvaluatorActor, Item, Setting
from echo_explore.search.pool.cluster import connect, num_cluster_cpus
from echo_explore.search.pool.traces import TraceDesk
from echo_explore.search.ports import Completed, Evaluator, EvaluatorFactory, PoolStatus

logger = logging.getLogger(__name__)

EVALUATOR_CPUS: Final = 0.5
"""Of each evaluator; tracers take the other half, and are busy only while traces are missing."""
MAX_BATCH: Final = 64
CALL_S: Final = 0.1
"""A call should take this long: one costs the driver about 0.5 ms [ray 2.60, 2026-11-30]."""
DEPTH: Final = 2
"""Calls that an evaluator has at a time, so that it never waits for the driver."""
_STATE_VARIABLES: Final = ("ECHO_EXPLORE_HOME", "XDG_CACHE_HOME")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How patient a pool is.

    Attributes:
        deadline_s: of one call; then its evaluator is killed and starts anew.
        max_tries: times that a trial may take its evaluator down before it fails.
        patience_s: without any evaluator that can work; then the search stops.
    """

    deadline_s: float = 300.0
    max_tries: int = 3
    patience_s: float = 300.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    reference: Any
    items: list[Item]
    started_s: float  # when it became the first of its evaluator


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    """One evaluator.

    Attributes:
        probe: reference of `ready()` while it is in quarantine: nothing is given to it until that answers.
        calls: in the order of their execution.
    """

    actor: Any
    probe: Any = None
    calls: list[_Call] = field(default_factory=list)


class RayPool:
    """Evaluates anywhere on a Ray cluster; any process or node but the driver's may die."""

    def __init__(
        self,
        factory: EvaluatorFactory,
        evaluator: Evaluator,
        *,
        address: str,
        num_workers: int | None,
        options: PoolOptions | None = None,
    ) -> None:
        """Connect, and start the evaluators; they are ready some seconds later.

        Args:
            factory: makes the evaluators, in the actors.
            evaluator: the driver's own: knows which trace a point needs and holds the driver machine's cache.
            address: see `connect`.
            num_workers: evaluators; None: one for each CPU of the cluster.
            options: deadlines and retries.

        Raises:
            SpecError: the cluster cannot be reached or started.
        """
        self._options = options or PoolOptions()
        self._evaluator = evaluator
        self._connection = connect(address, num_cpus=num_workers)
        try:
            self._start_actors(factory, num_workers)
        except BaseException:  # also Ctrl-C: no process may stay
            self._connection.close()
            raise
        self._ready: collections.deque[Item] = collections.deque()
        self._tries: collections.Counter[int] = collections.Counter()
        self._completed: list[Completed] = []
        self._running: set[int] = set()
        self._mean_s = CALL_S
        self._alive_s = time.monotonic()

    def _start_actors(self, factory: EvaluatorFactory, num_workers: int | None) -> None:
        count = num_workers or num_cluster_cpus()
        self._models = ray.put(factory.shared())  # once; every evaluator reads the same copy
        self._setting = Setting(
            factory=factory,
            models=ray.cloudpickle.dumps(self._models),  # type: ignore[no-untyped-call]
            environment={name: os.environ[name] for name in _STATE_VARIABLES if name in os.environ},
        )
        self._actor_class: Any = ray.remote(EvaluatorActor)
        self._workers = [self._start() for _ in range(count)]
        self._desk = TraceDesk(self._evaluator, self._setting, max_tracers=count)

    def submit(self, trial: int, point: SearchPoint) -> None:
        """Take on a trial; it is given out once its trace is there."""
        self._running.add(trial)
        self._desk.ask(trial, point)

    def wait(self, timeout_s: float) -> Sequence[Completed]:
        """Give out work and take in what is done.

        Raises:
            SpecError, MissingExtra, MissingCalibration: no point of the search can be evaluated.
            EchoError: no evaluator could work for `patience_s`.
        """
        self._dispatch()
        references = self._references()
        if references and not self._completed:
            ready, rest = ray.wait(references, num_returns=1, timeout=timeout_s)
            if ready and rest:
                ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
            self._take(ready)
        self._enforce_deadlines()
        self._dispatch()
        self._completed += [Completed(trial=trial, cause=cause) for trial, cause in self._desk.failed]
        self._desk.failed.clear()
        done, self._completed = self._completed, []
        self._running -= {completed.trial for completed in done}
        return done

    def status(self) -> PoolStatus:
        """Evaluators that can work, traces, trials under way."""
        return PoolStatus(
            num_workers=sum(worker.probe is None for worker in self._workers),
            num_traces_made=self._desk.num_made,
            num_traces_wanted=self._desk.num_wanted,
            num_running=len(self._running),
        )

    def bring_trace(self, point: SearchPoint) -> None:
        """Put the trace of a point into the driver machine's cache."""
        request = self._evaluator.trace_request(point)
        if self._evaluator.load_trace(request) is not None:
            return
        try:
            data = ray.get(self._desk.artefact(request.key({})))
        except (KeyError, ValueError, TypeError, ray.exceptions.RayError):
            return  # the driver's evaluator makes it itself
        if data is not None:
            self._evaluator.store_trace(request, data)

    def close(self) -> None:
        """End actors, and the cluster if it was started here."""
        try:
            self._desk.close()
            for worker in self._workers:
                ray.kill(worker.actor)
        except Exception:
            logger.debug("close", exc_info=True)  # a dead cluster must not hide the result
        finally:
            self._connection.close()

    def _start(self) -> _Worker:
        actor: Any = self._actor_class.options(
            num_cpus=EVALUATOR_CPUS, max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD"
        ).remote(self._setting)
        return _Worker(actor=actor, probe=actor.ready.remote())

    def _references(self) -> list[Any]:
        references = self._desk.references
        for worker in self._workers:
            references += [call.reference for call in worker.calls]
            references += [worker.probe] if worker.probe is not None else []
        return references

    def _dispatch(self) -> None:
        """Fill every evaluator to its depth, round by round, so that few trials are spread over many evaluators."""
        self._desk.dispatch()
        while self._desk.released:
            trial, point, key = self._desk.released.popleft()
            self._ready.append(Item(trial=trial, point=point, trace_key=key))
        for depth in range(DEPTH):
            for worker in self._workers:
                if self._ready and worker.probe is None and len(worker.calls) <= depth:
                    self._call(worker)

    def _call(self, worker: _Worker) -> None:
        size = max(1, min(MAX_BATCH, int(CALL_S / self._mean_s), -(-len(self._ready) // len(self._workers))))
        items = [self._ready.popleft()]
        while len(items) < size and self._ready and not self._is_suspect(items[0], self._ready[0]):
            items.append(self._ready.popleft())
        artefacts = {item.trace_key: self._desk.artefact(item.trace_key) for item in items}
        reference = worker.actor.evaluate.remote(items, artefacts)
        worker.calls.append(_Call(reference=reference, items=items, started_s=time.monotonic()))

    def _is_suspect(self, *items: Item) -> bool:
        """Whether one of them was in a call that took its evaluator down: those go alone, to find which it was."""
        return any(self._tries[item.trial] for item in items)

    def _take(self, ready: Sequence[Any]) -> None:
        self._desk.take(ready)
        arrived = set(ready)
        for worker in self._workers:
            if worker.probe in arrived:
                self._take_probe(worker)
            for call in [call for call in worker.calls if call.reference in arrived]:
                self._take_call(worker, call)

    def _take_probe(self, worker: _Worker) -> None:
        try:
            ray.get(worker.probe)
        except ray.exceptions.RayTaskError as error:  # its constructor raised
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise EchoError(f"an evaluator cannot be made: {cause}") from error
        except ray.exceptions.ActorDiedError as error:
            self._raise_constructor_error(error)
            logger.debug("evaluator is gone: %s", error)
            fresh = self._start()
            worker.actor, worker.probe = fresh.actor, fresh.probe
        except ray.exceptions.RayError:
            worker.probe = worker.actor.ready.remote()  # its node is gone, it starts elsewhere
        else:
            worker.probe = None
            self._alive_s = time.monotonic()

    def _raise_constructor_error(self, error: Exception) -> None:
        """Raise what a constructor raised: every other evaluator's would, too."""
        text = str(error)
        if "creation task" in text:
            last = [line for line in text.splitlines() if line.strip()][-1]
            raise EchoError(f"an evaluator cannot be made: {last.strip()[:300]}") from error

    def _take_call(self, worker: _Worker, call: _Call) -> None:
        was_first = worker.calls[0] is call
        worker.calls.remove(call)
        if worker.calls:
            worker.calls[0].started_s = time.monotonic()
        try:
            batch: BatchAnswer = ray.get(call.reference)
        except ray.exceptions.RayError as error:
            self._evaluator_died(worker, call, error, charge=was_first and worker.probe is None)
            return
        self._alive_s = time.monotonic()
        self._mean_s = 0.7 * self._mean_s + 0.3 * batch.elapsed_s / len(batch.answers)
        for item, answer in zip(call.items, batch.answers, strict=True):
            if answer.fatal is not None:
                raise answer.fatal
            if answer.lost_trace:
                self._desk.ask_again(item.trial, item.point, item.trace_key)
            else:
                self._completed.append(Completed(trial=item.trial, outcome=answer.outcome, cause=answer.cause))

    def _evaluator_died(self, worker: _Worker, call: _Call, error: Exception, *, charge: bool) -> None:
        """Give the trials back; only the call that ran counts against them, not those that queued behind it."""
        logger.debug("call of %d trials lost: %s", len(call.items), error)
        if worker.probe is None:
            worker.probe = worker.actor.ready.remote()
        for item in reversed(call.items):
            self._tries[item.trial] += charge
            if self._tries[item.trial] < self._options.max_tries:
                self._ready.appendleft(item)
            else:
                cause = f"its evaluator died {self._options.max_tries} times ({type(error).__name__})"
                self._completed.append(Completed(trial=item.trial, cause=cause))

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.probe is None and worker.calls and now - worker.calls[0].started_s > self._options.deadline_s:
                logger.warning("an evaluation exceeds %.0f s: its evaluator is ended", self._options.deadline_s)
                ray.kill(worker.actor, no_restart=False)
                worker.calls[0].started_s = now
        if all(worker.probe is not None for worker in self._workers) and self._running:
            if now - self._alive_s > self._options.patience_s:
                raise EchoError(f"no evaluator could work for {self._options.patience_s:.0f} s; is the cluster full?")
        else:
            self._alive_s = now
