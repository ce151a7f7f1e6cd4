"""Every legal point once, most promising bound first, so that most of the space is bounded away early."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo_explore.search.objective import objective_values
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Bounds, Evaluator, TrialRecord
from echo_explore.specs import ClusterSpec

_ROUNDING = 1e-9
"""Relative error that a bound may exceed an evaluation by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedPoint:
    """A point with what its bounds say.

    Attributes:
        values: lower bounds of the objectives.
        memory_overshoot: of the memory bound; above 0 the point cannot fit.
    """

    point: SearchPoint
    values: tuple[float, ...]
    memory_overshoot: float


class BoundTable:
    """Bounds of points, each computed once."""

    def __init__(self, evaluator: Evaluator, objectives: Sequence[str], cluster: ClusterSpec) -> None:
        self._evaluator, self._objectives, self._cluster = evaluator, objectives, cluster
        self._known: dict[SearchPoint, BoundedPoint] = {}

    def __call__(self, point: SearchPoint) -> BoundedPoint:
        """The point with its bounds."""
        known = self._known.get(point)
        if known is None:
            bounds: Bounds = self._evaluator.lower_bounds(point)
            values = objective_values(
                self._objectives, step_time_s=bounds.step_time_s, point=point, cluster=self._cluster
            )
            known = BoundedPoint(point=point, values=values, memory_overshoot=bounds.memory_overshoot)
            self._known[point] = known
        return known


def num_violations(records: Sequence[TrialRecord], bounds: Callable[[SearchPoint], BoundedPoint]) -> int:
    """Evaluations that their bound exceeds by more than rounding; above 0 no bound can be trusted."""
    return sum(
        bound > value * (1.0 + _ROUNDING)
        for record in records
        if record.state == "evaluated"
        for bound, value in zip(bounds(record.point).values, record.values, strict=True)
    )


class EnumerateProposer:
    """Goes through all points in order of their bounds; learns nothing, so it needs no seed."""

    def __init__(self, points: Sequence[SearchPoint], bounds: Callable[[SearchPoint], BoundedPoint]) -> None:
        ordered = [bounds(point) for point in points]
        ordered.sort(key=lambda b: (b.memory_overshoot > 0.0, b.values, b.point.order))
        self.order: tuple[BoundedPoint, ...] = tuple(ordered)

    def propose(self, trial: int) -> SearchPoint | None:
        """The point number `trial` in the order."""
        return self.order[trial].point if trial < len(self.order) else None

    def tell(self, record: TrialRecord) -> None:
        """Nothing to learn."""
