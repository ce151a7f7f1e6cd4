"""Frameworks' own kernels, halving-doubling, and what NCCL_ALGO and NCCL_PROTO do to a job."""

from dataclasses import replace

import numpy as np
import pytest

from echo_explore.comm import CollectiveRequest, ForcedChoice, HierarchicalModel
from echo_explore.comm.custom import custom_costs, own_kernel_s
from echo_explore.comm.halving_doubling import halving_doubling_time
from echo_explore.comm.model import make_batch
from echo_explore.comm.named import halving_doubling
from echo_explore.core import SpecError
from echo_explore.graph import Collective
from echo_explore.specs import ClusterSpec, load_cluster, load_stack
from echo_explore.topology import GroupShape, cluster_network

MODEL = HierarchicalModel.shipped()
H100 = load_cluster("h100-ndr")
INSIDE = GroupShape(num_ranks=8, ranks_per_node=8)


def request_of(size: float, group: GroupShape = INSIDE, kind: Collective = Collective.ALL_REDUCE) -> CollectiveRequest:
    return CollectiveRequest(collective=kind, message_bytes=size, group=group)


def forced(
    algorithm: str | None = None, library: str = "nccl-2.27", *, protocol: str | None = None
) -> HierarchicalModel:
    choice = ForcedChoice(algorithm=algorithm, protocol=protocol)
    return HierarchicalModel(coefficients=MODEL.coefficients, forced=choice, library=library)


def test_a_framework_takes_its_kernels_by_size_and_nccl_above() -> None:
    vllm = forced(library="vllm-0.19")
    sizes = (2.0**16, 2.0**18 - 1, 2.0**21, 2.0**30)
    names = [vllm.chosen_algorithm(request_of(size), H100) for size in sizes]
    assert names == ["one-shot/own", "one-shot/own", "in-switch/own", "nvls/Simple"]
    costs = custom_costs(MODEL.coefficients.custom, "vllm", MODEL.links_of(H100).scale_up.key)
    price = vllm.collective_time(request_of(2.0**16), H100)
    eight, size = np.array([8.0]), np.array([2.0**16])
    assert price.time_s == own_kernel_s("one-shot", eight, size, H100.node.link_bandwidth_bytes_per_s, costs)[0]
    assert price.sigma_log == costs.sigma_log
    assert vllm.plan(request_of(2.0**16), H100).num_sms == 8
    assert vllm.plan(request_of(2.0**21), H100).num_sms == 36


def test_a_framework_uses_nccl_between_hosts_and_for_other_collectives() -> None:
    across = GroupShape(num_ranks=16, ranks_per_node=8)
    for request in (request_of(2.0**16, across), request_of(2.0**16, INSIDE, Collective.ALL_GATHER)):
        assert forced(library="sglang-0.5.14").collective_time(request, H100) == MODEL.collective_time(request, H100)


def test_one_and_two_shot_can_be_forced_where_a_framework_is_named() -> None:
    for library in ("vllm", "sglang-0.5.10", "sglang-0.5.14", "trtllm"):
        for name in ("one-shot", "two-shot"):
            assert forced(name, library).chosen_algorithm(request_of(2.0**28), H100) == f"{name}/own"
    with pytest.raises(SpecError, match=r"algorithm = 'two-shot': is an all-reduce of an inference .* --library vllm"):
        forced("two-shot").collective_time(request_of(1e6), H100)
    with pytest.raises(SpecError, match=r"'one-shot'.*give .* all_reduce"):
        forced("one-shot", "vllm").collective_time(request_of(1e6, INSIDE, Collective.ALL_GATHER), H100)


def test_halving_doubling_is_taken_only_where_it_is_named() -> None:
    assert "halving-doubling/Simple" not in MODEL.algorithm_times(request_of(1e6), H100)
    price = forced("halving-doubling").collective_time(request_of(1e9), H100)
    assert price.sigma_log == MODEL.links_of(H100).network.unmeasured_sigma_log
    six = GroupShape(num_ranks=6, ranks_per_node=6)
    with pytest.raises(SpecError, match=r"choice = 'halving-doubling/any protocol': does not exist"):
        forced("halving-doubling").collective_time(request_of(1e6, six), H100)


