"""Fabrics between hosts: one switch, leaf and spine, three-level Clos, rail-optimised, dragonfly, torus and mesh.

Every function takes the vertices of the cards of each host and adds switches and cables to the builder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo_explore.core import SpecError
from echo_explore.topology.network import LinkKind, NetworkBuilder, VertexKind

Cards = Sequence[Sequence[int]]
"""Vertices of the cards, host by host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """What the cables of a fabric are.

    Attributes:
        bandwidth_bytes_per_s: of a card, and of a switch port; one direction.
        latency_s: between two cards under one switch.
        hop_latency_s: of each cable between switches.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    hop_latency_s: float = 0.0

    def attach(self, builder: NetworkBuilder, card: int, switch: int) -> None:
        """Plug a card into a switch."""
        builder.link(card, switch, LinkKind.NETWORK, self.bandwidth_bytes_per_s, latency_s=self.latency_s / 2)

    def join(self, builder: NetworkBuilder, a: int, b: int, bandwidth_bytes_per_s: float | None = None) -> None:
        """Join two switches."""
        bandwidth = self.bandwidth_bytes_per_s if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
        builder.link(a, b, LinkKind.NETWORK, bandwidth, latency_s=self.hop_latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosShape:
    """Leaf switches under spines, or pods of them under cores.

    Attributes:
        nodes_per_leaf: hosts under one leaf, or with `rails` under one set of leaves.
        rails: card j of every host of a set goes to leaf j of the set; else all cards of a host to one leaf.
        oversubscription: bandwidth down over bandwidth up at a leaf.
        leaves_per_pod: leaves (with `rails`: sets of them) in a pod; 0: two levels, every leaf on every spine.
        core_oversubscription: the same at a pod's spine, three levels only.
    """

    nodes_per_leaf: int
    rails: bool = False
    oversubscription: float = 1.0
    leaves_per_pod: int = 0
    core_oversubscription: float = 1.0

    def __post_init__(self) -> None:
        check_at_least("nodes_per_leaf", self.nodes_per_leaf, 1)
        check_at_least("oversubscription", self.oversubscription, 1.0)
        check_at_least("core_oversubscription", self.core_oversubscription, 1.0)
        check_at_least("leaves_per_pod", self.leaves_per_pod, 0)


def check_at_least(field: str, value: float, least: float) -> None:
    """Refuse a value below `least`, infinite or not a number.

    Raises:
        SpecError: it is.
    """
    if not least <= value < math.inf:
        raise SpecError(field, value, f"must be {least} or more", "give a larger number")


def add_single_switch(builder: NetworkBuilder, cards: Cards, cable: Cable) -> None:
    """All cards on one switch."""
    switch = builder.vertex("switch", VertexKind.SWITCH)
    for host in cards:
        for card in host:
            cable.attach(builder, card, switch)


def add_clos(builder: NetworkBuilder, cards: Cards, cable: Cable, shape: ClosShape) -> None:
    """Leaves, spines, and cores where there are pods.

    A leaf with d cards has ceil(d / oversubscription) uplinks, one to each spine of its pod, which together carry
    d / oversubscription times a card. A pod's spine has as many uplinks, by the same rule, each to a core of its own
    plane; core c of plane s joins spine s of every pod.
    """
    num_rails = max(len(host) for host in cards) if shape.rails else 1
    hosts_below = min(shape.nodes_per_leaf, len(cards))
    down = hosts_below * (1 if shape.rails else max(len(host) for host in cards))
    leaves: list[list[int]] = []  # by set
    for host, row in enumerate(cards):
        if host % shape.nodes_per_leaf == 0:
            group = len(leaves)
            leaves.append([builder.vertex(f"leaf/{group}/{rail}", VertexKind.SWITCH) for rail in range(num_rails)])
        for j, card in enumerate(row):
            cable.attach(builder, card, leaves[-1][j if shape.rails else 0])
    if len(leaves) * num_rails == 1:
        return
    sets_per_pod = shape.leaves_per_pod or len(leaves)
    pods = [leaves[i : i + sets_per_pod] for i in range(0, len(leaves), sets_per_pod)]
    num_spines, up = _uplinks(down, shape.oversubscription, cable)
    below = min(sets_per_pod, len(leaves)) * num_rails
    num_cores, core_up = _uplinks(below * up / cable.bandwidth_bytes_per_s, shape.core_oversubscription, cable)
    cores: dict[int, list[int]] = {}
    for p, pod in enumerate(pods):
        for s in range(num_spines):
            spine = builder.vertex(f"spine/{p}/{s}", VertexKind.SWITCH)
            for row_of_leaves in pod:
                for leaf in row_of_leaves:
                    cable.join(builder, leaf, spine, up)
            if len(pods) > 1:
                if s not in cores:
                    cores[s] = [builder.vertex(f"core/{s}/{c}", VertexKind.SWITCH) for c in range(num_cores)]
                for core in cores[s]:
                    cable.join(builder, spine, core, core_up)


def _uplinks(down: float, oversubscription: float, cable: Cable) -> tuple[int, float]:
    """Number of uplinks of a switch with `down` cables' worth below it, and bytes per second of each."""
    number = max(1, math.ceil(down / oversubscription - 1e-9))
    return number, down * cable.bandwidth_bytes_per_s / oversubscription / number


