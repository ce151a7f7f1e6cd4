"""Normal forms of what is recomputed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.specs.recompute import (
    KINDS,
    MODULES,
    check_recompute,
    modules_of,
    names_modules,
    normal_recompute,
    recompute_number,
)
from tests.tracing.models import LLAMA, MOE

sets = st.lists(st.sampled_from(MODULES), min_size=1, unique=True)


@given(sets, st.randoms())
def test_order_and_repetition_do_not_count(modules: list[str], random: object) -> None:
    form = normal_recompute("selective:" + ",".join(modules))
    assert form == normal_recompute("selective:" + ", ".join([*reversed(modules), modules[0]]))
    assert sorted(modules_of(form)) == sorted(modules)
    assert normal_recompute(form) == form
    assert names_modules(form) == (modules != ["core_attn"])


@given(sets, sets)
def test_numbers_tell_forms_apart(a: list[str], b: list[str]) -> None:
    forms = [normal_recompute("selective:" + ",".join(modules)) for modules in (a, b)]
    numbers = [recompute_number(form) for form in forms]
    assert (forms[0] == forms[1]) == (numbers[0] == numbers[1])
    assert recompute_number("none") < min(numbers) <= max(numbers) < recompute_number("full")


def test_kinds() -> None:
    assert [normal_recompute(kind) for kind in KINDS] == list(KINDS)
    assert normal_recompute("selective:core_attn") == "selective"


@pytest.mark.parametrize("text", ["everything", "selective:", "selective:norm", "full:", ""])
def test_refused(text: str) -> None:
    with pytest.raises(SpecError, match="recompute = "):
        normal_recompute(text)


@pytest.mark.parametrize("name", ["mla_up_proj", "moe", "moe_act", "shared_experts"])
def test_modules_that_a_model_has_not(name: str) -> None:
    with pytest.raises(SpecError, match=f"for {name}"):
        check_recompute(LLAMA, f"selective:{name}", overlap_shared_experts=False)


def test_overlapped_shared_experts_do_not_run_again() -> None:
    check_recompute(MOE, "selective:shared_experts", overlap_shared_experts=False)
    with pytest.raises(SpecError, match="overlap_shared_experts"):
        check_recompute(MOE, "selective:shared_experts", overlap_shared_experts=True)