def clos(oversubscription: float) -> ClusterSpec:
    changes = {"topology": "fat-tree", "nodes_per_leaf": 2, "oversubscription": oversubscription, "latency_s": 0.0}
    return H100.model_copy(update={"fabric": H100.fabric.model_copy(update=changes)})


@pytest.mark.parametrize("oversubscription", [1.0, 2.0])
@pytest.mark.parametrize("num_hosts", [2, 4, 8])
def test_bytes_of_halving_doubling_take_what_the_flow_engine_says(num_hosts: int, oversubscription: float) -> None:
    cluster, n, size = clos(oversubscription), 8 * num_hosts, 1e9
    links = MODEL.links_of(cluster)
    costs = replace(links.scale_up.all_reduce, efficiency=(1.0, 1.0, 1.0), local_efficiency=np.inf)
    network = replace(links.network, ring_efficiency=1.0, rail_efficiency=1.0, protocol_efficiency=(1.0, 1.0, 1.0))
    ideal = replace(links, scale_up=replace(links.scale_up, all_reduce=costs), network=network)
    one = np.ones(1)
    groups = make_batch(ideal, size * one, n * one, 8 * one, one).groups
    seconds = halving_doubling(groups, ideal, size * one).stream_s[0]
    flows = halving_doubling_time(cluster_network(cluster, num_hosts), np.arange(n), size, spread="spray")
    assert seconds == pytest.approx(flows, rel=1e-3)  # the engine adds the latency of cables


def test_nccl_algo_leaves_rings_of_other_collectives_and_sends() -> None:
    stack = load_stack("megatron-core").model_copy(update={"nccl_algo": "Tree,NVLSTree", "nccl_proto": "LL128,Simple"})
    model = MODEL.for_stack(stack, H100)
    across = GroupShape(num_ranks=32, ranks_per_node=8)
    assert model.chosen_algorithm(request_of(1e4, across), H100) in ("tree/LL128", "tree/Simple", "nvls-tree/Simple")
    gather = model.chosen_algorithm(request_of(1e4, across, Collective.ALL_GATHER), H100)
    assert gather.split("/")[0] == "ring"
    assert gather != "ring/LL"
    pair = request_of(1e3, GroupShape(num_ranks=2, ranks_per_node=2), Collective.SEND)
    assert model.chosen_algorithm(pair, H100) == MODEL.chosen_algorithm(pair, H100) == "direct/LL"
    with pytest.raises(SpecError, match=r"choice = 'Tree,NVLSTree/LL128,Simple': does not exist .* ring/LL"):
        model.collective_time(request_of(1e6), H100)
    with pytest.raises(SpecError, match=r"algorithm = 'Tree,Star': must be one of ring"):
        MODEL.for_stack(stack.model_copy(update={"nccl_algo": "Tree,Star"}), H100)


@pytest.mark.parametrize(
    ("version", "cluster", "library"),
    [
        ("2.21", "h100-ndr", "nccl-2.19"),
        ("2.28", "h100-ndr", "nccl-2.27"),
        ("2.4", "h100-ndr", "nccl-2.8"),
        ("2.22", "mi300x-roce", "rccl"),
    ],
)
def test_a_stack_brings_its_library(version: str, cluster: str, library: str) -> None:
    spec = load_cluster(cluster)
    stack = load_stack("megatron-core").model_copy(update={"nccl_version": version})
    model = MODEL.for_stack(stack, spec)
    job = ForcedChoice(of_a_job=True)
    assert model == HierarchicalModel(coefficients=MODEL.coefficients, forced=job, library=library)
    assert MODEL.for_stack(stack, spec) is model
    with pytest.raises(SpecError, match=r"stack.nccl_version = 'new': must be numbers"):
        MODEL.for_stack(stack.model_copy(update={"nccl_version": "new"}), H100)