def add_dragonfly(
    builder: NetworkBuilder,
    cards: Cards,
    cable: Cable,
    *,
    nodes_per_router: int,
    routers_per_group: int,
    oversubscription: float = 1.0,
) -> None:
    """Routers in groups: each two of a group joined, each two groups joined by one cable; at most three hops.

    With D bytes per second of cards under a router, a routers a group and g groups, a cable in a group carries 2 D / a,
    one between groups a D / g, both over the oversubscription: enough for uniform traffic (Kim et al., "Technology-
    driven, highly-scalable dragonfly topology", ISCA 2008, whose balance is a = 2 p = 2 h). Detours: `routing.route`.
    """
    check_at_least("nodes_per_router", nodes_per_router, 1)
    check_at_least("routers_per_group", routers_per_group, 1)
    check_at_least("oversubscription", oversubscription, 1.0)
    num_routers = -(-len(cards) // nodes_per_router)
    a, num_groups = routers_per_group, -(-num_routers // routers_per_group)
    routers = [
        builder.vertex(f"router/{r // a}/{r % a}", VertexKind.SWITCH)
        for r in range(num_groups * a if num_groups > 1 else num_routers)
    ]
    for host, row in enumerate(cards):
        for card in row:
            cable.attach(builder, card, routers[host // nodes_per_router])
    most = max(len(host) for host in cards) * nodes_per_router * cable.bandwidth_bytes_per_s / oversubscription
    for first in range(0, len(routers), a):
        group = routers[first : first + a]
        for i, router in enumerate(group):
            for other in group[i + 1 :]:
                cable.join(builder, router, other, 2 * most / len(group))
    for i in range(num_groups):
        for j in range(i + 1, num_groups):
            here, there = (j - i - 1) % num_groups % a, (i - j - 1) % num_groups % a
            cable.join(builder, routers[i * a + here], routers[j * a + there], a * most / num_groups)


def add_grid(
    builder: NetworkBuilder,
    cards: Cards,
    cable: Cable,
    *,
    dims: Sequence[int],
    wrap: bool,
    link_bytes_per_s: float,
) -> None:
    """A torus (`wrap`) or mesh of routers, one a host, of the given dims; each cable carries `link_bytes_per_s`.

    Flows spread over all shortest paths, as minimal adaptive routing does, not in the order of dims.

    Raises:
        SpecError: the product of dims is not the number of hosts.
    """
    if not dims or min(dims) < 1 or math.prod(dims) != len(cards):
        raise SpecError("dims", str(list(dims)), f"must multiply to the {len(cards)} hosts", "correct dims or hosts")
    routers = [builder.vertex(f"router/{h}", VertexKind.SWITCH) for h in range(len(cards))]
    for router, row in zip(routers, cards, strict=True):
        for card in row:
            cable.attach(builder, card, router)
    stride = 1
    for size in reversed(dims):
        for h in range(len(cards)):
            at = h // stride % size
            if at + 1 < size:
                cable.join(builder, routers[h], routers[h + stride], link_bytes_per_s)
            elif wrap and size > 2:
                cable.join(builder, routers[h], routers[h - at * stride], link_bytes_per_s)
        stride *= size
