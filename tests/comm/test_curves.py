import pytest

from echo_explore.comm import HierarchicalModel
from echo_explore.comm.curves import collective_curve, group_on, sizes_between
from echo_explore.core import SpecError
from echo_explore.graph import Collective
from echo_explore.specs import load_cluster
from echo_explore.topology import GroupShape

H100 = load_cluster("h100-ndr")


def test_sizes_double() -> None:
    assert sizes_between(1024, 8192) == (1024, 2048, 4096, 8192)
    assert sizes_between(3, 3) == (3,)
    with pytest.raises(SpecError, match="needs 0 < first <= last"):
        sizes_between(8, 4)


def test_a_group_fills_domains() -> None:
    assert group_on(H100, 4) == GroupShape(num_ranks=4, ranks_per_node=4)
    assert group_on(H100, 64) == GroupShape(num_ranks=64, ranks_per_node=8)
    assert group_on(H100, 8, 1) == GroupShape(num_ranks=8, ranks_per_node=1)
    with pytest.raises(SpecError, match="ranks = 0"):
        group_on(H100, 0)
    with pytest.raises(SpecError, match="ranks_per_node = 9"):
        group_on(H100, 64, 9)


def test_a_curve_names_what_runs() -> None:
    points = collective_curve(
        HierarchicalModel.shipped(), H100, Collective.ALL_REDUCE, group_on(H100, 8), sizes_between(2**10, 2**30)
    )
    assert len(points) == 21
    assert points[0].chosen == "ring/LL"
    assert points[-1].chosen == "nvls/Simple"
    assert all(p.chosen in p.times_s and p.time_s == pytest.approx(p.times_s[p.chosen]) for p in points)
    assert all(0 < p.bus_bandwidth_bytes_per_s < 900e9 and p.plan.num_sms >= 1 for p in points)


def test_groups_that_make_no_sense_are_refused() -> None:
    model = HierarchicalModel.shipped()
    with pytest.raises(SpecError, match="two ranks at least"):
        collective_curve(model, H100, Collective.ALL_REDUCE, group_on(H100, 1), (1.0,))
    with pytest.raises(SpecError, match="a send has two ranks"):
        collective_curve(model, H100, Collective.SEND, group_on(H100, 4), (1.0,))
