"""The slowest of a job's GPUs: the order statistic, what it slows, and that it stays visible."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import OpClass, OpRow, build_graph
from echo_explore.simulate import Prediction, SimulationOptions, parse_what_if
from echo_explore.simulate.slowest import expected_maximum, slowest_factor, straggler_fraction
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


def test_only_clock_bound_kernels_are_held_back() -> None:
    rows = [OpRow(op_class=op_class, flop=1.0) for op_class in (OpClass.GEMM, OpClass.NORM, OpClass.ATTENTION)]
    assert straggler_fraction(build_graph(rows), 1.25) == pytest.approx([0.2, 0.0, 0.2])


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
    # As many GPUs, the same factor: ranks within a size of cluster stay those of equal GPUs.
    other = candidate(layout="tp=8,pp=4,dp=4")
    spread = many.cluster.device.clock_spread_fraction
    assert slowest_factor(other.num_gpus, spread) == slowest_factor(many.num_gpus, spread)
