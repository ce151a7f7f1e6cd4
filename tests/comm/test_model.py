import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.comm import CollectiveRequest, HierarchicalModel, bus_bandwidth, bus_factor
from echo_explore.comm.algorithms import GroupPath
from echo_explore.comm.model import algorithm_times
from echo_explore.comm.paths import network_share
from echo_explore.core import MissingCalibration, PlacementError, SpecError
from echo_explore.graph import Collective
from echo_explore.specs import ClusterSpec, load_cluster
from echo_explore.topology import GroupShape

MODEL = HierarchicalModel.shipped()
NAMES = ("a100-40gb-hdr", "h100-ndr", "h100-p5-efa", "h800-ndr", "b200-ndr", "gb200-nvl72", "mi300x-roce", "v100-25gbe")
CLUSTERS = {name: load_cluster(name) for name in NAMES}
TRAFFIC = [c for c in Collective if c not in (Collective.NONE, Collective.BARRIER)]
PAIRS = (Collective.SEND, Collective.RECV)


def price(kind: Collective, size: float, group: GroupShape, cluster: ClusterSpec) -> float:
    request = CollectiveRequest(collective=kind, message_bytes=size, group=group)
    return MODEL.collective_time(request, cluster).time_s


@st.composite
def groups(draw: st.DrawFn, kind: Collective = Collective.ALL_REDUCE) -> GroupShape:
    if kind in PAIRS:
        inside = draw(st.integers(1, 2))
        return GroupShape(num_ranks=2, ranks_per_node=inside, groups_per_node=draw(st.integers(1, 8)))
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    nodes = draw(st.sampled_from([1, 2, 3, 4, 16, 100]))
    return GroupShape(num_ranks=per_node * nodes, ranks_per_node=per_node, groups_per_node=8 // per_node)


SIZES = st.floats(1, 2**36)
NAMED = st.sampled_from(NAMES)


@given(st.sampled_from(TRAFFIC), NAMED, SIZES)
def test_one_rank_costs_nothing(kind: Collective, name: str, size: float) -> None:
    assert price(kind, size, GroupShape(num_ranks=1, ranks_per_node=1), CLUSTERS[name]) == 0


@given(st.data(), st.sampled_from(TRAFFIC), NAMED, SIZES, SIZES)
def test_time_is_positive_and_grows_with_bytes(
    data: st.DataObject, kind: Collective, name: str, one: float, other: float
) -> None:
    group = data.draw(groups(kind).filter(lambda g: g.num_ranks > 1))
    low, high = sorted((one, other))
    assert 0 < price(kind, low, group, CLUSTERS[name]) <= price(kind, high, group, CLUSTERS[name])


@given(groups().filter(lambda g: g.num_ranks > 1), st.sampled_from(TRAFFIC), NAMED, SIZES)
def test_bus_bandwidth_never_exceeds_the_link(group: GroupShape, kind: Collective, name: str, size: float) -> None:
    cluster = CLUSTERS[name]
    if kind in PAIRS:
        group = GroupShape(
            num_ranks=2, ranks_per_node=min(group.ranks_per_node, 2), groups_per_node=group.groups_per_node
        )
    time_s = price(kind, size, group, cluster)
    bus = bus_bandwidth(kind, size, time_s, group.num_ranks)
    link = cluster.node.link_bandwidth_bytes_per_s
    if group.ranks_per_node > 1:
        n = group.ranks_per_node
        reduced = kind == Collective.ALL_REDUCE and cluster.node.in_network_reduction
        assert bus <= link * (2 * (n - 1) / n if reduced else 1) * (1 + 1e-9)
    if group.num_nodes > 1:  # what the cards of a node must carry at least: its ranks' data out, once
        share = network_share(group, MODEL.links_of(cluster))
        m, r, n = group.num_nodes, group.ranks_per_node, group.num_ranks
        least = {
            Collective.ALL_REDUCE: 2 * (m - 1) / m,
            Collective.ALL_GATHER: (m - 1) / m,
            Collective.REDUCE_SCATTER: (m - 1) / m,
            Collective.ALL_TO_ALL: r * (n - r) / n,
        }.get(kind, 1.0)
        assert time_s >= least * size / share * (1 - 1e-9)


@given(groups().filter(lambda g: g.num_nodes > 1), NAMED, SIZES, st.sampled_from(TRAFFIC))
def test_more_sharers_of_the_cards_never_help(group: GroupShape, name: str, size: float, kind: Collective) -> None:
    if kind in PAIRS:
        group = GroupShape(num_ranks=2, ranks_per_node=1, groups_per_node=group.groups_per_node)
    crowded = GroupShape(
        num_ranks=group.num_ranks, ranks_per_node=group.ranks_per_node, groups_per_node=2 * group.groups_per_node
    )
    assert price(kind, size, group, CLUSTERS[name]) <= price(kind, size, crowded, CLUSTERS[name])


@pytest.mark.parametrize("name", NAMES)
def test_crossing_nodes_costs_more_than_staying_inside(name: str) -> None:
    inside, across = (
        GroupShape(num_ranks=8, ranks_per_node=8),
        GroupShape(num_ranks=8, ranks_per_node=1, groups_per_node=8),
    )
    for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        for size in (1e4, 1e6, 1e9):
            assert price(kind, size, inside, CLUSTERS[name]) < price(kind, size, across, CLUSTERS[name])


# NetX-lab/Echo nccl-test-log (MIT, 2024): nccl-tests all_reduce_perf, A100-SXM4-40GB, Azure ND A100 v4, GB/s.
@pytest.mark.parametrize(
    ("num_gpus", "size", "bus_gb_per_s", "tolerance"),
    [
        (8, 2**30, 230.9, 0.10),
        (8, 2**26, 207.4, 0.15),
        (16, 2**30, 124.5, 0.15),
        (32, 2**30, 125.6, 0.15),
        (128, 2**30, 128.5, 0.15),
        (128, 2**24, 66.4, 0.20),
    ],
)
def test_bus_bandwidth_of_azure_a100_nodes(num_gpus: int, size: int, bus_gb_per_s: float, tolerance: float) -> None:
    group = GroupShape(num_ranks=num_gpus, ranks_per_node=8)
    time_s = price(Collective.ALL_REDUCE, size, group, CLUSTERS["a100-40gb-hdr"])
    bus = bus_bandwidth(Collective.ALL_REDUCE, size, time_s, num_gpus) / 1e9
    assert bus == pytest.approx(bus_gb_per_s, rel=tolerance)


# One pair of GPUs on two nodes with 200 Gbit/s each: 24.3 GB/s at 1 GiB [fwyc0573/moe_mg profiling_comm_sh, 2024].
def test_two_nodes_with_one_gpu_each_use_one_card() -> None:
    group = GroupShape(num_ranks=2, ranks_per_node=1)
    time_s = price(Collective.ALL_REDUCE, 2**30, group, CLUSTERS["a100-40gb-hdr"])
    assert bus_bandwidth(Collective.ALL_REDUCE, 2**30, time_s, 2) / 1e9 == pytest.approx(24.3, rel=0.15)


def test_two_groups_on_one_card_halve_it_at_most() -> None:
    links = MODEL.links_of(CLUSTERS["h100-ndr"])
    alone = network_share(GroupShape(num_ranks=4, ranks_per_node=1, groups_per_node=1), links)
    all_rails = network_share(GroupShape(num_ranks=4, ranks_per_node=1, groups_per_node=8), links)
    whole = network_share(GroupShape(num_ranks=16, ranks_per_node=8), links)
    assert alone == all_rails == 50e9
    assert whole == 400e9
    halved = network_share(GroupShape(num_ranks=4, ranks_per_node=1, groups_per_node=16), links)
    assert halved == 25e9


def test_switch_reduction_is_used_where_the_switch_reduces() -> None:
    group = GroupShape(num_ranks=8, ranks_per_node=8)
    request = CollectiveRequest(collective=Collective.ALL_REDUCE, message_bytes=2**30, group=group)
    assert MODEL.chosen_algorithm(request, CLUSTERS["h100-ndr"]) == "switch"
    assert MODEL.chosen_algorithm(request, CLUSTERS["a100-40gb-hdr"]).startswith("ring")


def test_the_price_is_the_least_over_algorithms() -> None:
    group = GroupShape(num_ranks=32, ranks_per_node=8)
    links = MODEL.links_of(CLUSTERS["h100-ndr"])
    path = GroupPath(group=group, links=links, network_bytes_per_s=network_share(group, links))
    for size in (1e3, 1e6, 1e9):
        times = algorithm_times(Collective.ALL_REDUCE, path, size)
        assert price(Collective.ALL_REDUCE, size, group, CLUSTERS["h100-ndr"]) == min(times.values())
        assert len(times) == 7


@given(st.sampled_from([Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL]), SIZES)
def test_what_was_not_measured_is_less_sure(kind: Collective, size: float) -> None:
    def sigma(name: str, group: GroupShape) -> float:
        request = CollectiveRequest(collective=kind, message_bytes=size, group=group)
        return MODEL.collective_time(request, CLUSTERS[name]).sigma_log

    inside, across = GroupShape(num_ranks=8, ranks_per_node=8), GroupShape(num_ranks=32, ranks_per_node=8)
    assert 0 < sigma("h100-ndr", inside) < sigma("mi300x-roce", inside)
    assert sigma("h100-ndr", across) <= sigma("mi300x-roce", across)
    if kind != Collective.ALL_REDUCE:
        assert sigma("h100-ndr", across) >= 0.35


def test_a_copy_gives_the_same_prices_and_carries_no_cache() -> None:
    group = GroupShape(num_ranks=16, ranks_per_node=8)
    request = CollectiveRequest(collective=Collective.ALL_REDUCE, message_bytes=1e8, group=group)
    before = MODEL.collective_time(request, CLUSTERS["h100-ndr"])
    copied: HierarchicalModel = pickle.loads(pickle.dumps(MODEL))
    assert not copied._links
    assert copied.collective_time(request, CLUSTERS["h100-ndr"]) == before
    assert copied == MODEL


def test_it_says_what_it_is() -> None:
    assert MODEL.reference
    assert MODEL.version >= 1


def test_bad_requests_are_refused() -> None:
    group = GroupShape(num_ranks=16, ranks_per_node=8)
    cluster = CLUSTERS["h100-ndr"]
    with pytest.raises(SpecError, match="message_bytes = nan"):
        price(Collective.ALL_REDUCE, float("nan"), group, cluster)
    with pytest.raises(SpecError, match="collective = 'NONE'"):
        price(Collective.NONE, 1.0, group, cluster)
    alone = cluster.model_copy(update={"node": cluster.node.model_copy(update={"num_nics": 0})})
    with pytest.raises(PlacementError, match=r"node.nics = 0: a group of 16 GPUs spans 2 nodes"):
        price(Collective.ALL_REDUCE, 1.0, group, alone)


def test_a_fabric_without_coefficients_is_an_error_not_a_guess() -> None:
    c = MODEL.coefficients
    bare = HierarchicalModel(coefficients=type(c)(scale_up={}, network=c.network))
    request = CollectiveRequest(
        collective=Collective.ALL_REDUCE, message_bytes=1.0, group=GroupShape(num_ranks=2, ranks_per_node=2)
    )
    with pytest.raises(MissingCalibration, match=r"add scale_up.default"):
        bare.collective_time(request, CLUSTERS["h100-ndr"])


@pytest.mark.parametrize(
    ("kind", "factor"), [(Collective.ALL_REDUCE, 1.75), (Collective.ALL_GATHER, 0.875), (Collective.SEND, 1)]
)
def test_bus_factors_of_nccl_tests(kind: Collective, factor: float) -> None:
    assert bus_factor(kind, 8) == factor
    assert bus_factor(kind, 1) == 0
