"""Fits of collectives' coefficients to measured times.

The model's time is that of the option with the least believed time: a step function of the tuner's weights. The fit
replaces the least by a mean weighted by exp(-log(believed) / T) and lowers the temperature T in rounds, from several
starts; what counts at the end is the error of the hard choice. The loss is the soft absolute error of the log, so that
outliers (cold starts) do not pull, and a prior holds what the data do not show: weakly near values that are judged,
firmly near those of the same protocols in other collectives, or of the same switch under other GPUs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from echo_explore.calibration import collective_vectors as vectors
from echo_explore.comm.choice import Batch, Capabilities, ll_limit_bytes, options_of
from echo_explore.comm.coefficients import (
    SIZE_BANDS_BYTES,
    NetworkCoefficients,
    OneShotCosts,
    RingCosts,
    ScaleUpCoefficients,
    Triple,
)
from echo_explore.comm.custom import custom_all_reduce_s
from echo_explore.comm.paths import ClusterLinks, Floats, group_arrays
from echo_explore.graph.kinds import Collective

_TEMPERATURES = ((0.3, 12), (0.1, 20), (0.03, 20), (0.01, 12))
"""Temperatures and evaluations of a round."""
_PRIOR = 0.015
"""Weight of the squared logs of parameters over those that are judged, against squared logs of errors."""
INFORMED_PRIOR = 0.1
"""The same over values that were measured nearby: errors of 0.08 over a spread of 0.8 between such values
(left-out curves are missed least between 0.05 and 0.2, 2026-12-01)."""
_STRAYING = 1e-3
"""Error that a mean square of 1 in the logs of the parameters is worth when starts are compared, at the weak prior."""
_POLISH = (0.4, 0.02)
"""First and last step of the search that ends a fit, in logs."""
_KICKS, _KICKED = 3, 0.3
"""How often that search starts anew, with so many of the parameters back at the start of the fit."""
_SCATTER = 0.5
"""Standard deviation of the logs of the further starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Measured collectives of one kind as columns.

    Attributes:
        narrow: 8-bit elements.
        launch_s, floor_s: what the tool adds: see ToolConstants.
        time_s: measured.
        weight: rows that a sample stands for.
    """

    kind: Collective
    num_ranks: Floats
    ranks_per_node: Floats
    size: Floats
    narrow: npt.NDArray[np.bool_]
    launch_s: Floats
    floor_s: Floats
    time_s: Floats
    weight: Floats

    def batch(self, links: ClusterLinks) -> Batch:
        """The same as the model takes it."""
        ones = np.ones_like(self.size)
        return Batch(
            groups=group_arrays(links, self.num_ranks, self.ranks_per_node, ones),
            size=self.size,
            switched=~self.narrow,
            narrow=self.narrow,
            imbalance=ones,
        )


def modelled_log_s(
    samples: Samples, links: ClusterLinks, temperature: float, able: Capabilities, batch: Batch | None = None
) -> Floats:
    """Log of the seconds that the tool would report; temperature 0 is the hard choice.

    `batch` is `samples.batch(links)`, which depends on the machine alone, where it is at hand.
    """
    options = options_of(samples.kind, batch or samples.batch(links), links, able)
    times = np.array([np.maximum(o.time.time_s + samples.launch_s, samples.floor_s) for o in options])
    log_times: Floats = np.log(times)
    if samples.kind in (Collective.ALL_TO_ALL, Collective.SEND):
        return _by_size(samples, links, log_times, temperature)
    believed = np.array([o.believed_s for o in options])
    if temperature == 0:
        picked: Floats = log_times[believed.argmin(axis=0), np.arange(believed.shape[1])]
        return picked
    finite = np.where(np.isfinite(believed), np.log(np.where(np.isfinite(believed), believed, 1.0)), 1e3)
    weight = np.exp(-(finite - finite.min(axis=0)) / temperature)
    mean: Floats = (weight * log_times).sum(axis=0) / weight.sum(axis=0)
    return mean


def _by_size(samples: Samples, links: ClusterLinks, log_times: Floats, temperature: float) -> Floats:
    """LL below the size of a message, Simple above."""
    exchanges = samples.kind == Collective.ALL_TO_ALL
    costs = links.scale_up.all_to_all if exchanges else links.scale_up.send
    message = samples.size / samples.num_ranks if exchanges else samples.size
    above = np.log(np.maximum(message, 1e-9) / ll_limit_bytes(samples.batch(links).groups, links, costs))
    if temperature == 0:
        hard: Floats = np.where(above <= 0, log_times[0], log_times[1])
        return hard
    share: Floats = 1.0 / (1.0 + np.exp(-np.clip(above / (3 * temperature), -50, 50)))
    mixed: Floats = (1 - share) * log_times[0] + share * log_times[1]
    return mixed


def errors(samples: Samples, links: ClusterLinks, able: Capabilities) -> Floats:
    """Log of modelled over measured time, by sample."""
    return modelled_log_s(samples, links, 0.0, able) - np.log(samples.time_s)


def _fit(
    parts: Sequence[tuple[Samples, Capabilities]],
    links_from: Callable[[Floats], ClusterLinks],
    start: Floats,
    *,
    num_starts: int,
    prior: float = _PRIOR,
    seed: int = 0,
) -> Floats:
    """The vector with the least mean absolute error."""
    from scipy.optimize import least_squares

    weights = np.concatenate([np.sqrt(samples.weight) for samples, _ in parts])
    weights /= np.sqrt(np.mean(weights**2))

    batches = [samples.batch(links_from(start)) for samples, _ in parts]
    measured = np.concatenate([np.log(samples.time_s) for samples, _ in parts])

    def residuals(x: Floats, temperature: float) -> Floats:
        links = links_from(x)
        modelled = [modelled_log_s(s, links, temperature, able, b) for (s, able), b in zip(parts, batches, strict=True)]
        joined: Floats = np.concatenate(modelled) - measured
        return joined

    def cost(x: Floats) -> float:
        error = float(np.average(np.abs(np.expm1(residuals(x, 0.0))), weights=weights**2))
        return error + _STRAYING * prior / _PRIOR * float(np.mean((x - start) ** 2))

    rng = np.random.default_rng(seed)
    best, best_cost = start, cost(start)
    for number in range(num_starts):
        x = start + (rng.normal(0.0, _SCATTER, len(start)) if number else 0.0)
        for temperature, evaluations in _TEMPERATURES:

            def pulled(x: Floats, temperature: float = temperature) -> Floats:
                return np.concatenate([weights * residuals(x, temperature), prior * (x - start)])

            x = least_squares(pulled, x, loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=evaluations).x
            now = cost(x)
            if now < best_cost:
                best, best_cost = x, now
    best = _polished(best, cost)
    for _ in range(_KICKS):
        kicked = np.where(rng.random(len(best)) < _KICKED, start, best)
        other = _polished(kicked, cost)
        if cost(other) < cost(best):
            best = other
    return best


def _polished(x: Floats, cost: Callable[[Floats], float]) -> Floats:
    """A vector near x of less cost, by steps along one parameter at a time that halve where none helps.

    It sees the hard choice, at which gradients of the soft one end, and so settles where curves jump.
    """
    best = cost(x)
    step = _POLISH[0]
    while step >= _POLISH[1]:
        improved = False
        for place in range(len(x)):
            for move in (step, -step):
                other = x.copy()
                other[place] += move
                now = cost(other)
                if now < best - 1e-5:
                    x, best, improved = other, now, True
                    break
        if not improved:
            step /= 2
    return x


_COSTS = {
    Collective.ALL_REDUCE: "all_reduce",
    Collective.ALL_GATHER: "all_gather",
    Collective.BROADCAST: "all_gather",
    Collective.REDUCE_SCATTER: "reduce_scatter",
    Collective.REDUCE: "reduce_scatter",
    Collective.ALL_TO_ALL: "all_to_all",
    Collective.SEND: "send",
}
"""Whose constants the times of a collective give; chains run the protocols of rings."""
_RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def fit_scale_up(
    samples: Sequence[tuple[Samples, Capabilities]],
    links: ClusterLinks,
    *,
    num_starts: int = 4,
    informed: bool = False,
) -> ScaleUpCoefficients:
    """The coefficients of a fabric with those of the measured kinds fitted.

    Rings of all-reduce, all-gather and reduce-scatter run the same protocols over the same links: unless the start is
    informed, they are first fitted together, then all-gather and reduce-scatter each near what all have in common, or
    left there if not measured. All-reduce has the most data, and the switch beside it: it is held weakly.

    Args:
        samples: inside one domain, with what the library can run.
        links: of the machine, with the coefficients to start from.
        num_starts: starts of each fit.
        informed: the start was measured on a machine like this one; it is then held firmly.
    """
    own = links.scale_up
    rings = [(s, able) for s, able in samples if _COSTS[s.kind] in _RINGS]
    if rings and not informed:
        common = _fit_common(rings, links, num_starts)
        own = replace(own, all_gather=common, reduce_scatter=common)
    for name in sorted({_COSTS[s.kind] for s, _ in samples}):
        part = [(s, able) for s, able in samples if _COSTS[s.kind] == name]
        prior = INFORMED_PRIOR if name in ("all_gather", "reduce_scatter") else _PRIOR
        own = _fit_costs(name, part, replace(links, scale_up=own), num_starts, prior)
    return own


def _fit_common(rings: Sequence[tuple[Samples, Capabilities]], links: ClusterLinks, num_starts: int) -> RingCosts:
    """One set of constants for the rings of all three collectives."""
    own = links.scale_up

    def linked(x: Floats) -> ClusterLinks:
        costs, switch = vectors.ring_from(x[:18]), vectors.switch_from(x[18:])
        scale_up = replace(own, all_reduce=costs, all_gather=costs, reduce_scatter=costs, switch=switch)
        return replace(links, scale_up=scale_up)

    start = np.concatenate([vectors.ring_vector(own.all_reduce), vectors.switch_vector(own.switch)])
    return vectors.ring_from(_fit(rings, linked, start, num_starts=num_starts)[:18])


def _fit_costs(
    name: str,
    part: Sequence[tuple[Samples, Capabilities]],
    links: ClusterLinks,
    num_starts: int,
    prior: float,
) -> ScaleUpCoefficients:
    """The coefficients with one of their tables of costs fitted."""
    own = links.scale_up
    switched = name == "all_reduce" and links.has_switch_reduction

    def with_costs(x: Floats) -> ScaleUpCoefficients:
        match name:
            case "all_to_all":
                return replace(own, all_to_all=vectors.pair_from(x))
            case "send":
                return replace(own, send=vectors.pair_from(x))
            case "all_gather":
                return replace(own, all_gather=vectors.ring_from(x))
            case "reduce_scatter":
                return replace(own, reduce_scatter=vectors.ring_from(x))
        switch = vectors.switch_from(x[18:]) if switched else own.switch
        return replace(own, all_reduce=vectors.ring_from(x), switch=switch)

    costs = getattr(own, name)
    start = vectors.ring_vector(costs) if name in _RINGS else vectors.pair_vector(costs)
    if switched:
        start = np.concatenate([start, vectors.switch_vector(own.switch)])
    found = _fit(part, lambda x: replace(links, scale_up=with_costs(x)), start, num_starts=num_starts, prior=prior)
    return with_costs(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFit:
    """Coefficients of a network, and of the chains of trees inside its nodes."""

    network: NetworkCoefficients
    tree_efficiency: float


def fit_network(
    samples: Sequence[tuple[Samples, Capabilities]],
    links: ClusterLinks,
    *,
    num_starts: int = 4,
    hold_tree: bool = False,
    informed: bool = False,
) -> NetworkFit:
    """Coefficients of a network from collectives over several nodes, those inside a node held.

    Sends between nodes and groups with one rank a node give `rail_efficiency`, all-to-alls `pair_efficiency`.
    `hold_tree` keeps the chains inside nodes too; `informed`: the start was measured on a network like this one.
    """
    reduces = any(_COSTS[s.kind] in _RINGS for s, _ in samples)
    network, tree = links.network, links.scale_up.tree_efficiency

    def linked(x: Floats) -> ClusterLinks:
        efficiency = tree if hold_tree else vectors.tree_efficiency_from(x)
        scale_up = replace(links.scale_up, tree_efficiency=efficiency)
        return replace(links, scale_up=scale_up, network=vectors.network_from(x, network))

    others = [(s, able) for s, able in samples if s.kind != Collective.ALL_TO_ALL]
    if reduces:
        start = vectors.network_vector(network, tree)
        prior = INFORMED_PRIOR if informed else _PRIOR
        x = _fit(others, linked, start, num_starts=num_starts, prior=prior)
        network, tree = vectors.network_from(x, network), tree if hold_tree else vectors.tree_efficiency_from(x)
    elif others:

        def railed(x: Floats) -> ClusterLinks:
            return replace(links, network=vectors.sends_from(x, network))

        network = vectors.sends_from(_fit(others, railed, vectors.sends_vector(network), num_starts=2), network)
    exchanges = [(s, able) for s, able in samples if s.kind == Collective.ALL_TO_ALL]
    if exchanges:
        so_far = network

        def paired(x: Floats) -> ClusterLinks:
            efficiency = float(min(np.exp(x[0]), 1.0))
            return replace(links, network=replace(so_far, pair_efficiency=efficiency))

        network = paired(_fit(exchanges, paired, np.log([network.pair_efficiency]), num_starts=1)).network
    return NetworkFit(network=network, tree_efficiency=tree)


def spread(found: Floats, sizes: Floats, weights: Floats) -> Triple:
    """Root mean square of log errors by size band; a band with under 5 samples takes that of all."""
    bands = (sizes >= SIZE_BANDS_BYTES[0]).astype(int) + (sizes >= SIZE_BANDS_BYTES[1])
    values = []
    for band in range(3):
        part = bands == band if (bands == band).sum() >= 5 else np.ones(len(bands), dtype=bool)
        values.append(round(float(np.sqrt(np.average(found[part] ** 2, weights=weights[part]))), 3))
    return values[0], values[1], values[2]


_START_CUSTOM = OneShotCosts(
    launch_s=(4e-6, 6e-6),
    rank_s=(0.2e-6, 0.2e-6),
    efficiency=(0.6, 0.5),
    eager_s=20e-6,
    eager_rank_s=1e-6,
    eager_copy_efficiency=2.0,
    own_bytes=(2.0**23, 2.0**23, 2.0**23),
    most_ranks=64,
    sigma_log=0.15,
)


def fit_custom(
    num_ranks: Floats,
    size: Floats,
    eager: npt.NDArray[np.bool_],
    time_s: Floats,
    nccl_s: Floats,
    *,
    link_bytes_per_s: npt.ArrayLike,
    most_ranks: int,
    limits: tuple[Triple, Triple] | None = None,
    base: OneShotCosts | None = None,
) -> OneShotCosts:
    """The constants of a framework's own kernels on one fabric, from eager and replayed calls.

    Args:
        num_ranks: of each call.
        size: message bytes.
        eager: the call is not replayed from a CUDA graph.
        time_s: measured.
        nccl_s: of NCCL for the same.
        link_bytes_per_s: of the machine, or of each call's.
        most_ranks: above, NCCL runs.
        limits: sizes up to which the kernels and the one in the switch run, where the source says so; else the best of
            some for all ranks.
        base: constants of the same kernels on all fabrics, near which the fit is held.
    """
    own = base or _START_CUSTOM
    shapes = [(limits[0], limits[1])] if limits else [((f,) * 3, (0.0,) * 3) for f in 1.5 * 2.0 ** np.arange(18, 32)]
    found = [
        _fit_custom_below(
            replace(own, own_bytes=first, switch_bytes=second, most_ranks=most_ranks),
            lambda costs: custom_all_reduce_s(
                num_ranks, size, nccl_s, link_bytes_per_s=link_bytes_per_s, costs=costs, eager=eager
            ),
            time_s,
            prior=INFORMED_PRIOR if base else _PRIOR,
        )
        for first, second in shapes
    ]
    return min(found, key=lambda pair: pair[0])[1]


def _fit_custom_below(
    start: OneShotCosts, modelled: Callable[[OneShotCosts], Floats], time_s: Floats, *, prior: float
) -> tuple[float, OneShotCosts]:
    """Mean absolute error and constants, with the sizes at which kernels change held."""
    from scipy.optimize import least_squares

    origin = vectors.custom_vector(start)

    def residuals(x: Floats) -> Floats:
        ratio = modelled(vectors.custom_from(x, start)) / time_s
        return np.concatenate([np.log(ratio), prior * (x - origin)])

    x = least_squares(residuals, origin, loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=40).x
    costs = vectors.custom_from(x, start)
    ratio = modelled(costs) / time_s
    sigma = float(np.sqrt(np.mean(np.log(ratio) ** 2)))
    return float(np.mean(np.abs(ratio - 1))), replace(costs, sigma_log=round(sigma, 3))


def with_span(network: NetworkCoefficients, samples: Sequence[Samples]) -> NetworkCoefficients:
    """The coefficients with the sizes and the groups of the samples that they were fitted to."""
    sizes, ranks = (np.concatenate(columns) for columns in zip(*((s.size, s.num_ranks) for s in samples), strict=True))
    return replace(
        network,
        measured_bytes=(float(sizes.min()), float(sizes.max())),
        measured_ranks=(float(ranks.min()), float(ranks.max())),
    )
