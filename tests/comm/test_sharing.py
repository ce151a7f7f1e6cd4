"""Closed forms of contention against the flow engine: siblings of an axis, and two axes beside each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.comm.choice import Capabilities
from echo_explore.comm.contention import Communicator, contended_times, flow_rates
from echo_explore.comm.model import HierarchicalModel
from echo_explore.comm.paths import ClusterLinks, cluster_links, group_arrays
from echo_explore.comm.patterns import flows_of, join_flows
from echo_explore.comm.request import CollectiveRequest
from echo_explore.comm.sharing import LinkUse, link_use, shared_rates
from echo_explore.comm.spines import spine_share
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Axis, Collective
from echo_explore.specs import ClusterSpec, ParallelConfig, Placement, load_cluster
from echo_explore.topology import GroupShape, axis_groups, cluster_network, group_shape, pipeline_boundary
from echo_explore.topology.routing import route
from tests.examples import examples

BASE = load_cluster("h100-ndr")
MODEL = HierarchicalModel.shipped()
SIZE = 1e9
DENSE = ParallelConfig(tensor_parallel=8, data_parallel=8)
STAGED = ParallelConfig(tensor_parallel=8, pipeline_parallel=2, data_parallel=4)
EXPERTS = ParallelConfig(data_parallel=64, expert_parallel=16)
ALL_EXPERTS = ParallelConfig(data_parallel=64, expert_parallel=64)


def cluster_of(**changes: object) -> ClusterSpec:
    fabric = BASE.fabric.model_copy(update={"nodes_per_leaf": 2, **changes})
    return BASE.model_copy(update={"fabric": fabric})


CLUSTERS = [
    cluster_of(topology=topology, oversubscription=over)
    for topology in ("rail-optimised", "fat-tree")
    for over in (1.0, 2.0, 4.0)
] + [cluster_of(oversubscription=2.0, leaves_per_pod=2, core_oversubscription=2.0)]
CASES = [
    (Collective.ALL_REDUCE, Axis.DATA, DENSE, "tp-cp-ep-dp-pp"),
    (Collective.ALL_GATHER, Axis.DATA, STAGED, "tp-cp-ep-pp-dp"),
    (Collective.ALL_GATHER, Axis.DATA, STAGED, "tp-cp-ep-dp-pp"),
    (Collective.ALL_TO_ALL, Axis.EXPERT, EXPERTS, "tp-cp-ep-dp-pp"),
    (Collective.ALL_TO_ALL, Axis.EXPERT, ALL_EXPERTS, "tp-cp-ep-dp-pp"),
]


def links_of(cluster: ClusterSpec) -> ClusterLinks:
    return cluster_links(cluster, MODEL.coefficients)


def siblings(kind: Collective, axis: Axis, layout: ParallelConfig, order: str) -> list[Communicator]:
    groups = axis_groups(axis, layout, order)
    return [Communicator(collective=kind, devices=tuple(g), message_bytes=SIZE) for g in groups.tolist()]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c.fabric.topology}-{c.fabric.oversubscription}")
@pytest.mark.parametrize(("kind", "axis", "layout", "order"), CASES)
def test_siblings_of_an_axis_take_what_the_flow_engine_says(
    kind: Collective, axis: Axis, layout: ParallelConfig, order: str, cluster: ClusterSpec
) -> None:
    shape = group_shape(axis, layout, cluster, Placement(order=order))
    times = contended_times(
        cluster_network(cluster, 8), siblings(kind, axis, layout, order), spread="spray", via_rail=True
    )
    engine = max(time.shared_s for time in times)
    assert link_use(kind, shape, links_of(cluster), SIZE).stream_s == pytest.approx(engine, rel=1e-9)


@pytest.mark.parametrize("cluster", CLUSTERS[:6], ids=lambda c: f"{c.fabric.topology}-{c.fabric.oversubscription}")
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_sends_between_all_stages_take_what_the_flow_engine_says(stages: int, cluster: ClusterSpec) -> None:
    layout = ParallelConfig(tensor_parallel=8, pipeline_parallel=stages, data_parallel=8 // stages)
    pipelines = axis_groups(Axis.PIPELINE, layout)
    sends = [
        Communicator(collective=Collective.SEND, devices=(row[i], row[(i + 1) % stages]), message_bytes=SIZE)
        for row in pipelines.tolist()
        for i in range(stages)
    ]
    times = contended_times(cluster_network(cluster, 8), sends, spread="spray")
    shape = pipeline_boundary(layout, cluster, 0)
    use = link_use(Collective.SEND, shape, links_of(cluster), SIZE)
    assert use.stream_s == pytest.approx(max(time.shared_s for time in times), rel=1e-9)


def test_pairs_without_pxn_cross_the_spines() -> None:
    cluster = cluster_of(oversubscription=4.0)
    network, expert = cluster_network(cluster, 8), siblings(Collective.ALL_TO_ALL, Axis.EXPERT, EXPERTS, CASES[0][3])
    times = {
        pxn: max(t.shared_s for t in contended_times(network, expert, spread="spray", via_rail=pxn))
        for pxn in (True, False)
    }
    shape, links = group_shape(Axis.EXPERT, EXPERTS, cluster), links_of(cluster)
    arrays = group_arrays(links, shape.num_ranks, shape.ranks_per_node, shape.groups_per_node)
    share = [float(spine_share(arrays, links, "pairs", pxn=pxn)[0]) for pxn in (True, False)]
    assert share == pytest.approx([1.0, 1 / 3.5])
    assert times[False] / times[True] == pytest.approx(3.5)
    assert not Capabilities(pxn=False).pxn


@pytest.mark.parametrize("over", [1.0, 4.0])
def test_an_exchange_under_rings_splits_links_as_the_flow_engine_does(over: float) -> None:
    cluster = cluster_of(oversubscription=over)
    links, network = links_of(cluster), cluster_network(cluster, 8)
    rings = siblings(Collective.ALL_REDUCE, Axis.DATA, DENSE, CASES[0][3])
    expert = siblings(Collective.ALL_TO_ALL, Axis.EXPERT, ALL_EXPERTS, CASES[0][3])
    parts = [flows_of(c.collective, c.devices, c.message_bytes) for c in rings + expert]
    flows = join_flows(parts)
    routes = route(network, flows.sources, flows.targets, spread="spray", via_rail=True)
    rates = flow_rates(network, routes)
    is_ring = np.arange(flows.num_flows) < sum(p.num_flows for p in parts[: len(rings)])
    leaves = flows.sources // 16 != flows.targets // 16
    first = link_use(Collective.ALL_REDUCE, group_shape(Axis.DATA, DENSE, cluster), links, SIZE)
    second = link_use(Collective.ALL_TO_ALL, group_shape(Axis.EXPERT, ALL_EXPERTS, cluster), links, SIZE)
    split = shared_rates(first, second, per_flow=True)
    assert split.level == ("cards" if over == 1.0 else "spines")
    least = [float(rates[is_ring].min()), float(rates[~is_ring & leaves].min())]
    expected = [split.first * first.flow_bytes_per_s, split.second * second.flow_bytes_per_s]
    assert least == pytest.approx(expected, rel=1e-6)


def use_of(part: tuple[float, float, float]) -> LinkUse:
    return LinkUse(part=part, num_flows=(1.0, 1.0, 1.0), flow_bytes_per_s=1e9, stream_s=1.0)


PARTS = st.tuples(*[st.floats(0.0, 1.0)] * 3).map(lambda p: (1.0, p[1], p[2]) if max(p) < 0.5 else p)


@examples(200)
@given(PARTS, PARTS)
def test_no_level_carries_more_than_it_can_and_nobody_waits_for_nothing(
    first: tuple[float, float, float], second: tuple[float, float, float]
) -> None:
    split = shared_rates(use_of(first), use_of(second))
    loads = [a * split.first + b * split.second for a, b in zip(first, second, strict=True)]
    assert max(loads) <= 1 + 1e-9
    assert 0 < split.first <= 1
    assert 0 < split.second <= 1
    assert (split.level is None) == (min(split.first, split.second) > 1 - 1e-6) or max(loads) > 1 - 1e-6
    other = shared_rates(use_of(second), use_of(first))
    assert (other.second, other.first) == pytest.approx((split.first, split.second))


def test_equal_collectives_on_one_level_halve_each_other() -> None:
    split = shared_rates(use_of((0.0, 1.0, 0.2)), use_of((0.0, 1.0, 0.0)))
    assert (split.level, split.first, split.second) == ("cards", 0.5, 0.5)
    apart = shared_rates(use_of((1.0, 0.0, 0.0)), use_of((0.0, 1.0, 0.0)))
    assert (apart.level, apart.first, apart.second) == (None, 1.0, 1.0)
    light = shared_rates(use_of((0.0, 1.0, 0.0)), use_of((1.0, 0.2, 0.0)))
    assert (light.first, light.second) == pytest.approx((0.8, 1.0))


def test_bad_uses_are_refused() -> None:
    links, pair = links_of(BASE), GroupShape(num_ranks=2, ranks_per_node=1)
    with pytest.raises(SpecError, match="sends nothing"):
        link_use(Collective.ALL_REDUCE, GroupShape(num_ranks=1, ranks_per_node=1), links)
    with pytest.raises(SpecError, match="moves no data"):
        link_use(Collective.BARRIER, pair, links)


@examples(100)
@given(st.floats(10, 31), st.sampled_from([4, 8, 16, 64]), st.floats(1.0, 8.0), st.floats(1.0, 8.0))
def test_unequal_parts_never_change_what_runs(power: float, ranks: int, first: float, second: float) -> None:
    low, high = sorted((first, second))
    group = GroupShape(num_ranks=ranks, ranks_per_node=min(ranks, 8))

    def priced(imbalance: float) -> tuple[float, str]:
        request = CollectiveRequest(
            collective=Collective.ALL_TO_ALL, message_bytes=2.0**power, group=group, imbalance=imbalance
        )
        return MODEL.collective_time(request, BASE).time_s, MODEL.chosen_algorithm(request, BASE)

    less, more = priced(low), priced(high)
    assert less[1] == more[1] == priced(1.0)[1]
    assert less[0] <= more[0] * (1 + 1e-12) <= less[0] * high / low * (1 + 1e-9)
