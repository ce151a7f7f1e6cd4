"""What NCCL could run for a collective, and what its tuner takes.

NCCL's tuner compares its own estimates, latency plus size over bandwidth, for every algorithm and protocol, and errs:
measured curves jump where it changes too late or too early. Here its estimate is the true latency and transfer time,
each times a fitted weight (`TunerWeights`), so that a price is that of the algorithm NCCL takes, not of the best one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from echo_explore.comm import algorithms as forms
from echo_explore.comm.algorithms import SIMPLE, AlgorithmTime
from echo_explore.comm.coefficients import (
    LL128_SHARE,
    LL_SHARE,
    PAIR_PROTOCOLS,
    PROTOCOLS,
    NetworkCoefficients,
    PairCosts,
    RingCosts,
    TunerWeights,
)
from echo_explore.comm.paths import ClusterLinks, Floats, GroupArrays
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective, DType

NCCL_ALGORITHMS: Final = ("ring", "tree", "chain", "collnet", "nvls", "nvls-tree", "pat", "direct")
"""NCCL_ALGO spells them Ring, Tree, CollNet, NVLS, NVLSTree, PAT."""
TUNED: Final = ("ring", "tree", "chain", "collnet", "nvls", "nvls-tree", "pat")
"""Those among which NCCL's tuner compares its estimates."""
HALVING_DOUBLING: Final = "halving-doubling"
OWN_KERNELS: Final = ("one-shot", "two-shot", "in-switch")
"""Of inference frameworks; see comm/custom.py."""
OWN_PROTOCOL: Final = "own"
ALGORITHMS: Final = (*NCCL_ALGORITHMS, HALVING_DOUBLING, *OWN_KERNELS)
"""Names that can be forced."""
SWITCH_DTYPES: Final = frozenset(
    {DType.NONE, DType.FP64, DType.FP32, DType.TF32, DType.BF16, DType.FP16, DType.INT64, DType.INT32}
)
"""Types that the switch reduces [NCCL 2.27 src/include/device.h, ncclNvlsSupported, 2025]; unknown is taken as one."""
_SWITCH_RANKS = 3
"""Ranks in a node from which NCCL uses the switch's reduction; two exchange directly [NCCL 2.27 nvls.cc, 2025]."""
BELIEVED_SHARE: Final = (LL_SHARE, LL128_SHARE, 1.0)
"""By protocol, the most of Simple's bandwidth that NCCL's tuner believes in: it derives the bandwidths of LL and LL128
from Simple's by factors of at most these [NCCL 2.18 src/graph/tuning.cc, ncclTopoTuneModel, 2023]."""
_WORST_CHOICE = 2.3
"""Between nodes a choice is never worse than this against the best: weights fitted to few nodes must not choose badly
for many. Inside a domain the fits saw what there is. Measured curves jump by up to 2.2 (all-to-all on GB200, openxla
tables, 2026-11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Collectives of one kind on one cluster, as columns of equal length.

    Attributes:
        switched: the element type is one that switches reduce.
        narrow: elements of 8 bits.
        imbalance: of all-to-alls.
    """

    groups: GroupArrays
    size: Floats
    switched: npt.NDArray[np.bool_]
    narrow: npt.NDArray[np.bool_]
    imbalance: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a library can run.

    Attributes:
        nvls: reduction in the scale-up switch (NCCL 2.17).
        nvls_tree: the same with trees between nodes (NCCL 2.18).
        pat: parallel aggregated trees (NCCL 2.23).
        ll128: the LL128 protocol (not on every fabric of RCCL).
        pxn: data for another rail goes over the scale-up links to the GPU that has it (NCCL 2.12).
    """

    nvls: bool = True
    nvls_tree: bool = True
    pat: bool = True
    ll128: bool = True
    pxn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedChoice:
    """What NCCL_ALGO and NCCL_PROTO do: leave only these; None leaves all.

    Attributes:
        algorithm: a name, or several with commas; NCCL's spelling counts too (`Ring,NVLSTree`).
        protocol: the same.
        of_a_job: as the variables do to a whole job, where rings of other collectives than all-reduce stay [NCCL 2.18
            src/graph/tuning.cc, 2023] and chains and direct exchanges know no such choice; else of one collective.

    Raises:
        SpecError: a name that is not known.
    """

    algorithm: str | None = None
    protocol: str | None = None
    of_a_job: bool = False

    def __post_init__(self) -> None:
        """Check the names."""
        for field, value, known in (
            ("algorithm", self.algorithm, ALGORITHMS),
            ("protocol", self.protocol, PROTOCOLS),
        ):
            found = _named(value, known)
            if found is not None and len(found) < len(value.split(",")):  # type: ignore[union-attr]
                raise SpecError(field, value, f"must be one of {', '.join(known)}", "correct the name")

    @property
    def algorithms(self) -> tuple[str, ...] | None:
        """Those that are left; None: all."""
        return _named(self.algorithm, ALGORITHMS)

    def leaves(self, option: "Option", kind: Collective) -> bool:
        """Whether the option is left for a collective of that kind."""
        algorithms, protocols = self.algorithms, _named(self.protocol, PROTOCOLS)
        stays = self.of_a_job and kind not in (Collective.ALL_REDUCE, Collective.BARRIER)
        if stays and option.algorithm == "direct":
            return True
        named = algorithms is None or option.algorithm in algorithms
        kept = named or (stays and option.algorithm in ("ring", "chain"))
        return kept and (protocols is None or option.protocol in protocols)


def _named(text: str | None, known: Sequence[str]) -> tuple[str, ...] | None:
    """The known names in a list with commas, whatever their case; NVLSTree is nvls-tree; None for None."""
    if text is None:
        return None
    names = {name.lower().replace("-", ""): name for name in known} | {
        "collnetdirect": "collnet",
        "collnetchain": "collnet",
    }
    asked = (part.strip().lower().replace("-", "") for part in text.split(","))
    return tuple(names[part] for part in asked if part in names and names[part] in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One algorithm under one protocol, for every collective of a batch.

    Attributes:
        believed_s: the tuner's estimate; infinite where the option does not apply.
        even_s: seconds with equal parts, by which a choice is judged: a tuner knows no others; None: as `time`.
        sigma_log: of the log of its time, where it is not that of the level.
        max_blocks: most thread blocks of a framework's kernel.
    """

    algorithm: str
    protocol: str
    time: AlgorithmTime
    believed_s: Floats
    even_s: Floats | None = None
    sigma_log: float | None = None
    max_blocks: int = 1

    @property
    def name(self) -> str:
        """Such as ring/LL128."""
        return f"{self.algorithm}/{self.protocol}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What runs, for every collective of a batch.

    Attributes:
        time_s: its seconds.
        index: which of `options`.
    """

    time_s: Floats
    index: npt.NDArray[np.intp]
    options: tuple[Option, ...]


def choose(
    options: Sequence[Option],
    forced: ForcedChoice,
    crosses: npt.NDArray[np.bool_],
    kind: Collective,
    *,
    unfitted: npt.NDArray[np.bool_] | None = None,
) -> Choice:
    """The option with the least believed time among those that are left; `crosses`: which groups span nodes.

    Where the tuner's weights were fitted to no such size (`unfitted`), the least time decides among algorithms whose
    choice is the tuner's; sends change protocol by their own rule of size.

    Raises:
        SpecError: what is forced does not exist for one of these collectives.
    """
    left = [option for option in options if forced.leaves(option, kind)]
    believed = np.array([o.believed_s for o in left]) if left else np.full((1, 1), np.inf)
    if not np.isfinite(believed.min(axis=0)).all():
        given = f"{forced.algorithm or 'any algorithm'}/{forced.protocol or 'any protocol'}"
        names = ", ".join(dict.fromkeys(o.name for o in options if np.isfinite(o.believed_s).any()))
        raise SpecError("choice", given, f"does not exist for this collective and group, which has {names}", "name one")
    times = np.array([o.time.time_s for o in left])
    judged = np.array([o.time.time_s if o.even_s is None else o.even_s for o in left])
    least = np.where(np.isfinite(believed), judged, np.inf).min(axis=0)
    if unfitted is not None and all(o.algorithm in TUNED for o in left):
        believed = np.where(unfitted & np.isfinite(believed), judged, believed)
    index = np.where(crosses & (judged > _WORST_CHOICE * least), np.inf, believed).argmin(axis=0)
    return Choice(time_s=times[index, np.arange(len(index))], index=index, options=tuple(left))


def options_of(kind: Collective, batch: Batch, links: ClusterLinks, able: Capabilities) -> list[Option]:
    """Everything that could run for these collectives; not every option applies to each.

    Raises:
        SpecError: Collective.NONE.
    """
    match kind:
        case Collective.ALL_REDUCE | Collective.BARRIER:
            return _all_reduce(batch, links, able)
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return _gather_or_scatter(kind, batch, links, able)
        case Collective.BROADCAST | Collective.REDUCE:
            costs = links.scale_up.all_gather if kind == Collective.BROADCAST else links.scale_up.reduce_scatter
            times = [forms.chain(batch.groups, links, batch.size, costs, protocol=p) for p in range(len(PROTOCOLS))]
            return _by_protocol("chain", times, costs.tuner, links.network.ring_tuner, batch, able, links.network)
        case Collective.ALL_TO_ALL:
            message = batch.size / batch.groups.num_ranks
            uneven, even = (
                [forms.all_to_all(batch.groups, links, batch.size, i, s, pxn=able.pxn) for s in (0, 1)]
                for i in (batch.imbalance, np.ones_like(batch.size))
            )
            return _sends(uneven, even, message, ll_limit_bytes(batch.groups, links, links.scale_up.all_to_all))
        case Collective.SEND | Collective.RECV:
            times = [forms.send(batch.groups, links, batch.size, simple=s) for s in (0, 1)]
            return _sends(times, times, batch.size, ll_limit_bytes(batch.groups, links, links.scale_up.send))
    raise SpecError("collective", kind.name, "is not a communication", "give a kind of collective")


def ll_limit_bytes(groups: GroupArrays, links: ClusterLinks, costs: PairCosts) -> Floats:
    """Size of a message up to which sends use LL, by group: groups over several hosts have their own."""
    several = groups.crosses | (groups.num_ranks > links.host_gpus)
    return np.where(several, costs.ll_message_bytes[1], costs.ll_message_bytes[0])


def _sends(
    times: list[AlgorithmTime], even: list[AlgorithmTime], message: Floats, ll_message_bytes: Floats
) -> list[Option]:
    """LL up to a size of message, Simple above: believed times of 0 and 1 in that order."""
    small = message <= ll_message_bytes
    believed = (np.where(small, 0.0, 1.0), np.where(small, 1.0, 0.0))
    return [
        Option(
            algorithm="direct",
            protocol=PAIR_PROTOCOLS[i],
            time=times[i],
            believed_s=believed[i],
            even_s=even[i].time_s,
        )
        for i in (0, 1)
    ]


def _narrowed(time: AlgorithmTime, costs: RingCosts, batch: Batch) -> AlgorithmTime:
    """Transfers of reduced 8-bit elements take longer."""
    factor = np.where(batch.narrow, costs.byte_slowdown, 1.0)
    return AlgorithmTime(latency_s=time.latency_s, stream_s=time.stream_s * factor)


def _by_protocol(
    algorithm: str,
    times: Sequence[AlgorithmTime],
    inside: TunerWeights,
    between: TunerWeights,
    batch: Batch,
    able: Capabilities,
    network: NetworkCoefficients,
    *,
    valid: npt.NDArray[np.bool_] | None = None,
) -> list[Option]:
    """An algorithm under each protocol.

    The tuner never believes that LL or LL128 move bytes faster than their share of what it believes of Simple, so that
    it takes Simple for long messages whatever its weights are: they may have been fitted on other groups.
    """
    options = []
    crosses = batch.groups.crosses
    simple_s = np.where(crosses, between.stream[SIMPLE], inside.stream[SIMPLE]) * times[SIMPLE].stream_s
    for p, time in enumerate(times):
        if PROTOCOLS[p] == "LL128" and not able.ll128:
            continue
        latency = np.where(crosses, between.latency[p], inside.latency[p])
        stream = np.where(crosses, between.stream[p], inside.stream[p])
        believed = latency * time.latency_s + np.maximum(stream * time.stream_s, simple_s / BELIEVED_SHARE[p])
        if valid is not None:
            believed = np.where(valid, believed, np.inf)
        if network.simple_only and p != SIMPLE:
            believed = np.where(crosses, np.inf, believed)
        options.append(Option(algorithm=algorithm, protocol=PROTOCOLS[p], time=time, believed_s=believed))
    return options


def _all_reduce(batch: Batch, links: ClusterLinks, able: Capabilities) -> list[Option]:
    groups, size, network = batch.groups, batch.size, links.network
    costs, protocols = links.scale_up.all_reduce, range(len(PROTOCOLS))
    rings = [_narrowed(forms.ring(groups, links, size, costs, rounds=2, protocol=p), costs, batch) for p in protocols]
    options = _by_protocol("ring", rings, costs.tuner, network.ring_tuner, batch, able, network)
    crosses = groups.crosses
    if crosses.any():
        trees = [_narrowed(forms.tree(groups, links, size, costs, protocol=p), costs, batch) for p in protocols]
        options += _by_protocol("tree", trees, costs.tuner, network.tree_tuner, batch, able, network, valid=crosses)
    if crosses.any() and links.has_network_reduction:
        time = forms.collnet(groups, links, size, costs)
        options.append(_weighted("collnet", time, 1.0, 1.0, crosses & batch.switched))
    switched = batch.switched & (groups.ranks_per_node >= _SWITCH_RANKS)
    if able.nvls and links.has_switch_reduction and switched.any():
        switch = links.scale_up.switch
        time = forms.nvls(groups, links, size)
        options.append(_weighted("nvls", time, switch.tuner_latency, switch.tuner_stream, switched & ~crosses))
        if able.nvls_tree and crosses.any():
            time = forms.nvls(groups, links, size, reducing_network=links.has_network_reduction)
            options.append(_weighted("nvls-tree", time, *network.switch_tuner, switched & crosses))
    return options


def _gather_or_scatter(kind: Collective, batch: Batch, links: ClusterLinks, able: Capabilities) -> list[Option]:
    groups, size = batch.groups, batch.size
    gathers = kind == Collective.ALL_GATHER
    costs = links.scale_up.all_gather if gathers else links.scale_up.reduce_scatter
    times = [forms.ring(groups, links, size, costs, rounds=1, protocol=p) for p in range(len(PROTOCOLS))]
    if not gathers:
        times = [_narrowed(time, costs, batch) for time in times]
    options = _by_protocol("ring", times, costs.tuner, links.network.ring_tuner, batch, able, links.network)
    single = groups.crosses & (groups.ranks_per_node == 1)
    if able.pat and single.any():
        options.append(_weighted("pat", forms.pat(groups, links, size, costs), 1.0, 1.0, single))
    return options


def _weighted(
    algorithm: str, time: AlgorithmTime, latency: float, stream: float, valid: npt.NDArray[np.bool_]
) -> Option:
    """An option that only Simple has."""
    believed = np.where(valid, latency * time.latency_s + stream * time.stream_s, np.inf)
    return Option(algorithm=algorithm, protocol="Simple", time=time, believed_s=believed)
