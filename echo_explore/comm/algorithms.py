"""Times of NCCL's algorithms as closed forms of latency and bandwidth, over columns of groups and sizes.

Symbols: n ranks on M scale-up domains ("nodes"), r = ranks of the group in one node, S message bytes (nccl-tests' S),
W link bandwidth of a GPU and B bandwidth of the group out of a node (one direction each), e and q efficiencies of links
and cards, l of a rank's work on its own share, a launch time, h and g time of a step inside and between nodes; index p
is the protocol. (x)+ is x where positive, else 0. F_p = f_p a_p W / k bytes move while the launch still goes on: as a
message grows NCCL spreads it over more channels, so that small messages all take the same time. Every form is valid for
n >= 2, is positive and grows with S.

References: NCCL 2.18 src/graph/tuning.cc (2023) for the number of steps; Thakur et al., "Optimization of collective
communication operations in MPICH" (2005) for rings; Sanders et al., "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009) for double trees; Klenk et al., "An in-network architecture for accelerating shared-memory
multiprocessor collectives" (ISCA 2020) for reduction in the switch.
"""

from dataclasses import dataclass

import numpy as np

from echo_explore.comm.coefficients import RingCosts
from echo_explore.comm.paths import ClusterLinks, Floats, GroupArrays
from echo_explore.comm.routed import Pattern
from echo_explore.comm.spines import routed_step_s, spine_share

