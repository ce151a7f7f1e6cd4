"""Coefficients of collectives as vectors for a least-squares fit: logs of positive numbers, logits of shares."""

from dataclasses import replace

import numpy as np

from echo_explore.comm.coefficients import (
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

_LL_OVER_LL128 = 0.9
"""LL carries flags in half of its bytes, LL128 in a sixteenth: LL never has the efficiency of LL128."""
_MOST_EFFICIENCY = 0.92
"""Of rings and sends: no measured curve passes it (2026-11); more would take reduction in the switch for a ring."""
_TUNER_SCALE = 0.4
"""Scale on which the tuner's weights are held near 1."""
_NETWORK_TUNER_SCALE = 0.2
"""The same for networks, of which few numbers of nodes are measured: at 0.4 two nodes, left out of the fit, are missed
by 70 %, at 0.2 by 13 % (A100 over InfiniBand, 2026-12-01)."""
_SWITCH_SCALE = 0.3
"""The same for the switch: its rate is known well enough beforehand that starts need not stray far."""

START_RING = RingCosts(
    launch_s=(8e-6, 12e-6, 20e-6),
    hop_factor=(1.5, 2.0, 4.0),
    efficiency=(0.3, 0.5, 0.75),
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
    ll_message_bytes=(2.0**17, 2.0**19),
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
    return [float(v) for v in most / (1.0 + np.exp(-np.clip(x, -40, 40)))]


def _exp(x: Floats) -> list[float]:
    return [float(v) for v in np.exp(np.clip(x, -60, 60))]


def _ordered_times(values: Triple) -> list[float]:
    """Logs of the first and of what each further one adds: launch times rise from LL to Simple."""
    first, second, third = values
    return [float(v) for v in np.log([first, max(second - first, 1e-8), max(third - second, 1e-8)])]


def _ordered_shares(values: Triple) -> list[float]:
    """Logits of the last and of each earlier one over the next: efficiencies fall from Simple to LL."""
    first, second, third = values
    caps = (_LL_OVER_LL128, 1.0, _MOST_EFFICIENCY)
    return [_logit(v, most) for v, most in zip((first / second, second / third, third), caps, strict=True)]


def ring_vector(c: RingCosts) -> Floats:
    """(18,)."""
    positive = (*c.hop_factor, c.local_efficiency, c.byte_slowdown)
    tuner = (*c.tuner.latency[1:], *c.tuner.stream[1:])
    return np.array(
        [
            *_ordered_times(c.launch_s),
            *_ordered_shares(c.efficiency),
            *np.log(positive),
            *(_logit(f, 0.5) for f in c.hidden_fraction),
            *(np.log(tuner) / _TUNER_SCALE),
        ]
    )


def ring_from(x: Floats) -> RingCosts:
    """From (18,)."""
    launch = np.cumsum(_exp(x[:3])).tolist()
    simple = _shares(x[5:6], _MOST_EFFICIENCY)[0]
    ll128 = simple * _shares(x[4:5], 1.0)[0]
    ll = ll128 * _shares(x[3:4], _LL_OVER_LL128)[0]
    v, f, t = _exp(x[6:11]), _shares(x[11:14], 0.5), _exp(x[14:18] * _TUNER_SCALE)
    return RingCosts(
        launch_s=(launch[0], launch[1], launch[2]),
        hop_factor=(v[0], v[1], v[2]),
        efficiency=(ll, ll128, simple),
        local_efficiency=v[3],
        byte_slowdown=v[4],
        hidden_fraction=(f[0], f[1], f[2]),
        tuner=TunerWeights(latency=(1.0, t[0], t[1]), stream=(1.0, t[2], t[3])),
    )


def switch_vector(c: SwitchCosts) -> Floats:
    """(4,)."""
    return np.log([c.launch_s, c.efficiency, c.tuner_latency, c.tuner_stream]) / _SWITCH_SCALE


def switch_from(x: Floats) -> SwitchCosts:
    """From (4,)."""
    v = _exp(x * _SWITCH_SCALE)
    return SwitchCosts(launch_s=v[0], efficiency=min(v[1], 1.0), tuner_latency=v[2], tuner_stream=v[3])


def pair_vector(c: PairCosts) -> Floats:
    """(13,)."""
    low, high = c.launch_s
    positive = [low, max(high - low, 1e-8), *(max(m, 1e-9) for m in c.message_s), *c.ll_message_bytes, c.uneven_bytes]
    positive += [max(c.parallel_messages, 0.1), c.local_efficiency]
    efficiency = (_logit(c.efficiency[0] / c.efficiency[1], 1.0), _logit(c.efficiency[1], _MOST_EFFICIENCY))
    return np.array([*np.log(positive), *efficiency, *(_logit(f, 1.0) for f in c.hidden_fraction)])


def pair_from(x: Floats) -> PairCosts:
    """From (13,)."""
    v, f = _exp(x[:9]), _shares(x[11:13], 1.0)
    simple = _shares(x[10:11], _MOST_EFFICIENCY)[0]
    return PairCosts(
        launch_s=(v[0], v[0] + v[1]),
        message_s=(v[2], v[3]),
        efficiency=(simple * _shares(x[9:10], 1.0)[0], simple),
        ll_message_bytes=(v[4], v[5]),
        uneven_bytes=v[6],
        parallel_messages=v[7],
        local_efficiency=v[8],
        hidden_fraction=(f[0], f[1]),
    )


def network_vector(c: NetworkCoefficients, tree_efficiency: float) -> Floats:
    """(23,): of a network, and of chains in trees inside a node."""
    physics = (c.base_s, *c.hop_factor, *c.protocol_efficiency[:2], c.ring_efficiency, c.tree_efficiency)
    tuner = (*c.ring_tuner.latency, *c.ring_tuner.stream, *c.tree_tuner.latency, *c.tree_tuner.stream)
    weights = np.log([*tuner, *c.switch_tuner]) / _NETWORK_TUNER_SCALE
    return np.array([*np.log(physics), *weights, np.log(tree_efficiency)])


def network_from(x: Floats, base: NetworkCoefficients) -> NetworkCoefficients:
    """From (23,); all-to-all takes the efficiency of rings."""
    v = [*_exp(x[:8]), *_exp(x[8:22] * _NETWORK_TUNER_SCALE)]
    ring = min(v[6], 1.0)
    return replace(
        base,
        base_s=v[0],
        hop_factor=(v[1], v[2], v[3]),
        protocol_efficiency=(min(v[4], 1.0), min(v[5], 1.0), 1.0),
        ring_efficiency=ring,
        tree_efficiency=min(v[7], 1.0),
        pair_efficiency=ring,
        ring_tuner=TunerWeights(latency=(v[8], v[9], v[10]), stream=(v[11], v[12], v[13])),
        tree_tuner=TunerWeights(latency=(v[14], v[15], v[16]), stream=(v[17], v[18], v[19])),
        switch_tuner=(v[20], v[21]),
    )


def tree_efficiency_from(x: Floats) -> float:
    """The last of a network's vector."""
    return min(_exp(x)[22], 1.0)


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
