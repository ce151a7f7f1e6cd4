"""Flows that share links: their rates, when they end, and what running together costs communicators.

The rates are those of `fair_share`: what per-flow fair queueing, or congestion control that has settled, comes near to.
Approximation: transport start-up, loss, and head-of-line blocking behind full buffers are left out (under-estimates
incast and collisions on RoCE).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.comm.fair_share import Indices, fill, run_flows
from echo_explore.comm.patterns import Flows, flows_of, join_flows
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective
from echo_explore.topology.network import Network
from echo_explore.topology.routing import Routes, Spread, route

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A collective that runs beside others.

    Attributes:
        devices: GPU of each rank, in the order of the ring.
        message_bytes: nccl-tests' S.
        start_s: when it starts.
    """

    collective: Collective
    devices: tuple[int, ...]
    message_bytes: float
    start_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContendedTime:
    """Seconds of a communicator alone, and beside the others; without launch and steps, bandwidth only."""

    alone_s: float
    shared_s: float

    @property
    def slowdown(self) -> float:
        """Shared over alone, 1 or more; 1 where nothing is sent."""
        return self.shared_s / self.alone_s if self.alone_s > 0 else 1.0


def flow_rates(network: Network, routes: Routes) -> Floats:
    """Bytes per second of each flow when all send at once, shape (num_flows,); infinite within one device."""
    table = _tables(network, routes)
    rate = np.zeros(routes.num_flows)
    fill(*table, np.ones(routes.num_flows, np.bool_), 0.0, rate)
    return rate


def flow_times(
    network: Network,
    routes: Routes,
    num_bytes: npt.ArrayLike,
    *,
    start_s: npt.ArrayLike = 0.0,
    merge_fraction: float = 0.0,
) -> Floats:
    """Seconds from time 0 at which each flow ends, shape (num_flows,), without the latency of its route.

    Args:
        network: where.
        routes: of each flow.
        num_bytes: of each flow, or one number for all.
        start_s: of each flow, or one number for all.
        merge_fraction: flows that end within this part of the elapsed time after another free their links with it; 0
            is exact. Approximation: above 0, times are under-estimated by about that part at most.

    Raises:
        SpecError: a negative or non-finite size or time.
    """
    size = _per_flow(num_bytes, routes.num_flows, "num_bytes")
    start = _per_flow(start_s, routes.num_flows, "start_s")
    if not 0 <= merge_fraction < 1:
        raise SpecError("merge_fraction", merge_fraction, "must lie in 0..1", "give for example 0.01")
    return run_flows(*_tables(network, routes), size, start, merge_fraction)


def step_time(
    network: Network, flows: Flows, *, spread: Spread = "hash", seed: int = 0, merge_fraction: float = 0.0
) -> float:
    """Seconds of a step in which all flows start together, until the last byte of the last one has arrived."""
    if not flows.num_flows:
        return 0.0
    routes = route(network, flows.sources, flows.targets, spread=spread, seed=seed)
    times = flow_times(network, routes, flows.num_bytes, merge_fraction=merge_fraction)
    return float((times + routes.latency_s(network)).max())


def busiest_link_time(network: Network, routes: Routes, num_bytes: npt.ArrayLike) -> float:
    """Seconds that the busiest link takes for its bytes: max over l of sum_f a_lf S_f / c_l.

    Never more than the time of the flow engine, and equal to it for symmetric patterns: where the busiest link is full
    from the first to the last moment.
    """
    size = _per_flow(num_bytes, routes.num_flows, "num_bytes")
    load = np.bincount(
        routes.links, weights=routes.shares * np.repeat(size, np.diff(routes.offsets)), minlength=network.num_links
    )
    return float((load / network.bandwidth_bytes_per_s).max())


def contended_times(
    network: Network,
    communicators: Sequence[Communicator],
    *,
    spread: Spread = "hash",
    seed: int = 0,
    via_rail: bool = False,
    merge_fraction: float = 0.0,
) -> list[ContendedTime]:
    """What each communicator takes alone and beside the others, by its slowest flow.

    A collective is its flows at once, whole: a ring's edges, each 2 (n-1)/n S for an all-reduce; chunks are pipelined,
    so that no edge waits. Communicators of one network at different `start_s` overlap only while both send.

    Raises:
        SpecError: a collective that is no pattern of flows, a device twice in a communicator, a negative size or time.
    """
    all_flows = [flows_of(c.collective, c.devices, c.message_bytes) for c in communicators]
    if not all_flows:
        return []
    joined = join_flows(all_flows)
    start = np.concatenate([np.full(f.num_flows, c.start_s) for f, c in zip(all_flows, communicators, strict=True)])
    routes = route(network, joined.sources, joined.targets, spread=spread, seed=seed, via_rail=via_rail)
    together = flow_times(network, routes, joined.num_bytes, start_s=start, merge_fraction=merge_fraction)
    result, first = [], 0
    for flows, communicator in zip(all_flows, communicators, strict=True):
        last = first + flows.num_flows
        if first == last:
            result.append(ContendedTime(alone_s=0.0, shared_s=0.0))
            continue
        own = routes.part(first, last)
        alone = flow_times(network, own, flows.num_bytes, merge_fraction=merge_fraction)
        shared = float(together[first:last].max()) - communicator.start_s
        result.append(ContendedTime(alone_s=float(alone.max()), shared_s=shared))
        first = last
    return result


def _per_flow(values: npt.ArrayLike, num_flows: int, field: str) -> Floats:
    array = np.array(np.broadcast_to(np.asarray(values, np.float64), (num_flows,)))
    if array.size and not (np.isfinite(array).all() and array.min() >= 0):
        wrong = array[~np.isfinite(array) | (array < 0)][0]
        raise SpecError(field, float(wrong), "must be finite and not negative", "correct it")
    return array


def _tables(network: Network, routes: Routes) -> tuple[Floats, Indices, Indices, Floats, Indices, Indices]:
    """Capacity, and CSR of flows and of links, over the links in use only."""
    used, links = np.unique(routes.links, return_inverse=True)
    links = links.astype(np.int64)
    flow_of = np.repeat(np.arange(routes.num_flows), np.diff(routes.offsets))
    order = np.argsort(links, kind="stable")
    link_offsets = np.searchsorted(links[order], np.arange(len(used) + 1)).astype(np.int64)
    capacity = network.bandwidth_bytes_per_s[used]
    return capacity, routes.offsets, links, routes.shares, link_offsets, flow_of[order].astype(np.int64)
