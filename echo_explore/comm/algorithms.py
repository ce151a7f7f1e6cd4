"""Times of NCCL's algorithms as closed forms of latency and bandwidth.

Symbols: n ranks on M scale-up domains ("nodes"), r = ranks of the group in one node, S message bytes (nccl-tests' S),
W link bandwidth of a GPU and B bandwidth of the group out of a node (one direction each), e and q efficiencies of links
and cards, l of a rank's work on its own share, a set-up time, h and g time of a step inside and between nodes; index p
is the protocol. Every form is valid for n >= 2, is positive and grows with S.

References: NCCL 2.18 src/graph/tuning.cc (2023) for the number of steps; Thakur et al., "Optimization of collective
communication operations in MPICH" (2005) for rings; Sanders et al., "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009) for double trees; Klenk et al., "An in-network architecture for accelerating shared-memory
multiprocessor collectives" (ISCA 2020) for reduction in the switch.
"""

import math
from dataclasses import dataclass

from echo_explore.comm.paths import ClusterLinks
from echo_explore.topology import GroupShape

_PAIR_PROTOCOLS = (0, 2)
"""Sends use LL or Simple [NCCL 2.18 src/enqueue.cc, 2023]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPath:
    """A group and what it has of the links.

    Attributes:
        network_bytes_per_s: B; infinite for a group inside one node.
    """

    group: GroupShape
    links: ClusterLinks
    network_bytes_per_s: float

    @property
    def crosses(self) -> bool:
        """The group spans several nodes."""
        return self.group.num_nodes > 1


def network_rate(path: GroupPath, efficiency: float, protocol: int) -> float:
    """Bytes per second of data out of a node, B q_p; q is the rail's where the group has one rank a node."""
    network = path.links.network
    q = network.rail_efficiency if path.group.ranks_per_node == 1 else efficiency
    return path.network_bytes_per_s * q * network.protocol_efficiency[protocol]


def ring_time(path: GroupPath, message_bytes: float, *, rounds: int, protocol: int) -> float:
    """Seconds of a ring that goes round `rounds` times: 2 for all-reduce, 1 for all-gather and reduce-scatter.

    t = a + k (n - M') h + k M' g + k (n-1)/n S / min(W e_p, B q_p) + S / (n W l), k = rounds, M' = M, or 0 if M = 1

    A ring passes (n-1) steps a round; M of its n links cross nodes (M - 1 of n - 1 steps, as NCCL counts). Each step
    moves S/n; all channels together pass every GPU's link and, once a node, its cards: NCCL's rings over all cards, so
    that B is what the group has of all of them. The last term is the rank's own share, which passes its memory once
    beside the n - 1 steps (copied out of place, or reduced).
    """
    group, links = path.group, path.links
    n = group.num_ranks
    scale_up = links.scale_up
    rate = links.scale_up_bytes_per_s * scale_up.efficiency[protocol] if group.ranks_per_node > 1 else math.inf
    steps = rounds * (n - 1)
    time_s = scale_up.base_s[protocol]
    if path.crosses:
        across = rounds * (group.num_nodes - 1)
        time_s += links.network.base_s + across * links.network_hop_s[protocol]
        steps -= across
        rate = min(rate, network_rate(path, links.network.ring_efficiency, protocol))
    share = message_bytes / n
    local = share / (links.scale_up_bytes_per_s * scale_up.local_efficiency)
    return time_s + steps * links.hop_s[protocol] + rounds * (n - 1) * share / rate + local


def chain_time(path: GroupPath, message_bytes: float, *, protocol: int) -> float:
    """Seconds of a broadcast or a reduce, a pipelined chain: t = a + (n - M) h + (M - 1) g + S / min(W e_p, B q_p)."""
    group, links = path.group, path.links
    rate = links.scale_up_bytes_per_s * links.scale_up.efficiency[protocol] if group.ranks_per_node > 1 else math.inf
    time_s = links.scale_up.base_s[protocol]
    if path.crosses:
        time_s += links.network.base_s + (group.num_nodes - 1) * links.network_hop_s[protocol]
        rate = min(rate, network_rate(path, links.network.ring_efficiency, protocol))
    return time_s + (group.num_ranks - group.num_nodes) * links.hop_s[protocol] + message_bytes / rate


