"""Flows that share links: their rates, when they end, and what running together costs communicators.

The rates are those of `fair_share`: what per-flow fair queueing, or congestion control that has settled, comes near to.
Approximation: transport start-up, loss, and head-of-line blocking behind full buffers are left out (under-estimates
incast and collisions on RoCE).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.comm.fair_share import FlowTable, fill, new_rates
from echo_explore.comm.flow_events import run_flows
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
    table = _table(network, routes)
    state = new_rates(routes.num_flows, len(table.capacity))
    state.active[:] = True
    fill(table, state)
    return state.rate


def flow_times(
    network: Network,
    routes: Routes,
    num_bytes: npt.ArrayLike,
    *,
    start_s: npt.ArrayLike = 0.0,
) -> Floats:
    """Seconds from time 0 at which each flow ends, shape (num_flows,), without the latency of its route.

    Args:
        network: where.
        routes: of each flow.
        num_bytes: of each flow, or one number for all.
        start_s: of each flow, or one number for all.

    Raises:
        SpecError: a negative or non-finite size or time.
    """
    size = _per_flow(num_bytes, routes.num_flows, "num_bytes")
    start = _per_flow(start_s, routes.num_flows, "start_s")
    table = _table(network, routes)
    return run_flows(table, new_rates(routes.num_flows, len(table.capacity)), size, start)


def step_time(network: Network, flows: Flows, *, spread: Spread = "hash", seed: int = 0, detour: bool = False) -> float:
    """Seconds of a step in which all flows start together, until the last byte of the last one has arrived."""
    if not flows.num_flows:
        return 0.0
    routes = route(network, flows.sources, flows.targets, spread=spread, seed=seed, detour=detour)
    times = flow_times(network, routes, flows.num_bytes)
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
    detour: bool = False,
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
    ways = {"spread": spread, "seed": seed, "via_rail": via_rail, "detour": detour}
    routes = route(network, joined.sources, joined.targets, **ways)  # type: ignore[arg-type]
    together = flow_times(network, routes, joined.num_bytes, start_s=start)
    result, first = [], 0
    for flows, communicator in zip(all_flows, communicators, strict=True):
        last = first + flows.num_flows
        if first == last:
            result.append(ContendedTime(alone_s=0.0, shared_s=0.0))
            continue
        own = routes.part(first, last)
        alone = flow_times(network, own, flows.num_bytes)
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


def _table(network: Network, routes: Routes) -> FlowTable:
    """The routes by flow and by link, over the links in use only."""
    used, links = np.unique(routes.links, return_inverse=True)
    links = links.astype(np.int64)
    flow_of = np.repeat(np.arange(routes.num_flows), np.diff(routes.offsets))
    order = np.argsort(links, kind="stable")
    return FlowTable(
        capacity=network.bandwidth_bytes_per_s[used],
        offsets=routes.offsets,
        links=links,
        shares=routes.shares,
        link_offsets=np.searchsorted(links[order], np.arange(len(used) + 1)).astype(np.int64),
        link_flows=flow_of[order].astype(np.int64),
        link_shares=routes.shares[order],
    )
