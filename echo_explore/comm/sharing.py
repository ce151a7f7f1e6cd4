"""Which links two collectives share that run beside each other, and how their rates split.

While a collective streams, all groups of its axis together load three levels of links evenly: the scale-up links of
GPUs, the cards of domains, the cables above leaf switches. At full rate the load is a part of what the level carries,
`LinkUse`; the busiest level of a collective alone is full. Two collectives whose parts add up to more than 1 on a level
slow each other down. Their rates are max-min fair between flows (`per_flow`, what the flow engine computes), or between
the two as wholes: NICs serve queue pairs in turn, and NCCL keeps about as many open for an exchange as for a ring.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from echo_explore.comm.bandwidth import bus_factor
from echo_explore.comm.paths import ClusterLinks, GroupArrays, group_arrays
from echo_explore.comm.routed import Pattern
from echo_explore.comm.spines import routed_headroom, spine_share
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective
from echo_explore.topology import GroupShape

LEVELS: Final = ("scale-up", "cards", "spines")
_NOTHING = 1e-9
"""A part of a level below this is none."""
Level = tuple[float, float, float]
_NEIGHBOURS = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.BROADCAST,
    Collective.REDUCE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What a collective takes of the links while it streams alone, all groups of its axis at once.

    Attributes:
        part: of what each of LEVELS carries, 0..1; the largest is 1.
        num_flows: flows on a link of each level.
        flow_bytes_per_s: of one flow.
        stream_s: seconds for the bytes of the message, without launch, steps and protocol.
    """

    part: Level
    num_flows: Level
    flow_bytes_per_s: float
    stream_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRates:
    """How two collectives run beside each other.

    Attributes:
        level: of LEVELS, where they hold each other back; None where they do not.
        first, second: rate of each over its rate alone, above 0 and at most 1.
    """

    level: str | None
    first: float
    second: float


def link_use(kind: Collective, group: GroupShape, links: ClusterLinks, message_bytes: float = 1.0) -> LinkUse:
    """The links that a collective of all groups of an axis takes, from the figures of the cluster alone.

    n ranks on M domains, r a domain, f of bus bandwidth, W, B, g groups a domain: a ring sends f S over a GPU's link
    and f S out of a domain; an all-to-all (r-1)/n S and r (n-r)/n S; a send S over the one or the other.

    Raises:
        SpecError: one rank, nothing to send, or a collective that moves no data.
        PlacementError: the group spans nodes that have no network card.
    """
    n, r = group.num_ranks, min(group.ranks_per_node, group.num_ranks)
    if n < 2 or not message_bytes > 0:
        raise SpecError("group", f"{n} ranks, {message_bytes:g} bytes", "sends nothing", "give two ranks and bytes")
    arrays = group_arrays(links, n, r, group.groups_per_node, group.node_stride)
    crosses = n > r
    pattern: Pattern
    if kind in _NEIGHBOURS:
        flow = message_bytes * bus_factor(kind, n)
        inner, outer, pattern = (flow if r > 1 else 0.0), flow, "neighbours"
        flows_in, flows_out = 1.0, group.groups_per_node
    elif kind == Collective.ALL_TO_ALL:
        flow = message_bytes / n
        inner, outer, pattern = (r - 1) * flow, r * (n - r) * flow, "pairs"
        flows_in, flows_out = r - 1.0, group.groups_per_node * r * (n - r)
    elif kind in (Collective.SEND, Collective.RECV):
        flow, pattern = message_bytes, "shift"
        inner, outer = (0.0, flow) if crosses else (flow, 0.0)
        flows_in, flows_out = 1.0, group.groups_per_node
    else:
        raise SpecError("collective", kind.name, "moves no data", "give a kind that does")
    return _use(arrays, links, pattern, (inner, outer if crosses else 0.0), flow, (flows_in, float(flows_out)))


def _use(
    arrays: GroupArrays,
    links: ClusterLinks,
    pattern: Pattern,
    load: tuple[float, float],
    flow_bytes: float,
    num_flows: tuple[float, float],
) -> LinkUse:
    inner, outer = load
    spines = float(spine_share(arrays, links, pattern)[0])
    cards_s = outer / float(arrays.network_bytes_per_s[0]) if outer else 0.0
    seconds = (inner / links.scale_up_bytes_per_s, cards_s, cards_s / spines)
    stream_s = max(seconds)
    # Above the leaves a collective that they do not hold back uses what its traffic there is of what they carry.
    above = seconds[2] if spines < 1.0 else cards_s * _above(arrays, links, pattern)
    part = (seconds[0] / stream_s, seconds[1] / stream_s, above / stream_s)
    return LinkUse(
        part=part,
        num_flows=(num_flows[0], num_flows[1], num_flows[1]),
        flow_bytes_per_s=flow_bytes / stream_s,
        stream_s=stream_s,
    )


def _above(arrays: GroupArrays, links: ClusterLinks, pattern: Pattern) -> float:
    """Load of the spines over that of the cards, both as parts of what they carry; at most 1."""
    if links.routed is not None:
        return min(1.0, 1.0 / float(routed_headroom(arrays, links, pattern)[0]))
    nodes, stride, below = float(arrays.num_nodes[0]), float(arrays.node_stride[0]), links.leaf_domains
    near = min(nodes, float(np.ceil(below / stride)))
    leaving = {
        "neighbours": 1.0 / near if nodes > near else 0.0,
        "pairs": 1.0 - (near - 1.0) / max(nodes - 1.0, 1.0),
        "shift": min(stride, below) / below,
    }
    return min(1.0, leaving[pattern] * links.oversubscription)


def shared_rates(first: LinkUse, second: LinkUse, *, per_flow: bool = False) -> SharedRates:
    """How two collectives split the links that they share: rates rise together until a level is full.

    Args:
        first: one of them.
        second: the other.
        per_flow: every flow counts the same; else the two collectives do.
    """
    uses = [np.where(np.array(use.part) > _NOTHING, use.part, 0.0) for use in (first, second)]
    flow = (first.flow_bytes_per_s, second.flow_bytes_per_s)
    both = [level for level in range(len(LEVELS)) if min(uses[0][level], uses[1][level]) > 0]
    if not both:
        return SharedRates(level=None, first=1.0, second=1.0)
    fullest = max(both, key=lambda level: uses[0][level] + uses[1][level])
    rate = [0.0, 0.0]  # of each over its rate alone
    speed = [1.0 / (flow[i] if per_flow else float(uses[i][fullest])) for i in (0, 1)]
    rising = [True, True]
    held: str | None = None
    while any(rising):
        steps = [((1.0 - rate[i]) / speed[i], -1) for i in (0, 1) if rising[i]]
        for level in range(len(LEVELS)):
            grows = sum(float(uses[i][level]) * speed[i] for i in (0, 1) if rising[i])
            if grows > 0:
                left = 1.0 - sum(float(uses[i][level]) * rate[i] for i in (0, 1))
                steps.append((max(left, 0.0) / grows, level))
        step, full = min(steps, key=lambda item: item[0])
        rate = [rate[i] + speed[i] * step if rising[i] else rate[i] for i in (0, 1)]
        for i in (0, 1):
            stops = rate[i] >= 1.0 - 1e-12 if full < 0 else uses[i][full] > 0
            rising[i] = rising[i] and not stops
        if full >= 0 and held is None and min(uses[0][full], uses[1][full]) > 0 and min(rate) < 1.0 - 1e-9:
            held = LEVELS[full]
    return SharedRates(level=held, first=min(rate[0], 1.0), second=min(rate[1], 1.0))
