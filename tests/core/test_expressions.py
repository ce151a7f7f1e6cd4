"""Expressions: the arithmetic that is allowed, and attacks that are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.core.expressions import MAX_LENGTH, parse_expression

NAMES = {"tensor_parallel": 8, "gpus_per_node": 8, "pipeline_parallel": 12}


def _value(text: str) -> object:
    return parse_expression(text, names=NAMES, field="rule").value(NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensor_parallel <= gpus_per_node", True),
        ("2 <= tensor_parallel < 8", False),
        ("not (tensor_parallel == 8 and pipeline_parallel % 5 == 2)", False),
        ("tensor_parallel * pipeline_parallel - 1", 95),
        ("-tensor_parallel // 3 + max(1, min(tensor_parallel, 5), 2)", 2),
        ("tensor_parallel != 8 or pipeline_parallel > 3.5", True),
    ],
)
def test_values(text: str, expected: object) -> None:
    assert _value(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "tensor_parallel.__class__",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "tensor_parallel ** 9 ** 9",
        "1 << 99",
        "open",
        "max(tensor_parallel, key=print)",
        "max(*tensor_parallel)",
        "min(1)",
        "print(1)",
        "tensor_parallel[0]",
        "'a' * 9",
        "True",
        "1 if tensor_parallel else 2",
        "(tensor_parallel := 4)",
        "f'{tensor_parallel}'",
        "tensor_parallel is 8",
        "tensor_parallel in (8,)",
        "1e999",
        "9" * 400,
        "1j",
        "tensor_parallel; pipeline_parallel",
        "",
        "tensor_parallel =",
        "\0",
        "~tensor_parallel",
        "tensor_parallel / 2",
        "(" * 240 + "1" + ")" * 240 + "+ -" * 3,
        "-" * 100 + "1",
        "not " * 100 + "1",
    ],
)
def test_attacks_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="fix:"):
        _value(text)


def test_too_long() -> None:
    with pytest.raises(SpecError, match="longer than"):
        _value("1+" * MAX_LENGTH + "1")


def test_steps_are_bounded() -> None:
    with pytest.raises(SpecError, match="a step exceeds"):
        _value("*".join(["999999999"] * 40))


def test_division_by_zero() -> None:
    with pytest.raises(SpecError, match="divides by zero"):
        _value("tensor_parallel % (gpus_per_node - 8)")


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match="unknown name 'tensor_paralel'; fix: did you mean tensor_parallel"):
        _value("tensor_paralel <= 8")


def test_a_number_is_no_rule() -> None:
    with pytest.raises(SpecError, match="not true or false"):
        parse_expression("tensor_parallel", names=NAMES, field="rule").holds(NAMES)


@given(st.text(max_size=60))
def test_any_text_gives_a_value_or_a_spec_error(text: str) -> None:
    try:
        value = _value(text)
    except SpecError:
        return
    assert isinstance(value, int | float)
