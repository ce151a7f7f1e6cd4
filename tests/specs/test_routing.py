"""Which experts tokens visit: counts, and visits against enumeration."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import PlacementError, SpecError
from echo_explore.specs import candidate_of, job_options
from echo_explore.specs.routing import Routing
from tests.examples import examples


@examples(50)
@given(st.integers(1, 6), st.integers(0, 500), st.data())
def test_counts_add_up(each: int, tokens: int, data: st.DataObject) -> None:
    experts = data.draw(st.integers(each, 16))
    load = tuple(data.draw(st.lists(st.floats(1.0, 1.0 + 1.0 / each), min_size=experts, max_size=experts)))
    for routing in (
        Routing(num_experts=experts, experts_per_token=each),
        Routing(num_experts=experts, experts_per_token=each, load=load if max(load) * each <= sum(load) else ()),
    ):
        counts = routing.counts(tokens)
        assert len(counts) == experts
        assert sum(counts) == tokens * each
        exact = routing.load or (1.0,) * experts
        assert all(abs(n - tokens * each * x / sum(exact)) <= 1 for n, x in zip(counts, exact, strict=True))


@pytest.mark.parametrize(("groups", "chosen"), [(0, 0), (4, 2), (2, 1), (8, 4)])
@pytest.mark.parametrize("units", [1, 2, 4, 8])
def test_balanced_visits_by_enumeration(groups: int, chosen: int, units: int) -> None:
    experts, each = 8, 2
    open_sets = (
        [
            [e for g in picked for e in range(g * experts // groups, (g + 1) * experts // groups)]
            for picked in itertools.combinations(range(groups), chosen)
        ]
        if groups
        else [list(range(experts))]
    )
    hits = total = 0.0
    for open_experts in open_sets:
        sets = list(itertools.combinations(open_experts, each))
        hits += sum(any(e < experts // units for e in s) for s in sets) / len(sets)
        total += 1
    routing = Routing(num_experts=experts, experts_per_token=each, num_groups=groups, groups_per_token=chosen)
    assert routing.visits(units) == pytest.approx([hits / total] * units)


def test_a_load_moves_the_visits_and_names_the_busiest() -> None:
    routing = Routing(num_experts=4, experts_per_token=1, load=(1.0, 1.0, 5.0, 1.0))
    assert routing.counts(80) == (10, 10, 50, 10)
    assert routing.busiest(2) == 1
    assert routing.visits(4) == pytest.approx([1 / 8, 1 / 8, 5 / 8, 1 / 8])
    assert math.isclose(sum(routing.visits(4)), 1.0)


EP8 = "tp=1,pp=1,ep=8,dp=8"


def job(*overrides: str, layout: str = EP8) -> None:
    candidate_of(
        job_options(
            {
                "model": "mixtral-8x7b", "cluster": "h100-ndr", "layout": layout, "global_batch_size": 64,
                "micro_batch_size": 1, "sequence_length": 4096, "overrides": overrides,
            }
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "layout", "message"),
    [
        (("recipe.expert_load=[1, 2, 3]",), EP8, r"\(3 entries\)': needs one entry"),
        (("recipe.expert_load=[9, 1, 1, 1, 1, 1, 1, 1]",), EP8, "no expert can get more than every token"),
        (("recipe.expert_load=[1e308, 1e308, 1, 1, 1, 1, 1, 1]",), EP8, "expert_load = 1e.308: loads must be from 0"),
        (("recipe.expert_load=[1e-300, 1e-300, 0, 0, 0, 0, 0, 0]",), EP8, "and not all 0"),
        (("recipe.expert_load=[-1, 1, 1, 1, 1, 1, 1, 1]",), EP8, "loads must be from 0 to"),
        (("recipe.expert_capacity_factor=1.25",), EP8, "capacity_factor = 1.25: without padding"),
        (("recipe.pad_expert_input=true",), EP8, "pad_expert_input = True: needs"),
        (
            ("recipe.pad_expert_input=true", "recipe.expert_capacity_factor=1.0", 'recipe.expert_dispatcher="deepep"'),
            EP8, "recipe.expert_dispatcher = 'deepep': takes no padded input",
        ),
        ((), "tp=1,pp=1,ep=3,dp=3", "layout.ep = 3: must divide num_experts = 8"),
        ((), "tp=1,pp=1,ep=8,dp=4", r"layout.ep = 8: etp\*ep = 8 must divide tp\*cp\*dp = 4"),
        ((), "tp=2,pp=1,ep=8,dp=4", "layout.sp = 0: experts beside tensor parallelism need sequence parallelism"),
        ((), "tp=2,pp=1,dp=4,etp=1,sp=1", "layout.etp = 1: without expert parallelism"),
        (("recipe.overlap_expert_exchange=true",), "tp=1,pp=2,ep=8,dp=8", "needs the interleaved schedule"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(overrides: tuple[str, ...], layout: str, message: str) -> None:
    with pytest.raises((SpecError, PlacementError), match=message):
        job(*overrides, layout=layout)


def test_tensor_ranks_hold_experts() -> None:
    job(layout="tp=4,pp=1,dp=2,ep=8,sp=1")
    job(layout="tp=4,pp=1,dp=2,ep=2,etp=4,sp=1")


def test_units_with_the_same_load_are_alike() -> None:
    routing = Routing(num_experts=8, experts_per_token=1, load=(1, 1, 2, 2, 1, 1, 3, 1))
    assert routing.alike(4, by_total=True) == ((1, 0, 1, 0), (1, 0))
    assert routing.alike(4, by_total=False) == ((1, 0, 1, 2), (1, 0, 3))
    assert routing.alike(8, by_total=True) == ((1, 1, 2, 2, 1, 1, 0, 1), (6, 0, 2))
    assert routing.shares(4) == pytest.approx([2 / 12, 4 / 12, 2 / 12, 4 / 12])
    assert Routing(num_experts=8, experts_per_token=2).alike(4, by_total=True) == ((0, 0, 0, 0), (0,))
