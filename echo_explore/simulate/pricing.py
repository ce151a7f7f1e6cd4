"""Price a graph: kernels by the compute model, collectives by the collective model, each distinct one once."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from echo_explore.comm import CollectiveRequest
from echo_explore.comm.exchange import ExchangeRequest
from echo_explore.graph import Axis, Collective, DType, ExecutionGraph, OpClass, OpKind, TimedGraph
from echo_explore.interference import CodePairing, NoInterference, Pairing
from echo_explore.interference.loads import Traffic
from echo_explore.interference.physical import traffic_of, wire_bytes
from echo_explore.simulate.ports import CollectiveModel, ComputeModel
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import ClusterSpec, ParallelConfig, Placement, StackProfile
from echo_explore.specs.routing import Routing
from echo_explore.topology import GroupShape, group_shape, mirrored_shape, pipeline_boundary

NO_TRAFFIC = Traffic(num_channels=0, link_bytes_per_s=0.0, link_peak_bytes_per_s=0.0, burst_bytes=0.0, time_s=0.0)
"""Of a group of one rank."""
UNPAIRED = CodePairing(table=NoInterference().pair_table())
"""Codes as classes, and no slowdown."""


class Site(Protocol):
    """What prices depend on beside the graph: a candidate, or what a traced program runs on."""

    @property
    def cluster(self) -> ClusterSpec:
        """Devices and links."""

    @property
    def stack(self) -> StackProfile:
        """Kernels and libraries."""

    @property
    def layout(self) -> ParallelConfig:
        """Degrees of each axis."""

    @property
    def placement(self) -> Placement:
        """Device of each rank."""


class Pricer:
    """Prices graphs for one candidate; collects what was extrapolated."""

    def __init__(
        self,
        candidate: Site,
        *,
        compute: ComputeModel,
        collective: CollectiveModel,
        what_if: WhatIf,
        pairing: Pairing = UNPAIRED,
    ) -> None:
        self._candidate = candidate
        self._compute = compute
        self._collective = collective.for_stack(candidate.stack, candidate.cluster)
        self._what_if = what_if
        self._pairing = pairing
        self._shapes: dict[Axis, GroupShape] = {}
        self._num_copies = 1
        self._imbalance = 1.0
        self._traffic: dict[tuple[CollectiveRequest, float, bool, bool], int] = {}
        self.extrapolated: dict[str, None] = {}

    def over(self, candidate: Site) -> "Pricer":
        """The same models for another candidate, without factors."""
        return Pricer(
            candidate, compute=self._compute, collective=self._collective, what_if=WhatIf(), pairing=self._pairing
        )

    def beside(self, candidate: Site) -> "Pricer":
        """The same models and factors for a candidate that runs beside this one."""
        return Pricer(
            candidate, compute=self._compute, collective=self._collective, what_if=self._what_if, pairing=self._pairing
        )

    def with_copies(self, num_copies: int) -> "Pricer":
        """This pricer, for a pipeline that holds so many copies of the model: gradients are summed over all of them."""
        self._num_copies = num_copies
        self._shapes.clear()
        return self

    def with_imbalance(self, imbalance: float) -> "Pricer":
        """This pricer, for a rank that gets so many times as many tokens from other experts' ranks as it sends."""
        self._imbalance = max(1.0, imbalance)
        return self

    def price(
        self,
        graph: ExecutionGraph,
        *,
        shapes: Mapping[int, GroupShape] | None = None,
        known_s: npt.NDArray[np.float64] | None = None,
        is_aside: npt.NDArray[np.bool_] | None = None,
    ) -> TimedGraph:
        """The graph with the time of each row alone.

        Args:
            graph: what to price.
            shapes: of the groups of collectives, by row; where there is none, that of the axis.
            known_s: (num_ops,) times of kernels that are not those of their sizes; NaN elsewhere.
            is_aside: (num_ops,) transfers that take no SM from the kernels beside them.
        """
        kernels = self._compute.kernel_times(graph, self._candidate.cluster.device, self._candidate.stack)
        self.extrapolated |= dict.fromkeys(kernels.extrapolated)
        factor = np.ones(len(OpClass))
        for op_class in OpClass:
            factor[op_class] = self._what_if.kernel_factor(op_class)
        time_s = kernels.time_s * factor[graph.op_class]
        if known_s is not None:
            time_s = np.where(np.isnan(known_s), time_s, known_s)
        sigma_log = kernels.sigma_log.copy()
        pair_class = self._pairing.kernel_classes(graph, time_s)
        rows = np.flatnonzero(graph.kind == OpKind.COLLECTIVE)
        for row in rows.tolist():
            axis, kind = Axis(int(graph.axis[row])), Collective(int(graph.collective[row]))
            dtype, size = DType(int(graph.dtype[row])), float(graph.message_bytes[row])
            if axis is Axis.HOST:
                time_s[row] = self.host_copy(size)
                pair_class[row] = self._pairing.traffic_class(kind, NO_TRAFFIC)
                continue
            shape = (shapes or {}).get(row) or self.shape(axis)
            if graph.dims[row, 0] > 0:
                name = graph.strings[graph.name[row]]
                time_s[row], sigma_log[row] = self.exchange(name, axis, size, tuple(graph.dims[row].tolist()))
            elif kind in (Collective.SEND, Collective.RECV):
                time_s[row], sigma_log[row] = self.ring_step(axis, kind, size, dtype, hop=(shapes or {}).get(row))
            else:
                time_s[row], sigma_log[row] = self.collective(axis, kind, size, dtype, shape=shape)
            pair_class[row] = self.traffic_class(
                axis,
                kind,
                size,
                dtype,
                time_s=float(time_s[row]),
                fused=bool(graph.dims[row, 0] > 0),
                aside=is_aside is not None and bool(is_aside[row]),
                shape=shape,
            )
        return TimedGraph(graph=graph, time_s=time_s, sigma_log=sigma_log, pair_class=pair_class)

    def traffic_class(
        self,
        axis: Axis,
        kind: Collective,
        message_bytes: float,
        dtype: DType = DType.NONE,
        *,
        time_s: float,
        fused: bool = False,
        aside: bool = False,
        shape: GroupShape | None = None,
    ) -> int:
        """What column of the interference table a collective over the group of `axis` has.

        Args:
            axis: of the group.
            kind: of the collective.
            message_bytes: nccl-tests' S.
            dtype: of its elements.
            time_s: its price.
            fused: an `exchange`, whose blocks have their SMs to themselves.
            aside: takes no SM from the kernels beside it: by a copy engine, or on SMs that they leave to it.
            shape: of the group, if it is not that of the axis.
        """
        shape = shape or self.shape(axis)
        request = CollectiveRequest(collective=kind, message_bytes=message_bytes, group=shape, dtype=dtype)
        key = (request, time_s, fused, aside)
        if key not in self._traffic:
            self._traffic[key] = self._traffic_class(request, time_s, fused=fused, aside=aside)
        return self._traffic[key]

    def _traffic_class(self, request: CollectiveRequest, time_s: float, *, fused: bool, aside: bool) -> int:
        shape, kind, message_bytes = request.group, request.collective, request.message_bytes
        if shape.num_ranks < 2 or time_s <= 0:
            return self._pairing.traffic_class(kind, NO_TRAFFIC)
        cluster = self._candidate.cluster
        plan = self._collective.plan(request, cluster)
        traffic = traffic_of(
            num_channels=0 if aside else plan.num_sms,
            chunk_bytes=plan.chunk_bytes,
            message_bytes=message_bytes,
            wire_bytes=wire_bytes(kind, message_bytes, shape.num_ranks),
            num_ranks=shape.num_ranks,
            in_domain=shape.num_nodes == 1,
            time_s=time_s,
            link_bytes_per_s=cluster.node.link_bandwidth_bytes_per_s,
            over_pcie=cluster.node.link == "pcie",
            fused=fused,
        )
        return self._pairing.traffic_class(kind, traffic)

    def shape(self, axis: Axis) -> GroupShape:
        """Where the groups of an axis lie under the candidate's placement."""
        if axis not in self._shapes:
            candidate = self._candidate
            place = candidate.layout, candidate.cluster, candidate.placement
            over_copies = self._num_copies > 1 and axis in (Axis.DATA, Axis.EXPERT_DATA)
            self._shapes[axis] = mirrored_shape(axis, *place) if over_copies else group_shape(axis, *place)
        return self._shapes[axis]

    def collective(
        self,
        axis: Axis,
        kind: Collective,
        message_bytes: float,
        dtype: DType = DType.NONE,
        *,
        shape: GroupShape | None = None,
    ) -> tuple[float, float]:
        """Seconds of a collective over a group of `axis` alone, and the standard deviation of their log."""
        shape = shape or self.shape(axis)
        # A rank whose experts get more has a longer message in the trace; the library chooses by what it sends.
        uneven = self._imbalance if kind is Collective.ALL_TO_ALL and axis is Axis.EXPERT else 1.0
        request = CollectiveRequest(
            collective=kind, message_bytes=message_bytes / uneven, group=shape, dtype=dtype, imbalance=uneven
        )
        price = self._collective.collective_time(request, self._candidate.cluster)
        return price.time_s * self._what_if.axis_factor(axis), price.sigma_log

    def host_copy(self, message_bytes: float) -> float:
        """Seconds of a copy to or from the memory of the host, alone.

        # Approximation: at the rate of the link, without what packets and the host's memory take from it, and without
        # slowing down the kernels beside it, whose memory moves 10 to 100 times as much (under-estimates).
        """
        factor = self._what_if.axis_factor(Axis.HOST)
        return message_bytes / self._candidate.cluster.node.host_link_bytes_per_s * factor

    def ring_step(
        self,
        axis: Axis,
        kind: Collective,
        message_bytes: float,
        dtype: DType = DType.NONE,
        *,
        hop: GroupShape | None = None,
    ) -> tuple[float, float]:
        """Seconds of a transfer to the next rank of a ring over the group of `axis`, and the deviation of their log.

        All ranks send and receive at once, in opposite directions of their links, so that a receipt takes no time
        beside the sending that it comes with. The ring waits for its slowest hop: the one between nodes, if there is
        one.
        """
        if kind is Collective.RECV:
            return 0.0, 0.0
        if hop is None:
            group = self.shape(axis)
            inside = group.num_nodes == 1
            pairs = group.groups_per_node * (group.ranks_per_node if inside else 1)
            hop = GroupShape(num_ranks=2, ranks_per_node=2 if inside else 1, groups_per_node=pairs)
        request = CollectiveRequest(collective=kind, message_bytes=message_bytes, group=hop, dtype=dtype)
        price = self._collective.collective_time(request, self._candidate.cluster)
        return price.time_s * self._what_if.axis_factor(axis), price.sigma_log

    def exchange(self, operator: str, axis: Axis, message_bytes: float, dims: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of a fused exchange of tokens and experts (DeepEP, HybridEP), and the deviation of their log.

        Tokens visit domains by the routing's own probabilities, balanced even under a load.

        Args:
            operator: its name in the trace.
            axis: of the group.
            message_bytes: a rank sends, itself included, one copy of a token a rank.
            dims: tokens, bytes a token, experts, experts a token, groups, groups a token.
        """
        shape = self.shape(axis)
        tokens, width, experts, each, groups, chosen = dims[:6]
        routing = Routing(num_experts=experts, experts_per_token=each, num_groups=groups, groups_per_token=chosen)
        request = ExchangeRequest(
            operator=operator,
            rank_visits=message_bytes / width,
            domain_visits=tokens * sum(routing.visits(shape.num_nodes)),
            token_bytes=float(width),
            group=shape,
        )
        price = self._collective.exchange_time(request, self._candidate.cluster)
        return price.time_s * self._what_if.axis_factor(axis), price.sigma_log

    def transfer(self, stage: int, message_bytes: float) -> tuple[float, float]:
        """Seconds of a transfer from a pipeline stage to the next alone, and the deviation of their log."""
        if self._candidate.layout.pipeline_parallel == 1:
            return 0.0, 0.0
        candidate = self._candidate
        shape = pipeline_boundary(candidate.layout, candidate.cluster, stage, candidate.placement)
        request = CollectiveRequest(collective=Collective.SEND, message_bytes=message_bytes, group=shape)
        price = self._collective.collective_time(request, self._candidate.cluster)
        return price.time_s * self._what_if.axis_factor(Axis.PIPELINE), price.sigma_log
