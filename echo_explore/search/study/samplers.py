"""Samplers that propose points. Their memory is an in-memory study, filled by replay from the ledger."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from echo_explore.search.encoding import Dimension, Encoding
from echo_explore.search.enumerate import BoundedPoint
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import TrialRecord
from echo_explore.search.study.quiet import quiet

SAMPLERS: Final[dict[str, Callable[[int], BaseSampler]]] = {
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=20),
    "nsga2": lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=24),
    "qmc": lambda seed: optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False),
    "cmaes": lambda seed: optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
}


class OptunaProposer:
    """Proposes points by an Optuna sampler; the same seed and results give the same points.

    A point is proposed once, and only while its bounds allow it to be feasible and better than the best that was told;
    so a study that runs out of points has covered the space.
    """

    def __init__(
        self,
        points: Sequence[SearchPoint],
        bounds: Callable[[SearchPoint], BoundedPoint],
        *,
        sampler: str,
        seed: int,
        num_objectives: int,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._encoding = Encoding(points)
        known = [bounds(point) for point in points]
        self._bound_values = np.array([b.values for b in known], dtype=float).reshape(len(known), num_objectives)
        self._encoding.close(np.array([b.memory_overshoot > 0.0 for b in known], dtype=bool))
        self._storage = InMemoryStorage()
        with quiet():
            self._study = optuna.create_study(
                storage=self._storage, sampler=SAMPLERS[sampler](seed), directions=["minimize"] * num_objectives
            )
        self._study_id = self._storage.get_study_id_from_name(self._study.study_name)
        self._distributions = {d.name: _sampler_distribution(d) for d in self._encoding.dimensions}
        self._failed: set[SearchPoint] = set()
        self._numbers: dict[SearchPoint, int] = {}  # Optuna's number of every proposed point

    def propose(self, trial: int) -> SearchPoint | None:
        """The open point nearest to what the sampler asks for; None when none is open."""
        if not self._encoding.num_open:
            return None
        with quiet():
            asked = self._study.ask(self._distributions)
        index = self._encoding.nearest_open({name: int(value) for name, value in asked.params.items()})
        assert index is not None
        self._encoding.close(index)
        self._move(asked.number, index)
        point = self._encoding.points[index]
        self._numbers[point] = asked.number
        return point

    def tell(self, record: TrialRecord) -> None:
        """Tell the sampler, in the form that it learns from, and close what cannot be better any more."""
        number = self._numbers[record.point]
        if record.point in self._failed:
            number = self._ask_again(record.point)
        if record.state == "failed":
            self._failed.add(record.point)
        with quiet():
            if record.state == "failed":
                self._study.tell(number, state=TrialState.FAIL)
                return
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
            self._storage.set_trial_system_attr(trial_id, "constraints", [record.memory_overshoot])
            self._study.tell(number, list(record.values))
        if record.feasible:
            best = np.array(record.values)
            worse = (self._bound_values >= best).all(axis=1) & (self._bound_values > best).any(axis=1)
            self._encoding.close(np.asarray(worse, dtype=bool))

    def _ask_again(self, point: SearchPoint) -> int:
        """Number of a new trial for the retry of a point: the failed one is closed, and the sampler asks nothing."""
        trial_id = self._storage.create_new_trial(self._study_id)
        number = self._storage.get_trial_number_from_id(trial_id)
        self._move(number, self._encoding.index_of(point))
        return number

    def _move(self, number: int, index: int) -> None:
        """Make the asked trial be about the point that was taken instead."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        for name, value in self._encoding.code(index).items():
            distribution = self._distributions[name]
            self._storage.set_trial_param(trial_id, name, distribution.to_internal_repr(value), distribution)


def _sampler_distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.kind == "choice":
        return CategoricalDistribution(tuple(range(dimension.num_choices)))
    return IntDistribution(0, dimension.num_choices - 1)
