"""The study that the dashboard shows: a copy of the ledger, written behind in batches by a thread.

It can be thrown away at any time: the next start of the same study writes it again from the ledger.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna_dashboard import save_note

from echo_explore.core import SpecError, StudyError
from echo_explore.search.ports import TrialRecord
from echo_explore.search.space import Axes, describe_axes
from echo_explore.search.storage_name import masked
from echo_explore.search.study.quiet import quiet
from echo_explore.search.study.storage import BatchingBackend, open_storage

logger = logging.getLogger(__name__)

PERIOD_S: Final = 2.0
"""Between two writes."""
BATCH: Final = 256
"""Trials in one write."""
MAX_TRIALS: Final = 10_000
"""Bounded-away trials beyond this are left out: the dashboard is not made for more [optuna-dashboard issue 385]."""
_IDENTITY: Final = "echo_explore_study"
_GIB: Final = 2.0**30
_TEXT_LIMIT: Final = 1000  # the dashboard cuts user attributes at 1,024 characters [optuna-dashboard 0.21, 2026-11-30]
Note = Callable[[TrialRecord], str]


class StudyMirror:
    """Keeps an Optuna study equal to the ledger; an unreachable storage never stops the search."""

    def __init__(
        self,
        storage: str,
        *,
        name: str,
        identity: str,
        objectives: Sequence[str],
        axes: Axes,
        facts: Mapping[str, str],
        note: Note,
    ) -> None:
        """Open the storage and the study in it.

        Args:
            storage: as `resolve_storage` gives it.
            name: of the study.
            identity: hash of what the study is; a study of that name with another is refused.
            objectives: names of the values.
            axes: choices of the space.
            facts: what the study's page shows.
            note: Markdown for the page of a trial that was the best when it was counted.

        Raises:
            SpecError: the storage cannot be opened.
            StudyError: it holds a study of that name that is not this one.
        """
        self._storage_name, self._name, self._identity = storage, name, identity
        self._objectives, self._facts, self._note = tuple(objectives), dict(facts), note
        self._distributions = _distributions(axes)
        self._best: tuple[float, ...] | None = None
        self._num_offered = 0
        self._storage = open_storage(storage, mend=True)
        self._study = self._open_study()
        self._num_written = len(self._study.get_trials(deepcopy=False))
        self._num_skipped = 0
        self._queue: queue.SimpleQueue[TrialRecord | None] = queue.SimpleQueue()
        self._error: str = ""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def offer(self, records: Sequence[TrialRecord]) -> None:
        """Take records that the ledger holds, in trial order from trial 0; returns at once."""
        for record in records:
            self._queue.put(record)

    def close(self) -> None:
        """Write what is left; logs a warning if that fails."""
        self._queue.put(None)
        self._thread.join()
        if self._error:
            logger.warning(
                "the study in %s lacks trials (%s); the ledger has them, and the same command writes them again",
                masked(self._storage_name),
                self._error,
            )

    def _open_study(self) -> optuna.Study:
        try:
            return self._load_or_create()
        except (SpecError, StudyError):
            raise
        except Exception as error:  # whatever the database's driver raises
            raise SpecError(
                "storage",
                masked(self._storage_name),
                f"cannot be used ({type(error).__name__})",
                "check server and rights",
            ) from error

    def _load_or_create(self) -> optuna.Study:
        study = optuna.create_study(
            study_name=self._name,
            storage=self._storage,
            directions=["minimize"] * len(self._objectives),
            load_if_exists=True,
        )
        attributes = study.user_attrs
        if _IDENTITY not in attributes:
            if study.get_trials(deepcopy=False):
                raise StudyError(
                    "study",
                    self._name,
                    f"{masked(self._storage_name)} has one of that name that is not ours",
                    "give another --study",
                )
            with quiet():
                study.set_metric_names(list(self._objectives))
            study.set_user_attr(_IDENTITY, self._identity)
            for key, value in self._facts.items():
                study.set_user_attr(key, value[:_TEXT_LIMIT])
        elif attributes[_IDENTITY] != self._identity:
            raise StudyError(
                "study",
                self._name,
                f"{masked(self._storage_name)} has another search of that name",
                "give another --study",
            )
        return study

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._collect()
            if not batch:
                continue
            try:
                self._write(batch)
            except Exception as error:  # the ledger is the truth: the search goes on without its mirror
                self._error = f"{type(error).__name__}"
                logger.debug("mirror", exc_info=True)
                return

    def _collect(self) -> tuple[list[TrialRecord], bool]:
        """The next records to write, and whether they are the last."""
        batch: list[TrialRecord] = []
        first = self._queue.get()
        if first is None:
            return batch, True
        batch.append(first)
        try:
            while len(batch) < BATCH:
                record = self._queue.get(timeout=PERIOD_S)
                if record is None:
                    return batch, True
                batch.append(record)
        except queue.Empty:
            pass
        return batch, False

    def _write(self, batch: Sequence[TrialRecord]) -> None:
        trials: list[FrozenTrial] = []
        best: list[tuple[int, TrialRecord]] = []
        for record in batch:
            position = self._num_offered - self._num_skipped
            self._num_offered += 1
            if record.state == "bounded" and record.trial >= MAX_TRIALS:
                self._num_skipped += 1
                continue
            is_best = record.feasible and (self._best is None or record.values < self._best)
            if is_best:
                self._best = record.values
            if position < self._num_written:
                continue  # an earlier run wrote it
            trials.append(self._trial(record))
            if is_best:
                best.append((position, record))
        if trials:
            self._add(trials)
            self._num_written += len(trials)
            self._write_notes(best)

    def _add(self, trials: Sequence[FrozenTrial]) -> None:
        backend = self._storage._backend if isinstance(self._storage, JournalStorage) else None
        if not isinstance(backend, BatchingBackend):
            self._study.add_trials(trials)
            return
        backend.begin()
        try:
            self._study.add_trials(trials)
        finally:
            consistent = backend.end()
        if not consistent:
            self._storage = open_storage(self._storage_name)
            self._study = self._load_or_create()

    def _write_notes(self, best: Sequence[tuple[int, TrialRecord]]) -> None:
        if not best:
            return
        position, record = best[-1]
        trial = self._study.get_trials(deepcopy=False)[position]
        save_note(optuna.Trial(self._study, trial._trial_id), self._note(record))

    def _trial(self, record: TrialRecord) -> FrozenTrial:
        state = {"evaluated": TrialState.COMPLETE, "bounded": TrialState.PRUNED, "failed": TrialState.FAIL}[
            record.state
        ]
        return create_trial(
            state=state,
            values=list(record.values) if state == TrialState.COMPLETE else None,
            params=record.point.params(),
            distributions=self._distributions,
            user_attrs=_attributes(record, self._objectives),
            # The list form: optuna-dashboard 0.21 does not see what create_trial(constraints=) writes;
            # Optuna 5 reads both.
            system_attrs={"constraints": [record.memory_overshoot]} if state != TrialState.FAIL else {},
        )


def _attributes(record: TrialRecord, objectives: Sequence[str]) -> dict[str, Any]:
    """Numbers that become axes in the dashboard, and short texts."""
    attributes: dict[str, Any] = {"trial": record.trial, "layout": record.point.label()}
    attributes["data_parallel"] = record.point.data_parallel
    if record.reason:
        attributes["bounded_by" if record.state == "bounded" else "cause"] = record.reason[:_TEXT_LIMIT]
    if record.state == "bounded":
        attributes |= {f"{name}_bound": value for name, value in zip(objectives, record.values, strict=True)}
    outcome = record.outcome
    if outcome is not None:
        attributes |= {"mfu": outcome.mfu, "mfu_causal": outcome.mfu_causal, "hfu": outcome.hfu}
        attributes |= {"tokens_per_s": outcome.tokens_per_s, "peak_memory_gib": outcome.peak_memory_bytes / _GIB}
        attributes |= {"step_time_low_s": outcome.step_time_low_s, "step_time_high_s": outcome.step_time_high_s}
        attributes |= {name: value for name, value in outcome.breakdown.items() if value}
    return attributes


def _distributions(axes: Axes) -> dict[str, BaseDistribution]:
    """How the study describes the axes: whole numbers on a logarithmic scale, or a choice."""
    distributions: dict[str, BaseDistribution] = {}
    for name, choices in describe_axes(axes).items():
        if name in ("recompute", "sequence_parallel", "placement", "schedule"):
            allowed = (False, True) if name == "sequence_parallel" else choices
            distributions[name] = CategoricalDistribution(allowed)
        else:
            numbers = [int(choice) for choice in choices]
            distributions[name] = IntDistribution(min(numbers), max(numbers), log=min(numbers) < max(numbers))
    return distributions
