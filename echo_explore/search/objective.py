"""What is minimised, as a function of step time and size of the job: one place for outcomes and for their bounds."""

import math
from collections.abc import Iterable, Sequence

from echo_explore.search.point import SearchPoint
from echo_explore.specs import ClusterSpec

SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6


def objective_values(
    names: Sequence[str], *, step_time_s: float, point: SearchPoint, cluster: ClusterSpec
) -> tuple[float, ...]:
    """Values of the objectives for one step.

    Each rises with step_time_s, so a lower bound of the step time gives lower bounds of all: step_time_s is itself,
    cost_usd = step_time_s * num_gpus * price / 3600, energy_j = step_time_s * num_gpus * board power.
    """
    return tuple(_value(name, step_time_s, point.num_gpus, cluster) for name in names)


def _value(name: str, step_time_s: float, num_gpus: int, cluster: ClusterSpec) -> float:
    match name:
        case "step_time_s":
            return step_time_s
        case "cost_usd":
            assert cluster.price is not None, "checked when the space was resolved"
            return step_time_s * num_gpus * cluster.price.gpu_hour_usd / SECONDS_PER_HOUR
        case "energy_j":
            # Approximation: every GPU draws its board power all the time; over-estimates.
            return step_time_s * num_gpus * cluster.device.power_w
        case _:
            raise AssertionError(name)


def format_objective(name: str, value: float) -> str:
    """A value of an objective for people, with 4 digits or more."""
    match name:
        case "step_time_s":
            unit, scale = time_unit(value)
            return f"{value * scale:.3f} {unit}"
        case "cost_usd":
            return f"{_digits(value)} USD a step"
        case _:
            return f"{_digits(value / JOULES_PER_KWH)} kWh a step"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a time of that size is written, and how many of it make a second."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1.0:
            return unit, scale
    return "us", 1e6


def _digits(value: float) -> str:
    """4 decimals, or as many as 4 digits take."""
    decimals = 4 if value >= 0.1 or value <= 0.0 else 3 - math.floor(math.log10(value))
    return f"{value:.{decimals}f}"


def dominates(left: Sequence[float], right: Sequence[float]) -> bool:
    """Whether `left` is no worse than `right` everywhere and better somewhere (smaller is better)."""
    pairs = list(zip(left, right, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def add_to_front(front: list[tuple[float, ...]], values: tuple[float, ...]) -> list[tuple[float, ...]]:
    """The Pareto front with `values` taken in; unchanged if one of the front is as good."""
    if any(dominates(known, values) or known == values for known in front):
        return front
    return [*(known for known in front if not dominates(values, known)), values]


def best_of(values: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The Pareto front of `values`."""
    front: list[tuple[float, ...]] = []
    for value in values:
        front = add_to_front(front, value)
    return front
