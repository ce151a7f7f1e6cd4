"""Routes of flows over a network: shortest paths, spread over equal ones as switches do.

A pair of devices takes scale-up links only where they join it, else PCIe too, else the network; among these, paths with
the fewest links. Three ways to spread over equal paths:

- `hash`: each switch picks by a hash of the flow, as ECMP does; flows collide.
- `destination`: each switch picks by the destination's number, digit by digit, as static tables of fat trees do
  (D-mod-K; Zahavi, "Fat-tree routing and node ordering providing contention free traffic for MPI global collectives",
  JPDC 72 (2012)); shifts of devices do not collide.
- `spray`: each switch splits evenly over all, as adaptive routing and packet spraying come near to.

With `detour` a flow first goes to the switch of a random host, then on from there (Valiant and Brebner, "Universal
schemes for parallel communication", STOC 1981; for dragonflies Kim et al., ISCA 2008): twice the load for even traffic,
and no cable that all flows of a shift share.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError
from echo_explore.topology.network import Floats, Ints, LinkKind, Network, VertexKind, component_labels
from echo_explore.topology.paths import SPRAY, Graph, Search, find_routes

Spread = Literal["hash", "destination", "spray"]
SPREADS: dict[Spread, int] = {"hash": 0, "destination": 1, "spray": SPRAY}
_REACH = np.array([LinkKind.SCALE_UP, LinkKind.PCIE, LinkKind.WIDE_AREA], np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Links of each flow in CSR form: flow i has links[offsets[i]:offsets[i + 1]].

    Attributes:
        links: directed links; in path order except under `spray`.
        shares: part of the flow that each of them carries; 1 except under `spray`.
        num_links: length of the path of each flow; 0 from a device to itself.
    """

    offsets: npt.NDArray[np.int64]
    links: Ints
    shares: Floats
    num_links: Ints

    @property
    def num_flows(self) -> int:
        """Pairs routed."""
        return len(self.num_links)

    def of(self, flow: int) -> Ints:
        """Links of one flow."""
        return self.links[self.offsets[flow] : self.offsets[flow + 1]]

    def latency_s(self, network: Network) -> Floats:
        """Seconds from end to end of each flow, by its links alone; shape (num_flows,)."""
        return self._sum(network.latency_s[self.links])

    def num_switches(self, network: Network) -> Ints:
        """Network switches that each flow passes; shape (num_flows,)."""
        passed = network.vertex_kind[network.target[self.links]] == VertexKind.SWITCH
        return np.rint(self._sum(passed.astype(np.float64))).astype(np.int32)

    def _sum(self, of_link: Floats) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(of_link * self.shares)])
        return np.asarray(total[self.offsets[1:]] - total[self.offsets[:-1]])

    def part(self, first: int, last: int) -> "Routes":
        """Routes of flows first..last-1."""
        begin, end = self.offsets[first], self.offsets[last]
        return Routes(
            offsets=self.offsets[first : last + 1] - begin,
            links=self.links[begin:end],
            shares=self.shares[begin:end],
            num_links=self.num_links[first:last],
        )

    def joined(self, other: "Routes") -> "Routes":
        """Routes of these flows, then of the other's."""
        return Routes(
            offsets=np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
            links=np.concatenate([self.links, other.links]),
            shares=np.concatenate([self.shares, other.shares]),
            num_links=np.concatenate([self.num_links, other.num_links]),
        )


