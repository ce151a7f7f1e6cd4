"""What a routed fabric (dragonfly, torus, mesh, BiGraph) leaves of the cards to a pattern, by the flow engine.

All groups of an axis send at once over the cluster's own network, each domain's cards as one: hosts of these fabrics
have all their cards on one router, or half of them on each of two switches (BiGraph), so that nothing is lost by it.
With R bytes per second that a domain then gets out, until the slowest flow has ended, and g groups that share it with
B each, the share of a pattern is min(1, R / (g B)). Flows spread over all shortest paths.

Groups {a + s i} for a < s, i < M tile the network's domains from its start: the whole of a torus or mesh, whose dims
name every host, but of other fabrics only the domains of the first block of M s, rounded up to whole groups of routers
or pairs of switches. Computed once for each fabric, M, s and pattern.

# Approximation: which rank of a domain sends is not seen, nor where in the fabric the job lies (either way).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from echo_explore.comm.contention import flow_times
from echo_explore.core import MissingCalibration, PlacementError
from echo_explore.specs import ClusterSpec, FabricSpec
from echo_explore.topology import Network, cluster_network
from echo_explore.topology.routing import route

Pattern = Literal["neighbours", "tree", "pairs", "shift", "exchange"]
"""Rings and chains; double binary trees; all-to-all; sends over s domains; partners i and i xor d of a group."""
ROUTED = ("dragonfly", "torus", "mesh", "bigraph")
_MOST_FLOWS = 1 << 17
"""More are refused: all-to-alls of some 360 hosts or more."""
Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class RoutedFabric:
    """A cluster of such a fabric, one device a host (two on a BiGraph of several cards a host), cards as one.

    Attributes:
        fabric: topology, dims and cables.
        host_bytes_per_s: of all cards of a host.
        domain_hosts: hosts in a scale-up domain.
        max_hosts: that the cluster has.
        host_devices: 1, or 2 where a host's cards are split over two switches.
        cluster: the reduced cluster.
    """

    fabric: FabricSpec
    host_bytes_per_s: float
    domain_hosts: int
    max_hosts: int
    host_devices: int
    cluster: ClusterSpec = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RoutedShare:
    """What a pattern gets.

    Attributes:
        bytes_per_s: out of a domain, all its groups together.
        extra_s: latency of a step beyond `FabricSpec.latency_s`: cables between switches, mean over flows.
    """

    bytes_per_s: float
    extra_s: float


def routed_fabric(cluster: ClusterSpec) -> RoutedFabric | None:
    """The fabric of a cluster; None where it is no routed one or joins no cards."""
    node, fabric = cluster.node, cluster.fabric
    if fabric.topology not in ROUTED or not node.num_nics:
        return None
    devices = 2 if fabric.topology == "bigraph" and node.num_nics > 1 else 1
    whole = node.network_bandwidth_bytes_per_s
    reduced = {
        "num_gpus": devices,
        "num_nics": devices,
        "scale_up_gpus": devices,
        "nic_bandwidth_bytes_per_s": whole / devices,
        "pcie_bandwidth_bytes_per_s": 8 * whole,
        "gpus_per_pcie_switch": 1,
        "nic_place": "switch",
    }
    return RoutedFabric(
        fabric=fabric,
        host_bytes_per_s=whole,
        domain_hosts=node.domain_gpus // node.num_gpus,
        max_hosts=cluster.max_gpus // node.num_gpus,
        host_devices=devices,
        cluster=cluster.model_copy(update={"node": node.model_copy(update=reduced)}),
    )


@lru_cache(maxsize=4096)
def routed_share(fabric: RoutedFabric, num_nodes: int, stride: int, pattern: Pattern, distance: int = 0) -> RoutedShare:
    """What the pattern gets on groups of `num_nodes` domains, `stride` apart; `distance` is that of an exchange.

    Raises:
        PlacementError: a group does not fit the fabric.
        MissingCalibration: too many flows to route.
        SpecError: the fabric's figures do not fit together.
    """
    network, domains = _network(fabric, num_nodes * stride)
    source, target, size = _group_flows(num_nodes, stride, pattern, distance)
    blocks = max(1, domains // (num_nodes * stride))
    count = len(source) * blocks * fabric.domain_hosts * fabric.host_devices
    if pattern == "pairs":
        count *= fabric.host_devices
    if count > _MOST_FLOWS:
        rule = f"{count} flows of {pattern} on {num_nodes} domains are more than the {_MOST_FLOWS} that are routed"
        raise MissingCalibration(f"fabric.topology: {fabric.fabric.topology}: {rule}; fix: price a smaller group")
    out = float(np.bincount(source, weights=size).max())
    shifts = np.arange(blocks)[:, None] * num_nodes * stride
    start, end = _devices(fabric, (source + shifts).ravel(), (target + shifts).ravel(), crossed=pattern == "pairs")
    each = np.repeat(np.tile(size, blocks), len(start) // (blocks * len(size)))
    routes = route(network, start, end, spread="spray")
    parts = fabric.domain_hosts * fabric.host_devices * (fabric.host_devices if pattern == "pairs" else 1)
    seconds = float(flow_times(network, routes, each / parts * _UNIT_BYTES).max())
    extra = float(routes.latency_s(network).mean()) - fabric.fabric.latency_s
    return RoutedShare(bytes_per_s=out * _UNIT_BYTES / seconds, extra_s=max(0.0, extra))


_UNIT_BYTES = 1e9
"""Of the largest flows: rates depend on no size."""


def _network(fabric: RoutedFabric, span: int) -> tuple[Network, int]:
    """The network with room for a block of `span` domains, and the domains of it that are used."""
    spec, hosts = fabric.fabric, span * fabric.domain_hosts
    if hosts > fabric.max_hosts:
        rule = f"groups over {span} domains need {hosts} of the {fabric.max_hosts} hosts of {fabric.cluster.name}"
        raise PlacementError("fabric", spec.topology, rule, "use fewer GPUs or correct dims")
    if spec.topology in ("torus", "mesh"):
        hosts = int(np.prod(spec.dims))
        return _built(fabric, hosts), hosts // fabric.domain_hosts
    if spec.topology == "dragonfly":
        # bandwidths of its cables depend on the routers of a group: whole groups, or all hosts there are
        fill = spec.nodes_per_leaf * max(1, spec.leaves_per_pod)
        hosts = min(-(-hosts // fill) * fill, fabric.max_hosts)
    if spec.topology == "bigraph":
        fill = spec.nodes_per_leaf * (1 if fabric.host_devices == 2 else 2)
        hosts = -(-hosts // fill) * fill
        if hosts > fabric.max_hosts:
            rule = f"its switches take {fill} hosts a pair, and {fabric.max_hosts} do not fill them"
            raise PlacementError("fabric.nodes_per_leaf", spec.nodes_per_leaf, rule, "change it")
    return _built(fabric, hosts), span


@lru_cache(maxsize=16)
def _built(fabric: RoutedFabric, hosts: int) -> Network:
    return cluster_network(fabric.cluster, hosts)


def _group_flows(num_nodes: int, stride: int, pattern: Pattern, distance: int) -> Pairs:
    """Domains that send, that receive and relative bytes, of all groups of one block."""
    at = np.arange(num_nodes)
    if pattern == "shift":
        span = np.arange(num_nodes * stride)
        return span, (span + stride) % len(span), np.ones(len(span))
    if pattern == "neighbours":
        source, target, size = at, np.roll(at, -1), np.ones(num_nodes)
    elif pattern == "exchange":
        partner = at ^ distance
        keep = partner < num_nodes
        source, target, size = at[keep], partner[keep], np.ones(int(keep.sum()))
    elif pattern == "tree":
        source, target, size = _double_tree(num_nodes)
    else:
        source = np.repeat(at, num_nodes - 1)
        target = (source + np.tile(np.arange(1, num_nodes), num_nodes)) % num_nodes
        size = np.ones(len(source))
    member = np.arange(stride)[:, None]
    return (
        (member + source * stride).ravel(),
        (member + target * stride).ravel(),
        np.tile(size, stride),
    )


def _double_tree(num_nodes: int) -> Pairs:
    """Edges, up and down, of both of NCCL's trees [NCCL 2.18 src/graph/trees.cc, 2023]: half of the bytes on each.

    A node's parent in the first clears its lowest bit and sets the next, or only clears it where that lies outside;
    the second is the first mirrored (even counts) or shifted by one.
    """
    node = np.arange(1, num_nodes)
    low = node & -node
    up = (node ^ low) | (low << 1)
    parent = np.where(up >= num_nodes, node ^ low, up)
    if num_nodes % 2 == 0:
        other = (num_nodes - 1 - node, num_nodes - 1 - parent)
    else:
        other = ((node + 1) % num_nodes, (parent + 1) % num_nodes)
    source = np.concatenate([node, parent, other[0], other[1]])
    target = np.concatenate([parent, node, other[1], other[0]])
    return source, target, np.full(len(source), 0.5)


def _devices(
    fabric: RoutedFabric, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], *, crossed: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Devices of flows between domains: host i of one to host i of the other, each half to its like, or to both."""
    hosts, k = fabric.domain_hosts, fabric.host_devices
    each = np.arange(hosts)[:, None] * k
    half = np.arange(k)
    mine, theirs = (np.repeat(half, k), np.tile(half, k)) if crossed else (half, half)
    start = source[:, None] * hosts * k + (each + mine[None, :]).ravel()[None, :]
    end = target[:, None] * hosts * k + (each + theirs[None, :]).ravel()[None, :]
    return start.ravel(), end.ravel()
