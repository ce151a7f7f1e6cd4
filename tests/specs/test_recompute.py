"""Normal forms of what is recomputed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.specs.recompute import (
    KINDS,
    MODULES,
    check_recompute,
    check_recomputed_groups,
    modules_of,
    names_modules,
    normal_recompute,
    recompute_number,
    recompute_of_layers,
    recomputed_groups,
    recomputes_layers,
    traced_form,
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


BAD = ("everything", "selective:", "selective:norm", "full:", "", "full:block", "full:block:0", "full:4", "full:some:2")


@pytest.mark.parametrize("text", [*BAD, "full:uniform:1.5", "full:block:-1"])
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


@pytest.mark.parametrize(
    ("form", "groups"),
    [
        ("full:block:2", (1, 1, 0, 0)),
        ("full:block:9", (1, 1, 1, 1)),
        ("full:uniform:2", (2, 2, 2, 2)),
        ("full:every:2", (0, 1, 0, 1)),
        ("full:every:3", (0, 0, 1, 0)),
        ("full", ()),
        ("selective:mlp", ()),
    ],
)
def test_layers_of_a_chunk(form: str, groups: tuple[int, ...]) -> None:
    assert normal_recompute(form) == form
    assert recomputed_groups(form, 4) == groups
    words = recompute_of_layers(form, 4)
    assert words == (tuple("full" if n else "none" for n in groups) or (form,) * 4)
    assert recomputes_layers(form) == form.startswith("full")


def test_groups_of_one_layer_are_full() -> None:
    assert normal_recompute("full:uniform:1") == normal_recompute("full:every:1") == "full"
    assert traced_form("full:block:3") == traced_form("full:uniform:2") != traced_form("full")


def test_numbers_order_what_runs_again() -> None:
    forms = ["none", "selective", "full:block:1", "full:block:20", "full", "full:uniform:2", "full:uniform:20"]
    forms += ["full:every:3", "full:every:2"]
    numbers = [recompute_number(form) for form in forms]
    assert numbers == sorted(set(numbers))


def test_groups_divide_the_layers_of_chunks() -> None:
    check_recomputed_groups("full:uniform:3", (6, 3, 6))
    check_recomputed_groups("full:block:4", (5, 3))
    with pytest.raises(SpecError, match="must divide the 5 layers"):
        check_recomputed_groups("full:uniform:3", (6, 5))


def test_prediction_layers_run_again_alone() -> None:
    model = LLAMA.model_copy(update={"multi_token_prediction_layers": 1})
    check_recompute(model, "full:block:2", overlap_shared_experts=False)
    with pytest.raises(SpecError, match="multi-token prediction"):
        check_recompute(model, "full:uniform:2", overlap_shared_experts=False)