def route(
    network: Network,
    sources: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    spread: Spread = "hash",
    seed: int = 0,
    via_rail: bool = False,
    detour: bool = False,
) -> Routes:
    """Routes between devices.

    Args:
        network: where.
        sources: device numbers, shape (num_flows,).
        targets: device numbers, shape (num_flows,).
        spread: see the module.
        seed: other seeds give other hashes.
        via_rail: a flow to a card of another rail first goes over the scale-up links to the GPU of its host that has
            that rail (NCCL's PXN, "Doubling all2all performance with NCCL 2.12", NVIDIA 2022).
        detour: flows between hosts go over the switch of a random third one (Valiant), picked anew with each seed.

    Raises:
        SpecError: a device that the network has not; two that no path joins; an unknown `spread`; `detour` with
            `via_rail`, or where the cards of a host hang on several switches.
    """
    start, end = (_device_numbers(network, numbers) for numbers in (sources, targets))
    if start.shape != end.shape:
        raise SpecError("targets", len(end), f"must be as many as sources = {len(start)}", "give one target a source")
    if spread not in SPREADS:
        raise SpecError("spread", spread, "is not a way to spread flows", f"use {', '.join(SPREADS)}")
    if via_rail and detour:
        raise SpecError("detour", True, "does not go with via_rail", "give one of them")
    if via_rail:
        return _via_rail(network, start, end, spread, seed)
    if detour:
        return _over_third_hosts(network, start, end, spread, seed)
    return _routes(network, start, end, np.arange(len(start)), spread, seed)


def _routes(network: Network, start: Ints, end: Ints, flow: npt.NDArray[np.int64], spread: Spread, seed: int) -> Routes:
    digits = network.ordinal[end].astype(np.int64) if spread == "destination" else np.full(len(end), -1, np.int64)
    graph = _graph(network)
    offsets, links, shares, num_links = find_routes(
        graph,
        _work_arrays(graph),
        _REACH,
        network.devices[start],
        network.devices[end],
        digits,
        flow.astype(np.int64) * 0x1F123BB5 + seed * 0x5851F42D + 1,
        SPREADS[spread],
    )
    if len(num_links) and num_links.min() < 0:
        pair = int(np.argmin(num_links))
        names = network.vertex_names
        raise SpecError(
            "route",
            f"{names[network.devices[start[pair]]]} -> {names[network.devices[end[pair]]]}",
            "no path joins them except through other devices",
            "add a switch or a link",
        )
    return Routes(offsets=offsets, links=links, shares=shares, num_links=num_links)


def _graph(network: Network) -> Graph:
    """What the search reads: who forwards, who is joined without the network, which switches hosts hang on."""
    kind = network.vertex_kind
    is_switch = kind == VertexKind.SWITCH
    joined = np.zeros((len(_REACH), network.num_vertices), np.int32)
    for step, limit in enumerate(_REACH[:-1]):
        local = network.link_kind <= limit
        joined[step] = component_labels(network.num_vertices, network.source[local], network.target[local])
    switch = np.where(is_switch, np.cumsum(is_switch) - 1, -1)
    outer = np.zeros(network.num_vertices, np.bool_)
    outer[network.target[~is_switch[network.source]]] = True
    outer &= is_switch
    return Graph(
        offsets=network.offsets,
        target=network.target,
        link_kind=network.link_kind,
        stops=(np.where(is_switch, 2, 0) + (kind == VertexKind.DEVICE)).astype(np.int32),
        joined=joined,
        switch=switch.astype(np.int32),
        row=np.where(outer, np.cumsum(outer) - 1, -1).astype(np.int32),
    )


def _work_arrays(graph: Graph) -> Search:
    num_vertices, num_rows = len(graph.row), int(graph.row.max()) + 1
    table = np.empty((num_rows, int(graph.switch.max()) + 1), np.int16)
    table[:, :1] = -1
    return Search(
        mark=np.zeros((2, num_vertices), np.int32),
        level=np.zeros((2, num_vertices), np.int32),
        queue=np.empty((2, num_vertices), np.int32),
        size=np.zeros(2, np.int32),
        left_mark=np.zeros(num_vertices, np.int32),
        left=np.zeros(num_vertices, np.int32),
        table=table,
        ends=np.zeros(num_rows + 1, np.int32),
        ends_left=np.zeros(num_rows + 1, np.int32),
    )


def _via_rail(network: Network, start: Ints, end: Ints, spread: Spread, seed: int) -> Routes:
    host, rail, domain = (part[network.devices] for part in (network.host, network.rail, network.domain))
    width = int(rail.max()) + 1
    seat = np.full((int(host.max()) + 1) * width, -1, np.int64)
    seat[host * width + rail] = np.arange(len(host))
    middle = seat[host[start] * width + rail[end]]
    direct = (domain[start] == domain[end]) | (middle < 0)
    middle = np.where(direct, start, middle).astype(np.int32)
    flow = np.arange(len(start))
    return _one_after_another(
        _routes(network, start, middle, flow, spread, seed), _routes(network, middle, end, flow, spread, seed)
    )