SIMPLE = 2
"""Index of Simple in PROTOCOLS."""
_PAIR_PROTOCOL = (0, 2)
TREE_STEPS = (5.0 / 2.7, 8.5 / 4.0, 28.0 / 14.0)
"""Time of a step of a tree between nodes over one of a ring, by protocol: a node waits for two children, a ring for one
neighbour [NCCL 2.18 src/graph/tuning.cc, hwLat of networks, 2023]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmTime:
    """Seconds of one algorithm under one protocol, by group and size.

    Attributes:
        latency_s: launch and steps.
        stream_s: transfer of the bytes.
    """

    latency_s: Floats
    stream_s: Floats

    @property
    def time_s(self) -> Floats:
        """Both together."""
        return self.latency_s + self.stream_s


def _ring_rate(groups: GroupArrays, links: ClusterLinks, efficiency: float) -> Floats:
    """W e, less where rings of n ranks leave direct links unused; infinite for one rank a node."""
    share = np.ones_like(groups.num_ranks)
    for count, fraction in links.scale_up.ring_share.items():
        share = np.where(groups.num_ranks == count, fraction, share)
    return np.where(groups.ranks_per_node > 1, links.scale_up_bytes_per_s * efficiency * share, np.inf)


def network_rate(
    groups: GroupArrays,
    links: ClusterLinks,
    efficiency: float,
    protocol: int,
    *,
    pattern: Pattern = "neighbours",
    pxn: bool = True,
) -> Floats:
    """Bytes per second of data out of a node, B q_p; q is the rail's where the group has one rank a node.

    Cards carry q of their bandwidth; the switches above the leaves may leave less: `spines.spine_share`.
    """
    if not groups.crosses.any():
        return groups.network_bytes_per_s
    network = links.network
    q = np.where(groups.ranks_per_node == 1, network.rail_efficiency, efficiency)
    share = spine_share(groups, links, pattern, pxn=pxn)
    return groups.network_bytes_per_s * share * q * network.protocol_efficiency[protocol]


def _across_s(
    groups: GroupArrays, links: ClusterLinks, steps: Floats, protocol: int, pattern: Pattern = "neighbours"
) -> Floats:
    """Set-up and steps between nodes; 0 inside one node."""
    if not groups.crosses.any():
        return np.zeros_like(groups.num_nodes)
    network = links.network
    step_s = network.hop_factor[protocol] * links.network_latency_s + routed_step_s(groups, links, pattern)
    return np.where(groups.crosses, network.base_s + steps * step_s, 0.0)


def _at_least(time: AlgorithmTime, least_s: Floats) -> AlgorithmTime:
    """The time, but never less than what must cross the slowest cut takes at its full rate.

    Hidden bytes are counted against scale-up links; over slower cards they could hide more than these carry meanwhile.
    """
    return AlgorithmTime(latency_s=time.latency_s, stream_s=np.maximum(time.stream_s, least_s - time.latency_s))


def _ring_least_s(groups: GroupArrays, links: ClusterLinks, edge_bytes: Floats) -> Floats:
    """Seconds that the bytes of one edge of a ring or chain take over the slower of link and cards, q = e = 1."""
    link = np.where(groups.ranks_per_node > 1, links.scale_up_bytes_per_s, np.inf)
    cards = groups.network_bytes_per_s * spine_share(groups, links, "neighbours")
    return edge_bytes / np.minimum(link, cards)


def _hidden_bytes(costs: RingCosts, links: ClusterLinks, protocol: int, rounds: int) -> float:
    return costs.hidden_fraction[protocol] * costs.launch_s[protocol] * links.scale_up_bytes_per_s / rounds


def ring(
    groups: GroupArrays, links: ClusterLinks, size: Floats, costs: RingCosts, *, rounds: int, protocol: int
) -> AlgorithmTime:
    """A ring that goes round `rounds` times: 2 for all-reduce, 1 for all-gather and reduce-scatter.

    t = a + k (n - M') h + k M' g + k (n-1)/n (S - F)+ / min(W e_p, B q_p) + S / (n W l), k = rounds, M' = M, or 0 for
    M = 1

    h is at least the network's `ring_step_s` where the ring leaves a node, as NCCL's net overhead.

    A ring passes (n-1) steps a round; M of its n links cross nodes (M - 1 of n - 1 steps, as NCCL counts). Each step
    moves S/n; all channels together pass every GPU's link and, once a node, its cards: NCCL's rings over all cards, so
    that B is what the group has of all of them. The last term is the rank's own share, which passes its memory once
    beside the n - 1 steps (copied out of place, or reduced).
    """
    n = groups.num_ranks
    across = np.where(groups.crosses, rounds * (groups.num_nodes - 1), 0.0)
    hop_s = costs.hop_factor[protocol] * links.link_latency_s
    step_s = np.where(groups.crosses, max(hop_s, links.network.ring_step_s), hop_s)
    latency = costs.launch_s[protocol] + (rounds * (n - 1) - across) * step_s
    latency = latency + _across_s(groups, links, across, protocol)
    rate = np.minimum(
        _ring_rate(groups, links, costs.efficiency[protocol]),
        network_rate(groups, links, links.network.ring_efficiency, protocol),
    )
    moved = np.maximum(size - _hidden_bytes(costs, links, protocol, rounds), 0.0)
    local = size / n / (links.scale_up_bytes_per_s * costs.local_efficiency)
    time = AlgorithmTime(latency_s=latency, stream_s=rounds * (n - 1) / n * moved / rate + local)
    return _at_least(time, _ring_least_s(groups, links, rounds * (n - 1) / n * size))


def chain(groups: GroupArrays, links: ClusterLinks, size: Floats, costs: RingCosts, *, protocol: int) -> AlgorithmTime:
    """A broadcast or a reduce, a pipelined chain: t = a + (n - M) h + (M - 1) g + (S - F)+ / min(W e_p, B q_p)."""
    hop_s = costs.hop_factor[protocol] * links.link_latency_s
    latency = costs.launch_s[protocol] + (groups.num_ranks - groups.num_nodes) * hop_s
    latency = latency + _across_s(groups, links, groups.num_nodes - 1, protocol)
    rate = np.minimum(
        _ring_rate(groups, links, costs.efficiency[protocol]),
        network_rate(groups, links, links.network.ring_efficiency, protocol),
    )
    moved = np.maximum(size - _hidden_bytes(costs, links, protocol, 1), 0.0)
    return _at_least(AlgorithmTime(latency_s=latency, stream_s=moved / rate), _ring_least_s(groups, links, size))


def tree(groups: GroupArrays, links: ClusterLinks, size: Floats, costs: RingCosts, *, protocol: int) -> AlgorithmTime:
    """An all-reduce by double binary trees between nodes and chains inside; valid for M >= 2.

    t = a + 2 (r-1) h + 2 ceil(log2 M) u g + S max(2 / (W e), f / (B q_p)), f = 1 for M = 2, else 2, u: TREE_STEPS

    Each tree reduces and broadcasts half of S. A GPU in a chain sends both ways, 2 S in all; a node inside one tree is
    a leaf of the other, so it sends S/2 up twice and S/2 down to two children: 2 S. Two nodes exchange S. Chunks are
    pipelined: the slower level counts.
    """
    r = groups.ranks_per_node
    latency = costs.launch_s[protocol] + 2 * (r - 1) * costs.hop_factor[protocol] * links.link_latency_s
    latency = latency + _across_s(
        groups, links, TREE_STEPS[protocol] * _tree_steps(groups, collnet=False), protocol, "tree"
    )
    e = links.scale_up.tree_efficiency * costs.efficiency[protocol] / max(costs.efficiency)
    inner = np.where(r > 1, 2.0 / (links.scale_up_bytes_per_s * e), 0.0)
    outer = _tree_seconds_per_byte(groups, links, protocol, collnet=False)
    return AlgorithmTime(latency_s=latency, stream_s=size * np.maximum(inner, outer))


def collnet(groups: GroupArrays, links: ClusterLinks, size: Floats, costs: RingCosts) -> AlgorithmTime:
    """An all-reduce with reduction in the network's switches (SHARP), direct inside a node; Simple only; M >= 2.

    t = a + 2 (r-1) h + 2 g + S max(2 (r-1)/r / (W e), 1 / (B q)): two steps whatever M

    Each of r ranks owns S/r: a reduce-scatter brings it to them, (r-1)/r S over a GPU's link; each sends its part up
    over the cards next to it and gets the sum back, together S out of a node and S in; an all-gather takes (r-1)/r S
    more over the links, in the same direction as the first. Chunks are pipelined: the slower level counts. e and q are
    a ring's under Simple: cards and links stream to one peer as there, and nobody waits for two children as in trees.
    At one rank a node t >= S / B. [NCCL 2.18 src/device/all_reduce.h, CollNet direct, 2023]
    """
    r = groups.ranks_per_node
    latency = costs.launch_s[SIMPLE] + 2 * (r - 1) * costs.hop_factor[SIMPLE] * links.link_latency_s
    latency = latency + _across_s(groups, links, _tree_steps(groups, collnet=True), SIMPLE, "tree")
    inner = 2.0 * (r - 1) / r / (links.scale_up_bytes_per_s * costs.efficiency[SIMPLE])
    outer = _tree_seconds_per_byte(groups, links, SIMPLE, collnet=True)
    return AlgorithmTime(latency_s=latency, stream_s=size * np.maximum(inner, outer))


def nvls(groups: GroupArrays, links: ClusterLinks, size: Floats, *, reducing_network: bool = False) -> AlgorithmTime:
    """An all-reduce with reduction in the scale-up switch (NVLS; with trees between nodes NVLS-tree).

    t = a_s + S / min(W e_s, W / (1 + 1/r)) inside a node; between nodes 2 ceil(log2 M) u g more, and the slower of this
    and f S / (B q), f as in `tree`

    Each rank reduces S/r through the switch, which reads all of S from every GPU, then multicasts its S/r: a GPU sends
    S for others and S/r of its own. The bus bandwidth may so reach 2 (r-1)/(r+1) W. Valid for r >= 3.
    """
    switch, w = links.scale_up.switch, links.scale_up_bytes_per_s
    inner = 1.0 / np.minimum(w * switch.efficiency, w / (1.0 + 1.0 / groups.ranks_per_node))
    steps = _tree_steps(groups, collnet=reducing_network) * (1.0 if reducing_network else TREE_STEPS[SIMPLE])
    latency = switch.launch_s + _across_s(groups, links, steps, SIMPLE, "tree")
    outer = _tree_seconds_per_byte(groups, links, SIMPLE, collnet=reducing_network)
    return AlgorithmTime(latency_s=latency, stream_s=size * np.maximum(inner, np.where(groups.crosses, outer, 0.0)))


def pat(groups: GroupArrays, links: ClusterLinks, size: Floats, costs: RingCosts) -> AlgorithmTime:
    """An all-gather or reduce-scatter by parallel aggregated trees (PAT); Simple only; one rank a node.

    t = a + ceil(log2 n) g + (n-1)/n S / (B q) + S / (n W l): as many bytes as a ring, in log2 n steps.

    References: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", arXiv 2506.20252.
    """
    n = groups.num_ranks
    latency = costs.launch_s[SIMPLE] + _across_s(groups, links, np.ceil(np.log2(n)), SIMPLE)
    rate = network_rate(groups, links, links.network.ring_efficiency, SIMPLE)
    local = size / n / (links.scale_up_bytes_per_s * costs.local_efficiency)
    return AlgorithmTime(latency_s=latency, stream_s=(n - 1) / n * size / rate + local)


def _tree_steps(groups: GroupArrays, *, collnet: bool) -> Floats:
    """Steps up and down the tree between nodes; two through reducing switches."""
    return np.full_like(groups.num_nodes, 2.0) if collnet else 2.0 * np.ceil(np.log2(groups.num_nodes))


def _tree_seconds_per_byte(groups: GroupArrays, links: ClusterLinks, protocol: int, *, collnet: bool) -> Floats:
    """Seconds a byte between nodes, f / (B q_p); f = 1 also where switches reduce: a node sends S once."""
    f = np.where((groups.num_nodes == 2) | collnet, 1.0, 2.0)
    q = links.network.ring_efficiency if collnet else links.network.tree_efficiency
    return f / network_rate(groups, links, q, protocol, pattern="tree")


def all_to_all(
    groups: GroupArrays, links: ClusterLinks, size: Floats, imbalance: Floats, simple: int, *, pxn: bool = True
) -> AlgorithmTime:
    """An all-to-all in which each rank sends S/n to every rank, itself included, each pair at once (direct).

    t = a_p + (n-1-c)+ m_p + g + i max(((r-1)/n (S-F)+ + u) / (W e_p), r (n-r)/n S / (B q)) + S / (n W l)

    Sends to the r - 1 ranks of the node and, together with the other r ranks, those to the n - r ranks elsewhere go on
    at once; g only between nodes; c messages of a rank go on at once. i is the imbalance. NCCL pairs ranks in rounds of
    a power of two P >= n [NCCL 2.18 src/enqueue.cc, 2023]; u = (P/n - 1) (r-1)/n min(S, n U) is the time of rounds that
    pair nobody, which long messages fill. `simple` is 0 for LL, 1 for Simple, the two protocols of sends. With PXN
    what goes to other rails passes a link of the node first: R rails add (n-r)/n (R-1)/R S to the inner bytes.
    """
    costs = links.scale_up.all_to_all
    n, r = groups.num_ranks, groups.ranks_per_node
    rounds = np.exp2(np.ceil(np.log2(n)))
    idle = (rounds / n - 1.0) * np.minimum(size, n * costs.uneven_bytes)
    moved = np.maximum(size - costs.hidden_fraction[simple] * costs.launch_s[simple] * links.scale_up_bytes_per_s, 0.0)
    relayed = np.where(groups.crosses, (n - r) / n * (1.0 - 1.0 / links.num_rails), 0.0) if pxn else 0.0
    inner = ((r - 1) / n * (moved + idle) + relayed * size) / (links.scale_up_bytes_per_s * costs.efficiency[simple])
    protocol = _PAIR_PROTOCOL[simple]
    latency = costs.launch_s[simple] + np.maximum(n - 1 - costs.parallel_messages, 0.0) * costs.message_s[simple]
    latency = latency + _across_s(groups, links, np.ones_like(n), protocol, "pairs")
    rate = network_rate(groups, links, links.network.pair_efficiency, protocol, pattern="pairs", pxn=pxn)
    outer = r * (n - r) / n * size / rate
    outer = np.where(groups.crosses, outer, 0.0)
    local = size / n / (links.scale_up_bytes_per_s * costs.local_efficiency)
    return AlgorithmTime(latency_s=latency, stream_s=imbalance * np.maximum(inner, outer) + local)


def send(groups: GroupArrays, links: ClusterLinks, size: Floats, *, simple: int) -> AlgorithmTime:
    """One send: t = a_p + (S - F)+ / (W e_p) inside a node, a_p + g + S / (B q) between nodes."""
    costs, protocol = links.scale_up.send, _PAIR_PROTOCOL[simple]
    latency = costs.launch_s[simple] + _across_s(groups, links, np.ones_like(groups.num_ranks), protocol, "shift")
    rate = np.where(
        groups.crosses,
        network_rate(groups, links, links.network.rail_efficiency, protocol, pattern="shift"),
        links.scale_up_bytes_per_s * costs.efficiency[simple],
    )
    hidden = costs.hidden_fraction[simple] * costs.launch_s[simple] * links.scale_up_bytes_per_s
    moved = np.where(groups.crosses, size, np.maximum(size - hidden, 0.0))
    return AlgorithmTime(latency_s=latency, stream_s=moved / rate)