def tree_time(path: GroupPath, message_bytes: float, *, protocol: int) -> float:
    """Seconds of an all-reduce by double binary trees between nodes and chains inside; valid for M >= 2.

    t = a + 2 (r-1) h + 2 ceil(log2 M) g + S max(2 / (W e), f / (B q_p)), f = 1 for M = 2, else 2

    Each tree reduces and broadcasts half of S. A GPU in a chain sends both ways, 2 S in all; a node inside one tree is
    a leaf of the other, so it sends S/2 up twice and S/2 down to two children: 2 S. Two nodes exchange S. Chunks are
    pipelined: the slower level counts.
    """
    group, links = path.group, path.links
    time_s = (
        links.scale_up.base_s[protocol] + links.network.base_s + 2 * (group.ranks_per_node - 1) * links.hop_s[protocol]
    )
    inner = 0.0
    if group.ranks_per_node > 1:
        e = links.scale_up.tree_efficiency * links.scale_up.efficiency[protocol] / max(links.scale_up.efficiency)
        inner = 2.0 / (links.scale_up_bytes_per_s * e)
    return time_s + _between_nodes(path, protocol) + message_bytes * max(inner, _tree_seconds_per_byte(path, protocol))


def switch_time(path: GroupPath, message_bytes: float) -> float:
    """Seconds of an all-reduce with reduction in the scale-up switch (NVLS; with trees between nodes NVLS-tree).

    t = a_s + S (1 + 1/r) / (W e_s) inside a node; between nodes 2 ceil(log2 M) g more, and the slower of
    S (1 + 1/r) / (W e_s) and f S / (B q), f as in `tree_time`

    Each rank reduces S/r through the switch, which reads all of S from every GPU, then multicasts its S/r: a GPU sends
    S for others and S/r of its own. The bus bandwidth may so reach 2 (r-1)/(r+1) W. Valid for r >= 3.
    """
    links, r = path.links, path.group.ranks_per_node
    simple = 2
    inner = (1.0 + 1.0 / r) / (links.scale_up_bytes_per_s * links.scale_up.switch_efficiency)
    time_s = links.scale_up.switch_base_s
    if not path.crosses:
        return time_s + message_bytes * inner
    time_s += links.network.base_s + _between_nodes(path, simple)
    return time_s + message_bytes * max(inner, _tree_seconds_per_byte(path, simple))


def _between_nodes(path: GroupPath, protocol: int) -> float:
    """Up and down the tree between nodes; two steps through reducing switches."""
    depth = 1 if path.links.has_network_reduction else math.ceil(math.log2(path.group.num_nodes))
    return 2 * depth * path.links.network_hop_s[protocol]


def _tree_seconds_per_byte(path: GroupPath, protocol: int) -> float:
    """Seconds a byte between nodes, f / (B q_p); f = 1 also where switches reduce: a node sends S once."""
    f = 1.0 if path.group.num_nodes == 2 or path.links.has_network_reduction else 2.0
    return f / network_rate(path, path.links.network.tree_efficiency, protocol)


def all_to_all_time(path: GroupPath, message_bytes: float, *, simple: int) -> float:
    """Seconds of an all-to-all in which each rank sends S/n to every rank, itself included.

    t = a_p + (n-1) m + g + max((r-1)/n S / (W e_p), r (n-r)/n S / (B q)) + S / (n W l), with m a message's cost

    Sends to the r - 1 ranks of the node and, together with the other r ranks, those to the n - r ranks elsewhere go on
    at once; g only between nodes. `simple` is 0 for LL, 1 for Simple, the two protocols of sends.
    """
    group, links = path.group, path.links
    n, r = group.num_ranks, min(group.ranks_per_node, group.num_ranks)
    share = message_bytes / n
    inner = (r - 1) * share / (links.scale_up_bytes_per_s * links.scale_up.pair_efficiency[simple])
    time_s = links.scale_up.pair_base_s[simple] + (n - 1) * links.scale_up.pair_message_s
    outer = 0.0
    if path.crosses:
        protocol = _PAIR_PROTOCOLS[simple]
        time_s += links.network.base_s + links.network_hop_s[protocol]
        outer = r * (n - r) * share / network_rate(path, links.network.pair_efficiency, protocol)
    local = share / (links.scale_up_bytes_per_s * links.scale_up.local_efficiency)
    return time_s + max(inner, outer) + local


def send_time(path: GroupPath, message_bytes: float, *, simple: int) -> float:
    """Seconds of one send: t = a_p + h + S / (W e_p) inside a node, a_p + g + S / (B q) between nodes."""
    links = path.links
    protocol = _PAIR_PROTOCOLS[simple]
    base_s = links.scale_up.pair_base_s[simple]
    if path.crosses:
        base_s += links.network.base_s + links.network_hop_s[protocol]
        return base_s + message_bytes / network_rate(path, links.network.rail_efficiency, protocol)
    rate = links.scale_up_bytes_per_s * links.scale_up.pair_efficiency[simple]
    return base_s + links.hop_s[protocol] + message_bytes / rate
