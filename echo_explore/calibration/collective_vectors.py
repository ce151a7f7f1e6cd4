"""Coefficients of collectives as vectors for a least-squares fit: logs of positive numbers, logits of shares.

Each constant stays within what physics permits, whatever the data say: curves that show one protocol only leave those
of the other two free, and an unbounded fit puts them anywhere. Steps take longer from LL over LL128 to Simple, as in
NCCL's own table of latencies [NCCL 2.18 src/graph/tuning.cc, hwLat, 2023], and efficiencies rise.
"""

import math
from dataclasses import replace

import numpy as np

from echo_explore.comm.coefficients import (
    LL128_SHARE,
    LL_SHARE,
    NetworkCoefficients,
    OneShotCosts,
    PairCosts,
    RingCosts,
    ScaleUpCoefficients,
    SwitchCosts,
    Triple,
    TunerWeights,
)
from echo_explore.comm.paths import Floats

_LL128_NET = 0.92
"""Share of bandwidth that LL128 leaves to data between nodes [NCCL 2.18 src/graph/tuning.cc, 2023]."""

_LL_OVER_LL128 = LL_SHARE / LL128_SHARE
_MOST_EFFICIENCY = 0.92
"""Of rings and sends: no measured curve passes it (2026-11); more would take reduction in the switch for a ring."""
_TUNER_SCALE = 0.4
"""Scale on which the tuner's weights are held near 1."""
_NETWORK_TUNER_SCALE = 0.2
"""The same for networks, of which few numbers of nodes are measured: at 0.4 two nodes, left out of the fit, are missed
by 70 %, at 0.2 by 13 % (A100 over InfiniBand, 2026-12-01)."""
_SWITCH_SCALE = 0.3
"""The same for the switch: its rate is known well enough beforehand that starts need not stray far."""

_HOPS = ((0.5, 0.5, 0.5), (10.0, 15.0, 50.0))
"""Least and most factors of steps inside a domain on 0.6 us: a store over NVLink takes 0.3 us at least; NCCL's table
has at most 1.0, 2.5 and 28 us (PCIe, rings and trees) [NCCL 2.18 src/graph/tuning.cc, hwLat, 2023]; LL and LL128 are
given up to 6 and 9 us, for links through host memory (judged, 2026-12)."""
_NETWORK_HOPS = ((0.5, 0.5, 0.5), (5.0, 8.0, 40.0))
"""The same between nodes on the cluster file's latency, NCCL's of a ring under LL, 2.7 us over InfiniBand: its table
has at most 5.0, 8.5 and 28 us [the same]; a step of Simple also carries a slice of 512 KiB, 10 us over a card of
400 Gbit/s alone and up to 80 us where channels share it."""
_LAUNCH_S = (1.5e-6, 150e-6)
"""A kernel that is replayed takes 1.5 us at least to start [NVIDIA, "Constant Time Launch for Straight-Line CUDA
Graphs", 2024]; the slowest curve starts at about 90 us (vTrain's table)."""
_LOCAL = (0.25, 40.0)
"""A rank's own share over the link's rate: memory carries it twice at up to 8 TB/s (B200) over 63 GB/s (PCIe 5.0)."""
_TUNER = (0.1, 10.0)
"""Weights of the tuner over those of LL: it errs by up to 1.7 in what it takes for bandwidth [Echo, arXiv 2412.12487,
figure 2, 2024], and its table of latencies by up to 6 (Simple, 3.4 us a step, takes up to 20) (judged, 2026-12)."""
_NET_TUNER = (0.05, 10.0)
"""The same on transfers between nodes: NCCL reads the cards' bandwidth from the system, which a network that gives a
twentieth of it (sockets, shared links) does not change."""
_NET_SHARES = ((0.1, 0.4), (LL_SHARE, LL128_SHARE))
"""Shares of the cards' bandwidth under LL and LL128, at least (judged) and at most (what flags leave)."""
_TREE_SCALE = 0.2
"""Scale on which trees are held to what rings reach of the cards, which are the same: curves show one of both only."""
_NET_EFFICIENCY = (0.3, 1.0)
"""Of the cards: the worst of the clusters that were measured reaches 0.6 (2026-12)."""
_BASE_S = (2e-6, 100e-6)
"""Set-up of a collective between nodes, once: a proxy thread of the host is woken through mapped memory, two crossings
of PCIe at least; less than the slowest small all-reduce that was measured, 161 us over EFA under Simple."""

