"""Errors: one line, whatever the value holds; they survive pickling, as Ray sends them between processes."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import EchoError, MissingExtra, PlacementError, SpecError, StudyError, UnitError

KINDS = (SpecError, UnitError, PlacementError, StudyError)


@pytest.mark.parametrize("kind", KINDS)
@given(value=st.text() | st.integers() | st.none() | st.lists(st.text()))
def test_one_line_and_picklable(kind: type[SpecError], value: object) -> None:
    error = kind("table.key", value, "is wrong", "correct it")
    assert len(str(error).splitlines()) == 1
    assert str(error).startswith("table.key = ")
    assert str(error).endswith(": is wrong; fix: correct it")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (back.field, back.value, back.rule, back.fix) == (error.field, error.value, error.rule, error.fix)


def test_long_values_are_cut() -> None:
    assert str(SpecError("f", "x" * 1000, "r", "g")) == f"f = '{'x' * 116}...: r; fix: g"


def test_missing_extra() -> None:
    error = MissingExtra("search", "search")
    assert str(error).endswith("fix: pip install 'echo-explore[search]'")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, ImportError)


def test_all_are_echo_errors() -> None:
    assert all(issubclass(kind, EchoError | ValueError) for kind in (*KINDS, MissingExtra))
