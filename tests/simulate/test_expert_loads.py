"""Expert groups whose ranks get unequal numbers of tokens: a class for each load, which meet at the exchanges."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import Axis, Collective
from echo_explore.simulate import Prediction, SimulationOptions, WhatIf, parse_what_if
from echo_explore.simulate.expert_loads import expert_loads
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate
from tests.examples import examples
from tests.simulate.support import candidate, simulator

EVEN = "1 " * 8
UNEVEN = "3 2 2 2 1 1 2 1"  # of two ranks 9 and 5, of four 5, 4, 2 and 3 of 14


def mixture(folder: Path, load: str = "", *, layout: str = "tp=1,pp=2,ep=4,dp=8", **job: object) -> Candidate:
    path = folder / "load.txt"
    path.write_text(load)
    sizes = {"global_batch_size": 32, "sequence_length": 1024, "model": "mixtral-8x7b"}
    return candidate(layout=layout, cluster="h100-ndr", routing=str(path) if load else None, **sizes, **job)


def predict(one: Candidate, *what_if: str, fold: bool = True) -> Prediction:
    options = SimulationOptions(what_if=parse_what_if(list(what_if)), explain=True, fold=fold)
    return simulator().predict(one, options)


def test_a_class_for_each_distinct_load(tmp_path: Path) -> None:
    loads = expert_loads(mixture(tmp_path, UNEVEN))
    assert loads.class_of == (0, 1, 2, 3)
    assert loads.shares == pytest.approx([20 / 14, 16 / 14, 8 / 14, 12 / 14])
    assert [request.expert_rank for request in loads.requests] == [-1, 1, 2, 3]
    alike = expert_loads(mixture(tmp_path, "1 1 2 2 1 1 3 1"))
    assert alike.class_of == (1, 0, 1, 0)
    assert [request.expert_rank for request in alike.requests] == [-1, 0]
    one_by_one = mixture(tmp_path, "1 1 2 2 1 1 3 1", overrides=("recipe.expert_dispatcher=deepep",))
    assert expert_loads(one_by_one).class_of == (1, 0, 1, 2)
    for same in (mixture(tmp_path), mixture(tmp_path, EVEN), mixture(tmp_path, UNEVEN, layout="tp=1,pp=2,dp=8")):
        assert expert_loads(same).num_classes == 1


def test_ranks_wait_for_the_fullest_at_every_combine(tmp_path: Path) -> None:
    even, uneven = predict(mixture(tmp_path)), predict(mixture(tmp_path, UNEVEN))
    assert (even.num_rank_classes, uneven.num_rank_classes) == (2, 8)
    assert even.step_time_s * 1.05 < uneven.step_time_s
    assert uneven.explanation is not None
    labels = [row["label"] for row in uneven.explanation["bubbles"]]
    assert labels[0] == "stage 0, experts at 1.43 x the mean load"
    assert labels[7] == "stage 1, experts at 0.857 x the mean load"
    waits = [
        sum(row[f"{part}_s"] for part in ("warm_up", "steady", "cool_down")) for row in uneven.explanation["bubbles"]
    ]
    assert waits[0] < waits[2] < waits[6] < waits[4]  # in the order of the loads 1.43, 1.14, 0.86, 0.57
    assert uneven.explanation["critical_class"] < 2


def test_folding_changes_nothing(tmp_path: Path) -> None:
    one = mixture(tmp_path, UNEVEN)
    assert predict(one).step_time_s == pytest.approx(predict(one, fold=False).step_time_s, rel=1e-9)


def test_even_loads_are_a_load_that_is_not_given(tmp_path: Path) -> None:
    assert predict(mixture(tmp_path, EVEN)).step_time_s == predict(mixture(tmp_path)).step_time_s


def test_executed_work_is_that_of_balanced_routing(tmp_path: Path) -> None:
    """All ranks together compute as many tokens as ever."""
    even, uneven = predict(mixture(tmp_path)), predict(mixture(tmp_path, UNEVEN))
    assert uneven.hfu * uneven.step_time_s == pytest.approx(even.hfu * even.step_time_s, rel=1e-3)


def test_loads_and_slow_replicas_together(tmp_path: Path) -> None:
    """Replica 0 exchanges with 1, 2 and 3, each of another load; replicas 4 to 7 are the other expert group."""
    one = mixture(tmp_path, UNEVEN)
    plain, slow = predict(one), predict(one, "slow_rank=0:1.5:1")
    assert slow.step_time_s > plain.step_time_s * 1.1
    assert slow.num_rank_classes == 16  # the slow one, three that exchange with it, four of the other group
    assert slow.explanation is not None
    labels = {row["label"] for row in slow.explanation["bubbles"]}
    assert "stage 0, 1.5 x as slow, slow replica, experts at 1.43 x the mean load" in labels
    assert (
        "stage 1, experts at 1.14 x the mean load, exchanges with slow replica, experts at 1.43 x the mean load"
        in labels
    )
    other = predict(mixture(tmp_path, UNEVEN, layout="tp=2,pp=2,ep=4,etp=1,dp=4,sp=1"), "slow_rank=0:1.5:1")
    assert other.num_rank_classes == 16  # replica 0 has two loads, replica 1 the other two
    split = predict(mixture(tmp_path, UNEVEN, layout="tp=4,pp=2,ep=2,etp=1,dp=2,sp=1"))
    assert split.num_rank_classes == 4


@examples(60)
@given(
    power=st.floats(10.0, 30.0),
    layout=st.sampled_from(
        ["tp=1,pp=1,ep=8,dp=8", "tp=1,pp=1,ep=4,dp=16", "tp=1,pp=1,ep=8,dp=16", "tp=2,pp=1,ep=8,dp=16,sp=1"]
    ),
    first=st.floats(1.0, 8.0),
    second=st.floats(1.0, 8.0),
)
def test_an_exchange_of_unequal_parts_never_gets_cheaper_with_the_load(
    power: float, layout: str, first: float, second: float
) -> None:
    """What the busiest rank gets grows; what a rank sends, by which the library chooses, stays."""
    one, models = candidate(model="mixtral-8x7b", cluster="h100-ndr", layout=layout, global_batch_size=64), simulator()

    def price(imbalance: float) -> float:
        pricer = Pricer(one, compute=models.compute, collective=models.collective, what_if=WhatIf())
        size = 2.0**power * imbalance
        return pricer.with_imbalance(imbalance).collective(Axis.EXPERT, Collective.ALL_TO_ALL, size)[0]

    low, high = sorted((first, second))
    assert price(low) <= price(high) * (1 + 1e-12)
    assert price(high) <= price(low) * high / low * (1 + 1e-12)