def _over_third_hosts(network: Network, start: Ints, end: Ints, spread: Spread, seed: int) -> Routes:
    """Two legs that meet at the switch of a third host, without the links inside that host."""
    host, domain = network.host[network.devices], network.domain[network.devices]
    _check_one_switch_a_host(network)
    middle: Ints = np.random.default_rng(seed).integers(network.num_devices, size=len(start), dtype=np.int32)
    direct = (domain[start] == domain[end]) | (host[middle] == host[start]) | (host[middle] == host[end])
    middle = np.where(direct, start, middle)
    flow = np.arange(len(start))
    first = _without_host(network, _routes(network, start, middle, flow, spread, seed), host[middle], ~direct)
    second = _without_host(network, _routes(network, middle, end, flow, spread, seed + 1), host[middle], ~direct)
    return _one_after_another(first, second)


def _check_one_switch_a_host(network: Network) -> None:
    """Every host reaches the network through one switch."""
    is_switch = network.vertex_kind == VertexKind.SWITCH
    up = is_switch[network.target] & ~is_switch[network.source]
    host, switch = network.host[network.source[up]], network.target[up]
    order = np.lexsort((switch, host))
    host, switch = host[order], switch[order]
    several = np.flatnonzero((host[1:] == host[:-1]) & (switch[1:] != switch[:-1]))
    if len(several):
        rule = "the cards of a host hang on several switches, so that it has no switch to go over"
        raise SpecError("detour", f"host {host[several[0]]}", rule, "use a dragonfly, torus or mesh, or leave it out")


def _without_host(network: Network, routes: Routes, host: Ints, where: npt.NDArray[np.bool_]) -> Routes:
    """Routes less their links that touch a vertex of `host`, by flow; only the flows in `where`."""
    flow = np.repeat(np.arange(routes.num_flows), np.diff(routes.offsets))
    ends = (network.host[network.source[routes.links]], network.host[network.target[routes.links]])
    inside = (ends[0] == host[flow]) | (ends[1] == host[flow])
    keep = ~(inside & where[flow])
    dropped = np.bincount(flow[~keep], weights=routes.shares[~keep], minlength=routes.num_flows)
    kept = np.bincount(flow[keep], minlength=routes.num_flows)
    return Routes(
        offsets=np.concatenate([[0], np.cumsum(kept)]).astype(np.int64),
        links=routes.links[keep],
        shares=routes.shares[keep],
        num_links=(routes.num_links - np.rint(dropped)).astype(np.int32),
    )


def _one_after_another(first: Routes, second: Routes) -> Routes:
    """Each flow over its route in `first`, then over that in `second`."""
    both = first.joined(second)
    num_flows = first.num_flows
    order = np.arange(2 * num_flows).reshape(2, num_flows).T.reshape(-1)
    lengths = np.diff(both.offsets)[order]
    starts = both.offsets[:-1][order]
    ends = np.cumsum(lengths)
    index = np.arange(int(ends[-1]) if num_flows else 0) + np.repeat(starts - ends + lengths, lengths)
    return Routes(
        offsets=np.concatenate([[0], ends[1::2]]).astype(np.int64),
        links=both.links[index],
        shares=both.shares[index],
        num_links=first.num_links + second.num_links,
    )


def _device_numbers(network: Network, numbers: npt.ArrayLike) -> Ints:
    devices = np.asarray(numbers)
    if devices.ndim != 1 or (devices.size and not np.issubdtype(devices.dtype, np.integer)):
        raise SpecError("devices", str(numbers), "must be a list of whole numbers", "give device numbers")
    if devices.size and not (devices.min() >= 0 and devices.max() < network.num_devices):
        wrong = devices[(devices < 0) | (devices >= network.num_devices)][0]
        raise SpecError("device", int(wrong), f"must lie in 0..{network.num_devices - 1}", "name a device")
    return devices.astype(np.int32)
