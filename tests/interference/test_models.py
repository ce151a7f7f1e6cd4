import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.graph import Collective, OpClass
from echo_explore.interference import INTERFERENCE_MODELS, ConstantInterference, NoInterference, PairTable
from echo_explore.specs import load_cluster


@pytest.mark.parametrize("name", sorted(INTERFERENCE_MODELS))
def test_every_model_gives_a_table_of_factors_from_one_up(name: str) -> None:
    model = INTERFERENCE_MODELS[name]()
    table = model.pairing(load_cluster("a100-80gb-hdr").device).pair_table()
    for factors in (table.compute, table.collective):
        assert factors.shape == table.compute.shape
        assert (factors >= 1).all()
        assert not factors.flags.writeable
    assert table.reference == model.reference
    assert table.version == model.version >= 1


def test_every_code_has_a_place_in_the_table() -> None:
    assert max(OpClass) < 32
    assert max(Collective) < 32


def test_none_slows_nothing() -> None:
    table = NoInterference().pair_table()
    assert (table.compute == 1).all()
    assert (table.collective == 1).all()


@given(st.floats(1, 10), st.floats(1, 10))
def test_constant_slows_pairs_of_a_kernel_and_traffic_and_nothing_else(compute: float, collective: float) -> None:
    table = ConstantInterference(compute_slowdown=compute, collective_slowdown=collective).pair_table()
    assert table.compute[OpClass.GEMM, Collective.ALL_REDUCE] == compute
    assert table.collective[OpClass.NORM, Collective.SEND] == collective
    assert (table.compute[OpClass.NONE] == 1).all()
    assert (table.compute[:, [Collective.NONE, Collective.BARRIER]] == 1).all()
    assert set(np.unique(table.compute)) <= {1.0, compute}


@pytest.mark.parametrize("value", [0.9, float("nan"), float("inf")])
def test_a_speed_up_is_refused(value: float) -> None:
    with pytest.raises(SpecError, match=r"compute_slowdown = .*must be 1 or more"):
        ConstantInterference(compute_slowdown=value)


def test_a_table_refuses_wrong_shapes_and_factors() -> None:
    good, bad = np.ones((32, 32)), np.full((32, 32), 0.5)
    with pytest.raises(ValueError, match="collective has shape"):
        PairTable(compute=np.ones((3, 3)), collective=good, reference="", version=1)
    with pytest.raises(ValueError, match="collective holds a factor below 1"):
        PairTable(compute=good, collective=bad, reference="", version=1)
