"""What-if factors: parsing, and what they do to a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.graph import Axis, OpClass
from echo_explore.simulate import SimulationOptions, WhatIf, parse_what_if
from echo_explore.simulate.what_if import NAMES
from tests.simulate.support import candidate, simulator


def test_factors_multiply() -> None:
    what_if = parse_what_if(["compute=0.5", " gemm = 0.25 ", "communication=2", "tensor=3", "host=0"])
    assert what_if.kernel_factor(OpClass.GEMM) == pytest.approx(0.125)
    assert what_if.kernel_factor(OpClass.NORM) == pytest.approx(0.5)
    assert what_if.axis_factor(Axis.TENSOR) == pytest.approx(6.0)
    assert what_if.axis_factor(Axis.MODEL) == pytest.approx(2.0)
    assert what_if.host_factor == 0.0


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 1e6)), unique_by=lambda pair: pair[0]))
def test_round_trip(pairs: list[tuple[str, float]]) -> None:
    assert parse_what_if([f"{name}={value!r}" for name, value in pairs]).factors == dict(pairs)


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (["tensr=0.5"], "unknown name 'tensr'; fix: did you mean tensor, "),
        (["=0.5"], "unknown name ''"),
        (["tensor=1", "tensor=2"], "tensor is given twice"),
        (["tensor"], "must be a number from 0 to 1e+06; fix: write tensor=0.5"),
        (["tensor=-1"], "must be a number from 0 to 1e+06"),
        (["tensor=nan"], "must be a number from 0 to 1e+06"),
        (["tensor=inf"], "must be a number from 0 to 1e+06"),
        (["tensor=2x"], "must be a number from 0 to 1e+06"),
    ],
)
def test_refused(texts: list[str], rule: str) -> None:
    with pytest.raises(SpecError, match="what-if = ") as error:
        parse_what_if(texts)
    assert rule in str(error.value)


def test_free_traffic_leaves_no_trace_of_itself() -> None:
    job = candidate(layout="tp=8,pp=4,dp=2")
    step = simulator().predict(job, SimulationOptions(what_if=WhatIf(factors={"tensor": 0.0, "data": 0.0})))
    assert step.breakdown["tensor_s"] == step.breakdown["data_s"] == 0.0
    plain = simulator().predict(job)
    assert plain.breakdown["tensor_s"] > 0
    assert step.step_time_s < plain.step_time_s


def test_everything_twice_as_slow_takes_twice_as_long() -> None:
    job = candidate(layout="tp=8,pp=4,dp=2")
    twice = WhatIf(factors={"compute": 2.0, "communication": 2.0, "host": 2.0})
    slow = simulator().predict(job, SimulationOptions(what_if=twice))
    assert slow.step_time_s == pytest.approx(2 * simulator().predict(job).step_time_s, rel=1e-9)


def test_interference_none_is_a_factor_of_zero() -> None:
    assert parse_what_if(["interference=none"]).interference_factor == 0.0
    assert parse_what_if(["interference=0.5"]).interference_factor == 0.5
    with pytest.raises(SpecError, match="what-if = 'compute=none'"):
        parse_what_if(["compute=none"])