START_RING = RingCosts(
    launch_s=(8e-6, 12e-6, 20e-6),
    hop_factor=(1.5, 2.0, 4.0),
    efficiency=(0.25, 0.5, 0.75),
    hidden_fraction=(0.13, 0.13, 0.06),
    local_efficiency=1.5,
    byte_slowdown=1.02,
)
START_SWITCH = SwitchCosts(launch_s=50e-6, efficiency=0.56)
START_PAIRS = PairCosts(
    launch_s=(8e-6, 15e-6),
    message_s=(0.2e-6, 0.2e-6),
    efficiency=(0.2, 0.75),
    hidden_fraction=(0.12, 0.12),
    parallel_messages=1.0,
    local_efficiency=1.5,
    ll_message_bytes=(2.0**17, 2.0**14),  # between hosts NCCL_P2P_LL_THRESHOLD [NCCL 2.18 src/enqueue.cc, 2023]
    uneven_bytes=32e6,
)
START_NETWORK = NetworkCoefficients(
    key="start",
    base_s=5e-6,
    hop_factor=(2.0, 3.0, 5.0),
    protocol_efficiency=(0.2, _LL128_NET, 1.0),
    ring_efficiency=0.7,
    tree_efficiency=0.7,
    pair_efficiency=0.7,
    rail_efficiency=0.9,
    sigma_log=(0.3, 0.3, 0.3),
    unmeasured_sigma_log=0.35,
)
"""Values near which a fit is held where the data say nothing."""


def _logit(share: float, most: float) -> float:
    ratio = min(max(share / most, 1e-4), 1 - 1e-4)
    return float(np.log(ratio / (1 - ratio)))


def _shares(x: Floats, most: float) -> list[float]:
    return [most / (1.0 + math.exp(-min(max(v, -40.0), 40.0))) for v in x.tolist()]


def _within(x: Floats, bounds: tuple[float, float]) -> list[float]:
    """Exponentials inside bounds: beyond them only the prior moves a parameter, back to where it counts."""
    least, most = bounds
    return [min(max(v, least), most) for v in _exp(x)]


def _exp(x: Floats) -> list[float]:
    return [math.exp(min(max(v, -60.0), 60.0)) for v in x.tolist()]


def _ordered_times(values: Triple) -> list[float]:
    """Logs of the first and of what each further one adds: launch times and steps rise from LL to Simple."""
    first, second, third = values
    least = 1e-3 * first
    return [float(v) for v in np.log([first, max(second - first, least), max(third - second, least)])]


def _rising(x: Floats, bounds: tuple[Triple, Triple]) -> Triple:
    """The inverse, each within its bounds."""
    first, more, most = _exp(x)
    sums = (first, first + more, first + more + most)
    first, second, third = (min(max(v, low), high) for v, low, high in zip(sums, *bounds, strict=True))
    return first, second, third


def _ordered_shares(values: Triple) -> list[float]:
    """Logits of the last and of each earlier one over the next: efficiencies fall from Simple to LL."""
    first, second, third = values
    caps = (_LL_OVER_LL128, LL128_SHARE, _MOST_EFFICIENCY)
    return [_logit(v, most) for v, most in zip((first / second, second / third, third), caps, strict=True)]


def ring_vector(c: RingCosts) -> Floats:
    """(18,)."""
    positive = (c.local_efficiency, c.byte_slowdown)
    tuner = (*c.tuner.latency[1:], *c.tuner.stream[1:])
    return np.array(
        [
            *_ordered_times(c.launch_s),
            *_ordered_shares(c.efficiency),
            *_ordered_times(c.hop_factor),
            *np.log(positive),
            *(_logit(f, 0.5) for f in c.hidden_fraction),
            *(np.log(tuner) / _TUNER_SCALE),
        ]
    )


def ring_from(x: Floats) -> RingCosts:
    """From (18,)."""
    simple = _shares(x[5:6], _MOST_EFFICIENCY)[0]
    ll128 = simple * _shares(x[4:5], LL128_SHARE)[0]
    ll = ll128 * _shares(x[3:4], _LL_OVER_LL128)[0]
    f, t = _shares(x[11:14], 0.5), _within(x[14:18] * _TUNER_SCALE, _TUNER)
    return RingCosts(
        launch_s=_rising(x[:3], ((_LAUNCH_S[0],) * 3, (_LAUNCH_S[1],) * 3)),
        hop_factor=_rising(x[6:9], _HOPS),
        efficiency=(ll, ll128, simple),
        local_efficiency=_within(x[9:10], _LOCAL)[0],
        byte_slowdown=_exp(x[10:11])[0],
        hidden_fraction=(f[0], f[1], f[2]),
        tuner=TunerWeights(latency=(1.0, t[0], t[1]), stream=(1.0, t[2], t[3])),
    )


def switch_vector(c: SwitchCosts) -> Floats:
    """(4,)."""
    return np.log([c.launch_s, c.efficiency, c.tuner_latency, c.tuner_stream]) / _SWITCH_SCALE


def switch_from(x: Floats) -> SwitchCosts:
    """From (4,)."""
    v = _exp(x * _SWITCH_SCALE)
    launch_s = float(np.clip(v[0], *_LAUNCH_S))
    latency, stream = np.clip(v[2:], *_TUNER).tolist()
    return SwitchCosts(launch_s=launch_s, efficiency=min(v[1], 1.0), tuner_latency=latency, tuner_stream=stream)


def pair_vector(c: PairCosts) -> Floats:
    """(13,)."""
    low, high = c.launch_s
    positive = [low, max(high - low, 1e-8), *(max(m, 1e-9) for m in c.message_s), *c.ll_message_bytes, c.uneven_bytes]
    positive += [max(c.parallel_messages, 0.1), c.local_efficiency]
    efficiency = (_logit(c.efficiency[0] / c.efficiency[1], LL_SHARE), _logit(c.efficiency[1], _MOST_EFFICIENCY))
    return np.array([*np.log(positive), *efficiency, *(_logit(f, 1.0) for f in c.hidden_fraction)])


