"""Prices on fabrics without leaves, against the flow engine on the whole network, card by card."""

import pytest

from echo_explore.comm import CollectiveRequest, HierarchicalModel
from echo_explore.comm.contention import Communicator, contended_times
from echo_explore.comm.routed import routed_fabric, routed_share
from echo_explore.comm.sharing import link_use
from echo_explore.core import MissingCalibration, PlacementError, SpecError
from echo_explore.graph.kinds import Axis, Collective
from echo_explore.specs import ClusterSpec, ParallelConfig, load_cluster
from echo_explore.topology import GroupShape, axis_groups, cluster_network, group_shape

BASE = load_cluster("h100-ndr")
MODEL = HierarchicalModel.shipped()
SIZE = 2.0**30
WHOLE = ParallelConfig(data_parallel=128, expert_parallel=128)
DENSE = ParallelConfig(tensor_parallel=8, data_parallel=16)
STRIDED = ParallelConfig(tensor_parallel=8, pipeline_parallel=4, data_parallel=4)
INNER = ParallelConfig(tensor_parallel=2, data_parallel=64, expert_parallel=16)


def cluster_of(**changes: object) -> ClusterSpec:
    return BASE.model_copy(update={"fabric": BASE.fabric.model_copy(update=changes)})


CLUSTERS = {
    "torus": cluster_of(topology="torus", dims=(4, 4)),
    "mesh": cluster_of(topology="mesh", dims=(2, 8)),
    "dragonfly": cluster_of(topology="dragonfly", nodes_per_leaf=2, leaves_per_pod=4),
    "bigraph": cluster_of(topology="bigraph", nodes_per_leaf=4),
}


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(
    ("kind", "axis", "layout"),
    [
        (Collective.ALL_TO_ALL, Axis.EXPERT, WHOLE),
        (Collective.ALL_TO_ALL, Axis.EXPERT, INNER),
        (Collective.ALL_REDUCE, Axis.DATA, DENSE),
        (Collective.ALL_GATHER, Axis.DATA, STRIDED),
    ],
)
def test_all_groups_of_an_axis_take_what_the_flow_engine_says(
    name: str, kind: Collective, axis: Axis, layout: ParallelConfig
) -> None:
    cluster = CLUSTERS[name]
    groups = axis_groups(axis, layout, "tp-cp-ep-dp-pp")
    runs = [Communicator(collective=kind, devices=tuple(g), message_bytes=SIZE) for g in groups.tolist()]
    if name == "bigraph" and kind == Collective.ALL_TO_ALL and layout is INNER:
        pytest.skip("the cables of a BiGraph depend on how many hosts it has")
    times = contended_times(cluster_network(cluster, 16), runs, spread="spray")
    shape = group_shape(axis, layout, cluster)
    engine = max(t.shared_s for t in times)
    assert link_use(kind, shape, MODEL.links_of(cluster), SIZE).stream_s == pytest.approx(engine, rel=0.02)


def test_prices_of_an_exchange_differ_by_fabric() -> None:
    request = CollectiveRequest(
        collective=Collective.ALL_TO_ALL, message_bytes=SIZE, group=GroupShape(num_ranks=128, ranks_per_node=8)
    )
    times = {name: MODEL.collective_time(request, c).time_s for name, c in {**CLUSTERS, "rail": BASE}.items()}
    assert len({round(t, 5) for t in times.values()}) >= 4
    assert times["rail"] < times["torus"] < times["mesh"]


def test_trees_sends_and_halving_doubling_see_the_fabric() -> None:
    fabric = routed_fabric(CLUSTERS["torus"])
    assert fabric is not None
    whole = fabric.host_bytes_per_s
    for pattern, distance in (("tree", 0), ("exchange", 8), ("exchange", 2)):
        share = routed_share(fabric, 16, 1, pattern, distance)
        assert 0 < share.bytes_per_s < whole
    near, far = (routed_share(fabric, 2, stride, "shift").bytes_per_s for stride in (4, 2))
    assert near == pytest.approx(whole / 4)  # one of four cables each way
    assert far == pytest.approx(whole / 4)  # two cables on, both ways round: half of each on twice as many


def test_further_cables_add_their_latency() -> None:
    slow = cluster_of(topology="torus", dims=(4, 4), hop_latency_s=5e-6)
    shape = GroupShape(num_ranks=128, ranks_per_node=8)
    request = CollectiveRequest(collective=Collective.ALL_REDUCE, message_bytes=1024, group=shape)
    fast = MODEL.algorithm_times(request, CLUSTERS["torus"])["ring/LL"]
    # 30 steps over 15 edges of one cable or two, and one of two cables round the end
    assert MODEL.algorithm_times(request, slow)["ring/LL"] - fast > 30 * 5e-6


def test_more_gpus_than_dims_hold_are_refused() -> None:
    torus = CLUSTERS["torus"]
    assert torus.max_gpus == 128
    request = CollectiveRequest(
        collective=Collective.ALL_REDUCE, message_bytes=SIZE, group=GroupShape(num_ranks=256, ranks_per_node=8)
    )
    with pytest.raises(PlacementError, match="need 32 of the 16 hosts"):
        MODEL.collective_time(request, torus)


def test_what_cannot_be_routed_is_refused() -> None:
    large = cluster_of(topology="torus", dims=(32, 32))
    shape = GroupShape(num_ranks=8192, ranks_per_node=8)
    request = CollectiveRequest(collective=Collective.ALL_TO_ALL, message_bytes=SIZE, group=shape)
    with pytest.raises(MissingCalibration, match=r"fabric\.topology"):
        MODEL.collective_time(request, large)
    with pytest.raises(SpecError, match="routers per group"):
        MODEL.collective_time(request, cluster_of(topology="dragonfly"))
