"""The slowest of a job's GPUs: the order statistic, what it slows, and that it stays visible."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import OpClass, OpRow, TimedGraph, build_graph
from echo_explore.simulate import Prediction, SimulationOptions, parse_what_if
from echo_explore.simulate.slowest import StageWork, expected_maximum, held_up, pace_factor, slowest_factor
from tests.simulate.support import candidate, simulator

EQUAL = SimulationOptions(what_if=parse_what_if(["stragglers=none"]))
EQUAL_FILE = ("cluster.device.clock_spread_fraction=0",)


@pytest.mark.parametrize(
    ("num_gpus", "exact"),
    # Harter, Expected values of normal order statistics, Biometrika 48 (1961), table 1.
    [(1, 0.0), (2, 0.5642), (8, 1.4236), (100, 2.5076)],
)
def test_the_largest_of_normal_numbers(num_gpus: int, exact: float) -> None:
    assert expected_maximum(num_gpus) == pytest.approx(exact, abs=0.03)


@given(st.integers(1, 100_000), st.floats(0.0, 0.05))
def test_more_gpus_are_never_faster(num_gpus: int, spread: float) -> None:
    assert slowest_factor(1, spread) == 1.0
    assert slowest_factor(num_gpus, 0.0) == 1.0
    assert 1.0 <= slowest_factor(num_gpus, spread) <= slowest_factor(num_gpus + 1, spread)


def _stage(clock_s: float, num_gpus: int = 8, other_s: float = 0.2) -> StageWork:
    return StageWork(num_gpus=num_gpus, clock_s=clock_s, other_s=other_s)


def test_equal_stages_wait_for_the_slowest_of_all() -> None:
    assert pace_factor({_stage(1.0): 8}, 0.016) == slowest_factor(64, 0.016)
    assert pace_factor({_stage(1.0): 7, _stage(1.0 + 1e-9): 1}, 0.016) == pytest.approx(slowest_factor(64, 0.016))


def test_a_slow_gpu_in_a_stage_with_time_to_spare_holds_nobody_up() -> None:
    alone = slowest_factor(8, 0.016)
    assert pace_factor({_stage(0.5): 7, _stage(1.0): 1}, 0.016) == pytest.approx(alone, rel=1e-3)
    assert pace_factor({_stage(0.0): 7, _stage(1.0): 1}, 0.016) == alone
    factors = [pace_factor({_stage(1.0): 7, _stage(last): 1}, 0.016) for last in (1.001, 1.01, 1.02, 1.05, 1.2)]
    assert factors == sorted(factors, reverse=True)


@given(st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(0.0, 1.0)), min_size=1, max_size=6), st.integers(1, 512))
def test_between_the_slowest_of_a_stage_and_of_all(sizes: list[tuple[float, float]], num_gpus: int) -> None:
    stages = Counter(_stage(clock_s, num_gpus, other_s) for clock_s, other_s in sizes)
    factor = pace_factor(stages, 0.016)
    assert slowest_factor(num_gpus, 0.016) * (1 - 1e-9) <= factor
    assert factor <= slowest_factor(num_gpus * len(sizes), 0.016) * (1 + 1e-9)
    assert pace_factor(stages, 0.0) == 1.0


def test_only_clock_bound_kernels_are_held_up() -> None:
    rows = [OpRow(op_class=op_class, flop=1.0) for op_class in (OpClass.GEMM, OpClass.NORM, OpClass.ATTENTION)]
    held = held_up(TimedGraph(graph=build_graph(rows), time_s=np.ones(3), sigma_log=np.zeros(3)), 1.25)
    assert held.time_s == pytest.approx([1.25, 1.0, 1.25])
    assert held.straggler_fraction == pytest.approx([0.2, 0.0, 0.2])


def _step(layout: str, options: SimulationOptions = EQUAL, **job: object) -> Prediction:
    return simulator().predict(candidate(model="gpt-22b", layout=layout, **job), options)


def test_one_gpu_waits_for_no_other() -> None:
    alone = _step("tp=1,pp=1", SimulationOptions())
    assert alone.step_time_s == _step("tp=1,pp=1").step_time_s
    assert alone.breakdown["straggler_s"] == 0.0


def test_equal_gpus_by_what_if_and_by_file() -> None:
    plain = _step("tp=8,pp=4", SimulationOptions())
    assert _step("tp=8,pp=4").step_time_s == _step("tp=8,pp=4", overrides=EQUAL_FILE).step_time_s < plain.step_time_s
    assert _step("tp=8,pp=4").breakdown["straggler_s"] == 0.0


@pytest.mark.parametrize("fidelity", ["kernel", "block"])
def test_what_it_costs_is_told(fidelity: str) -> None:
    """Without bubbles and traffic the step is longer by what is charged to it."""
    options = SimulationOptions(fidelity=fidelity)  # type: ignore[arg-type]
    plain, equal = (_step("tp=8,pp=1", replace(options, what_if=w)) for w in (options.what_if, EQUAL.what_if))
    told = plain.breakdown["straggler_s"]
    assert told == pytest.approx(plain.breakdown["compute_s"] - equal.breakdown["compute_s"], rel=1e-6)
    assert 0.01 * plain.step_time_s < told < 0.03 * plain.step_time_s


@pytest.mark.parametrize("layout", ["tp=8,pp=4,dp=2", "tp=8,pp=1,dp=2"])
def test_folded_as_unfolded(layout: str) -> None:
    folded, whole = (_step(layout, SimulationOptions(fold=fold)).breakdown["straggler_s"] for fold in (True, False))
    assert folded == pytest.approx(whole, rel=1e-6)


def test_bounds_of_many_gpus_come_from_those_of_few() -> None:
    """What candidates of different sizes share is of equal GPUs, whichever is asked for first."""
    few, many = candidate(layout="tp=8,pp=1,dp=1"), candidate(layout="tp=8,pp=1,dp=16")
    first, second = simulator(), simulator()
    bounds = [first.bounds(job).step_time_s for job in (few, many)]
    assert [second.bounds(job).step_time_s for job in (many, few)] == bounds[::-1]
    assert all(bound <= first.predict(job).step_time_s for bound, job in zip(bounds, (few, many), strict=True))