def pair_from(x: Floats) -> PairCosts:
    """From (13,)."""
    v, f = _exp(x[:9]), _shares(x[11:13], 1.0)
    first, second = np.clip([v[0], v[0] + v[1]], *_LAUNCH_S).tolist()
    simple = _shares(x[10:11], _MOST_EFFICIENCY)[0]
    return PairCosts(
        launch_s=(first, second),
        message_s=(v[2], v[3]),
        efficiency=(simple * _shares(x[9:10], LL_SHARE)[0], simple),
        ll_message_bytes=(v[4], v[5]),
        uneven_bytes=v[6],
        parallel_messages=v[7],
        local_efficiency=float(np.clip(v[8], *_LOCAL)),
        hidden_fraction=(f[0], f[1]),
    )


def network_vector(c: NetworkCoefficients, tree_efficiency: float) -> Floats:
    """(24,): of a network, and of chains in trees inside a node."""
    physics = (*c.protocol_efficiency[:2], c.ring_efficiency)
    tuner = (*c.ring_tuner.latency, *c.ring_tuner.stream, *c.tree_tuner.latency, *c.tree_tuner.stream)
    weights = np.log([*tuner, *c.switch_tuner]) / _NETWORK_TUNER_SCALE
    steps = _ordered_times(c.hop_factor)
    ratio = np.log(c.tree_efficiency / c.ring_efficiency) / _TREE_SCALE
    rail = np.log(c.rail_efficiency)
    return np.array([np.log(c.base_s), *steps, *np.log(physics), ratio, rail, *weights, np.log(tree_efficiency)])


def network_from(x: Floats, base: NetworkCoefficients) -> NetworkCoefficients:
    """From (24,); all-to-all takes the efficiency of rings."""
    shares = np.clip(_exp(x[4:6]), *_NET_SHARES).tolist()
    ring, tree, rail = _within(np.array([x[6], x[6] + _TREE_SCALE * x[7], x[8]]), _NET_EFFICIENCY)
    v = _within(x[9:23] * _NETWORK_TUNER_SCALE, _NET_TUNER)
    return replace(
        base,
        base_s=_within(x[:1], _BASE_S)[0],
        hop_factor=_rising(x[1:4], _NETWORK_HOPS),
        protocol_efficiency=(shares[0], shares[1], 1.0),
        ring_efficiency=ring,
        tree_efficiency=tree,
        pair_efficiency=ring,
        rail_efficiency=rail,
        ring_tuner=TunerWeights(latency=(v[0], v[1], v[2]), stream=(v[3], v[4], v[5])),
        tree_tuner=TunerWeights(latency=(v[6], v[7], v[8]), stream=(v[9], v[10], v[11])),
        switch_tuner=(v[12], v[13]),
    )


def sends_vector(c: NetworkCoefficients) -> Floats:
    """(3,): of a network of which only sends were measured."""
    return np.log([c.rail_efficiency, c.base_s, c.hop_factor[0]])


def sends_from(x: Floats, base: NetworkCoefficients) -> NetworkCoefficients:
    """From (3,): one step for all protocols."""
    least, most = (bounds[0] for bounds in _NETWORK_HOPS)
    hop = _within(x[2:], (least, most))[0]
    rail, base_s = _within(x[:1], _NET_EFFICIENCY)[0], _within(x[1:2], _BASE_S)[0]
    return replace(base, rail_efficiency=rail, base_s=base_s, hop_factor=(hop, hop, hop))


def tree_efficiency_from(x: Floats) -> float:
    """The last of a network's vector."""
    return _within(x[23:], (0.1, 1.0))[0]


def custom_vector(c: OneShotCosts) -> Floats:
    """(11,): all but where kernels take over from each other."""
    eager = (c.eager_s, c.eager_rank_s, c.eager_copy_efficiency)
    return np.log([*c.launch_s, *c.rank_s, *c.efficiency, *eager, c.switch_launch_s, c.switch_efficiency])


def custom_from(x: Floats, base: OneShotCosts) -> OneShotCosts:
    """From (11,)."""
    v = _exp(x)
    return replace(
        base,
        launch_s=(v[0], v[1]),
        rank_s=(v[2], v[3]),
        efficiency=(min(v[4], 1.0), min(v[5], 1.0)),
        eager_s=v[6],
        eager_rank_s=v[7],
        eager_copy_efficiency=v[8],
        switch_launch_s=v[9],
        switch_efficiency=min(v[10], 1.0),
    )


def start_scale_up(key: str) -> ScaleUpCoefficients:
    """A fabric of which nothing is known yet."""
    return ScaleUpCoefficients(
        key=key,
        all_reduce=START_RING,
        all_gather=START_RING,
        reduce_scatter=START_RING,
        tree_efficiency=0.4,
        switch=START_SWITCH,
        all_to_all=START_PAIRS,
        send=START_PAIRS,
        sigma_log=(0.45, 0.40, 0.30),
    )
