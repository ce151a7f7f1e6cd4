"""The collective model: what NCCL's tuner takes among its algorithms and protocols, hierarchical over nodes."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from echo_explore.comm.choice import (
    HALVING_DOUBLING,
    OWN_KERNELS,
    OWN_PROTOCOL,
    SWITCH_DTYPES,
    Batch,
    Choice,
    ForcedChoice,
    Option,
    choose,
    options_of,
)
from echo_explore.comm.coefficient_file import shipped_coefficients, user_coefficients
from echo_explore.comm.coefficients import SIZE_BANDS_BYTES, CommCoefficients
from echo_explore.comm.custom import custom_costs
from echo_explore.comm.exchange import ExchangeRequest, exchange_costs, exchange_time_s
from echo_explore.comm.libraries import BASE, library, library_of_version
from echo_explore.comm.named import framework_options, halving_doubling_option, own_plan
from echo_explore.comm.paths import ClusterLinks, Floats, cluster_links, group_arrays
from echo_explore.comm.request import CollectiveRequest, CollectiveTime
from echo_explore.comm.schedule import CollectivePlan, collective_plan
from echo_explore.core import SpecError
from echo_explore.graph.kinds import DTYPE_BYTES, Collective, DType
from echo_explore.specs import ClusterSpec, StackProfile

_BARRIER_BYTES = 4.0
"""A barrier is an all-reduce of one element [torch 2.13 ProcessGroupNCCL.cpp, 2026-11-30]."""
_MOST_PRICES = 65536


@dataclass(frozen=True, kw_only=True)
class HierarchicalModel:
    """Prices a collective as the algorithm and protocol that NCCL's tuner takes, right or wrong.

    A price may therefore fall as a message grows, where the tuner changes to a faster algorithm too late; for a forced
    algorithm and protocol it never does.

    Attributes:
        coefficients: see `scripts/fit_collectives.py`.
        forced: what NCCL_ALGO and NCCL_PROTO say.
        library: name in LIBRARIES.
    """

    reference: ClassVar[str] = (
        "Rings, trees, CollNet, NVLS, PAT and direct exchange over LL, LL128 and Simple; NCCL 2.18 tuning.cc (2023)"
    )
    version: ClassVar[int] = 4
    coefficients: CommCoefficients
    forced: ForcedChoice = field(default_factory=ForcedChoice)
    library: str = BASE
    _links: dict[int, tuple[ClusterSpec, ClusterLinks]] = field(default_factory=dict, repr=False, compare=False)
    _prices: dict[tuple[int, CollectiveRequest], CollectiveTime] = field(
        default_factory=dict, repr=False, compare=False
    )
    _variants: dict[tuple[str, ForcedChoice], "HierarchicalModel"] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def shipped(cls) -> "HierarchicalModel":
        """The model with the coefficients of `comm.toml`."""
        return cls(coefficients=shipped_coefficients())

    @classmethod
    def from_file(cls, path: Path) -> "HierarchicalModel":
        """The same with what a calibration file has under `[comm]` over them."""
        return cls(coefficients=user_coefficients(path))

    def __getstate__(self) -> dict[str, object]:
        return {"coefficients": self.coefficients, "forced": self.forced, "library": self.library}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in {**state, "_links": {}, "_prices": {}, "_variants": {}}.items():
            object.__setattr__(self, name, value)

    def collective_time(self, request: CollectiveRequest, cluster: ClusterSpec) -> CollectiveTime:
        """Seconds of one collective alone, and how sure they are; 0 s for one rank.

        Raises:
            SpecError: a negative or non-finite size, Collective.NONE, or a forced algorithm that does not exist here.
            PlacementError: the group spans nodes that have no network card.
            MissingCalibration: the calibration has neither this fabric nor a default.
        """
        links = self.links_of(cluster)
        key = (id(links), request)
        found = self._prices.get(key)
        if found is None:
            found = self._price(request, links)
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            self._prices[key] = found
        return found

    def _price(self, request: CollectiveRequest, links: ClusterLinks) -> CollectiveTime:
        if request.group.num_ranks == 1:
            return CollectiveTime(time_s=0.0, sigma_log=0.0)
        choice = self._choice(request, links)
        own = choice.options[int(choice.index[0])].sigma_log
        return CollectiveTime(
            time_s=float(choice.time_s[0]), sigma_log=_sigma_log(request, links) if own is None else own
        )

    def exchange_time(self, request: ExchangeRequest, cluster: ClusterSpec) -> CollectiveTime:
        """Seconds of one fused exchange of tokens and experts alone, and how sure they are; 0 s for one rank.

        Raises:
            PlacementError: the group spans nodes that have no network card.
            MissingCalibration: the calibration has neither this device nor a default.
        """
        costs = exchange_costs(self.coefficients.exchange, request.operator, cluster.device)
        time_s = exchange_time_s(request, costs, self.links_of(cluster))
        return CollectiveTime(time_s=time_s, sigma_log=costs.sigma_log if time_s > 0 else 0.0)

    def collective_times(
        self,
        kind: Collective,
        message_bytes: npt.ArrayLike,
        cluster: ClusterSpec,
        *,
        num_ranks: npt.ArrayLike,
        ranks_per_node: npt.ArrayLike,
        groups_per_node: npt.ArrayLike = 1,
        dtype: DType = DType.NONE,
    ) -> Floats:
        """Seconds of many collectives of one kind, as columns that broadcast: (num_collectives,).

        Raises:
            As `collective_time`.
        """
        columns = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(v, float)) for v in (message_bytes, num_ranks, ranks_per_node, groups_per_node))
        )
        batch = make_batch(self.links_of(cluster), *columns, dtype=dtype)
        return np.where(columns[1] > 1, self.choice_of(kind, batch, self.links_of(cluster)).time_s, 0.0)

    def choice_of(self, kind: Collective, batch: Batch, links: ClusterLinks) -> Choice:
        """What runs for each collective of a batch, and its time."""
        return choose(
            self._options(kind, batch, links),
            self.forced,
            batch.groups.crosses,
            kind,
            unfitted=batch.groups.crosses & (batch.size < links.network.measured_bytes[0]),
        )

    def _options(self, kind: Collective, batch: Batch, links: ClusterLinks) -> list[Option]:
        """What the library could run, and what is named beside it."""
        able = library(self.library)
        options = options_of(kind, batch, links, able.able)
        if kind == Collective.ALL_REDUCE and able.framework:
            costs = custom_costs(self.coefficients.custom, able.framework, links.scale_up.key)
            options = framework_options(options, batch, links, costs, able.framework)
        elif own := [name for name in self.forced.algorithms or () if name in OWN_KERNELS]:
            fix = "give --library vllm, sglang-0.5.11 or trtllm, and all_reduce"
            raise SpecError("algorithm", own[0], "is an all-reduce of an inference framework", fix)
        if kind == Collective.ALL_REDUCE and HALVING_DOUBLING in (self.forced.algorithms or ()):
            options.append(halving_doubling_option(batch, links))
        return options

    def for_stack(self, stack: StackProfile, cluster: ClusterSpec) -> "HierarchicalModel":
        """The model of the library version that a stack has on that cluster, under its NCCL_ALGO and NCCL_PROTO.

        Raises:
            SpecError: a name that is not known.
        """
        name = library_of_version(stack.nccl_version, cluster.device.architecture).name
        forced = ForcedChoice(algorithm=stack.nccl_algo or None, protocol=stack.nccl_proto or None, of_a_job=True)
        if (name, forced) not in self._variants:
            self._variants[name, forced] = HierarchicalModel(
                coefficients=self.coefficients, forced=forced, library=name
            )
        return self._variants[name, forced]

    def plan(self, request: CollectiveRequest, cluster: ClusterSpec) -> CollectivePlan:
        """Algorithm, protocol, channels (SMs), chunks and slices of one collective."""
        choice = self._choice(request, self.links_of(cluster))
        option = choice.options[int(choice.index[0])]
        group = request.group
        if option.protocol == OWN_PROTOCOL:
            return own_plan(option, request.message_bytes)
        return collective_plan(
            option.algorithm,
            option.protocol,
            request.message_bytes,
            num_ranks=group.num_ranks,
            num_nodes=group.num_nodes,
            architecture=cluster.device.architecture,
        )

    def chosen_algorithm(self, request: CollectiveRequest, cluster: ClusterSpec) -> str:
        """The name of the algorithm and protocol that the price is of, such as ring/LL128."""
        choice = self._choice(request, self.links_of(cluster))
        return choice.options[int(choice.index[0])].name

    def algorithm_times(self, request: CollectiveRequest, cluster: ClusterSpec) -> dict[str, float]:
        """Seconds by algorithm and protocol, of those that exist for this collective and group."""
        links = self.links_of(cluster)
        options = self._options(request.collective, _batch_of(request, links), links)
        return {o.name: float(o.time.time_s[0]) for o in options if np.isfinite(o.believed_s[0])}

    def _choice(self, request: CollectiveRequest, links: ClusterLinks) -> Choice:
        return self.choice_of(request.collective, _batch_of(request, links), links)

    def links_of(self, cluster: ClusterSpec) -> ClusterLinks:
        """The links of a cluster, kept for the next call."""
        found = self._links.get(id(cluster))
        if found is None or found[0] is not cluster:
            if len(self._links) >= 64:
                self._links.clear()
                self._prices.clear()
            found = (cluster, cluster_links(cluster, self.coefficients, library=self.library))
            self._links[id(cluster)] = found
        return found[1]


def make_batch(
    links: ClusterLinks,
    message_bytes: Floats,
    num_ranks: Floats,
    ranks_per_node: Floats,
    groups_per_node: Floats,
    node_stride: Floats | float = 1.0,
    *,
    dtype: DType = DType.NONE,
) -> Batch:
    """Collectives of one element type as columns.

    Raises:
        SpecError: a negative or non-finite size.
        PlacementError: a group spans nodes that have no network card.
    """
    wrong = ~((message_bytes >= 0) & (message_bytes < math.inf))
    if wrong.any():
        value = float(message_bytes[wrong][0])
        raise SpecError("message_bytes", value, "must be finite and not negative", "correct the request")
    count = len(message_bytes)
    return Batch(
        groups=group_arrays(links, num_ranks, ranks_per_node, groups_per_node, node_stride),
        size=message_bytes,
        switched=np.full(count, dtype in SWITCH_DTYPES),
        narrow=np.full(count, 0 < DTYPE_BYTES[dtype] <= 1),
        imbalance=np.ones(count),
    )


def _batch_of(request: CollectiveRequest, links: ClusterLinks) -> Batch:
    size = _BARRIER_BYTES if request.collective == Collective.BARRIER else float(request.message_bytes)
    group = request.group
    if not request.imbalance >= 1:
        raise SpecError("imbalance", request.imbalance, "must be at least 1", "correct the request")
    figures = (size, group.num_ranks, group.ranks_per_node, group.groups_per_node, group.node_stride)
    columns = (np.array([v], dtype=float) for v in figures)
    batch = make_batch(links, *columns, dtype=request.dtype)
    return Batch(
        groups=batch.groups,
        size=batch.size,
        switched=batch.switched,
        narrow=batch.narrow,
        imbalance=np.array([request.imbalance]),
    )


def rests_on_measurements(request: CollectiveRequest, links: ClusterLinks) -> bool:
    """Whether the fit saw such a collective, of such a size, over such a group; true inside one domain."""
    if request.group.num_nodes == 1:
        return True
    kind = request.collective in (Collective.ALL_REDUCE, Collective.BARRIER)
    return kind and links.network.is_measured(request.message_bytes, request.group.num_ranks)


def _sigma_log(request: CollectiveRequest, links: ClusterLinks) -> float:
    """Residual spread of the level that was calibrated; wider for collectives not measured between nodes."""
    size, group = request.message_bytes, request.group
    if group.num_ranks == 1:
        return 0.0
    band = int(size >= SIZE_BANDS_BYTES[0]) + int(size >= SIZE_BANDS_BYTES[1])
    if group.num_nodes == 1:
        return links.scale_up.sigma_log[band]
    network = links.network
    if rests_on_measurements(request, links):
        return network.sigma_log[band]
    return max(network.sigma_log[band], network.unmeasured_sigma_log)
