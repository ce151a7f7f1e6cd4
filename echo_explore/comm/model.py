"""The first collective model: the fastest of NCCL's algorithms and protocols, hierarchical over nodes."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from echo_explore.comm.algorithms import (
    GroupPath,
    all_to_all_time,
    chain_time,
    ring_time,
    send_time,
    switch_time,
    tree_time,
)
from echo_explore.comm.coefficients import SIZE_BANDS_BYTES, CommCoefficients, shipped_coefficients
from echo_explore.comm.paths import ClusterLinks, cluster_links, network_share
from echo_explore.comm.request import CollectiveRequest, CollectiveTime
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective
from echo_explore.specs import ClusterSpec

_PROTOCOLS = (0, 1, 2)
_BARRIER_BYTES = 4.0
"""A barrier is an all-reduce of one element [torch 2.13 ProcessGroupNCCL.cpp, 2026-11-30]."""
_SWITCH_RANKS = 3
"""Ranks in a node from which NCCL uses the switch's reduction; two exchange directly [NCCL 2.27 nvls.cc, 2025]."""


@dataclass(frozen=True, kw_only=True)
class HierarchicalModel:
    """Prices a collective as the least over algorithms and protocols, which is what NCCL's tuner aims at.

    Approximation: the real tuner errs, mostly from 1 to 16 MB, so that times there are under-estimated. The element
    type is not known here: reduction in the switch is assumed, which 8-bit integers do not have.

    Attributes:
        coefficients: see `scripts/fit_collectives.py`.
    """

    reference: ClassVar[str] = (
        "Ring, double binary tree and in-switch reduction over LL, LL128 and Simple; NCCL 2.18 tuning.cc (2023)"
    )
    version: ClassVar[int] = 1
    coefficients: CommCoefficients
    _links: dict[int, tuple[ClusterSpec, ClusterLinks]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def shipped(cls) -> "HierarchicalModel":
        """The model with the coefficients of `comm.toml`."""
        return cls(coefficients=shipped_coefficients())

    def __getstate__(self) -> dict[str, object]:
        return {"coefficients": self.coefficients}

    def __setstate__(self, state: dict[str, CommCoefficients]) -> None:
        object.__setattr__(self, "coefficients", state["coefficients"])
        object.__setattr__(self, "_links", {})

    def collective_time(self, request: CollectiveRequest, cluster: ClusterSpec) -> CollectiveTime:
        """Seconds of one collective alone, and how sure they are; 0 s for one rank.

        Raises:
            SpecError: a negative or non-finite size, or Collective.NONE.
            PlacementError: the group spans nodes that have no network card.
            MissingCalibration: the calibration has neither this fabric nor a default.
        """
        size, group = request.message_bytes, request.group
        if not 0 <= size < math.inf:
            raise SpecError("message_bytes", size, "must be finite and not negative", "correct the request")
        if group.num_ranks == 1:
            return CollectiveTime(time_s=0.0, sigma_log=0.0)
        links = self.links_of(cluster)
        share = network_share(group, links) if group.num_nodes > 1 else math.inf
        path = GroupPath(group=group, links=links, network_bytes_per_s=share)
        time_s = min(algorithm_times(request.collective, path, size).values())
        return CollectiveTime(time_s=time_s, sigma_log=_sigma_log(request.collective, path, size))

    def chosen_algorithm(self, request: CollectiveRequest, cluster: ClusterSpec) -> str:
        """The name of the algorithm and protocol that the price is of."""
        links = self.links_of(cluster)
        share = network_share(request.group, links) if request.group.num_nodes > 1 else math.inf
        path = GroupPath(group=request.group, links=links, network_bytes_per_s=share)
        times = algorithm_times(request.collective, path, request.message_bytes)
        return min(times, key=times.__getitem__)

    def links_of(self, cluster: ClusterSpec) -> ClusterLinks:
        """The links of a cluster, kept for the next call."""
        found = self._links.get(id(cluster))
        if found is None or found[0] is not cluster:
            if len(self._links) >= 64:
                self._links.clear()
            found = (cluster, cluster_links(cluster, self.coefficients))
            self._links[id(cluster)] = found
        return found[1]


def algorithm_times(collective: Collective, path: GroupPath, message_bytes: float) -> dict[str, float]:
    """Seconds by algorithm and protocol.

    Raises:
        SpecError: Collective.NONE.
    """
    match collective:
        case Collective.ALL_REDUCE:
            return _all_reduce_times(path, message_bytes)
        case Collective.BARRIER:
            return _all_reduce_times(path, _BARRIER_BYTES)
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return {f"ring/{p}": ring_time(path, message_bytes, rounds=1, protocol=p) for p in _PROTOCOLS}
        case Collective.BROADCAST | Collective.REDUCE:
            return {f"chain/{p}": chain_time(path, message_bytes, protocol=p) for p in _PROTOCOLS}
        case Collective.ALL_TO_ALL:
            return {f"pairwise/{2 * p}": all_to_all_time(path, message_bytes, simple=p) for p in (0, 1)}
        case Collective.SEND | Collective.RECV:
            return {f"send/{2 * p}": send_time(path, message_bytes, simple=p) for p in (0, 1)}
    raise SpecError("collective", collective.name, "is not a communication", "give a kind of collective")


def _all_reduce_times(path: GroupPath, message_bytes: float) -> dict[str, float]:
    times = {f"ring/{p}": ring_time(path, message_bytes, rounds=2, protocol=p) for p in _PROTOCOLS}
    if path.crosses:
        times |= {f"tree/{p}": tree_time(path, message_bytes, protocol=p) for p in _PROTOCOLS}
    if path.links.has_switch_reduction and path.group.ranks_per_node >= _SWITCH_RANKS:
        times["switch"] = switch_time(path, message_bytes)
    return times


def _sigma_log(collective: Collective, path: GroupPath, message_bytes: float) -> float:
    """Residual spread of the level that was calibrated; wider for collectives not measured between nodes."""
    band = (message_bytes >= SIZE_BANDS_BYTES[0]) + (message_bytes >= SIZE_BANDS_BYTES[1])
    if not path.crosses:
        return path.links.scale_up.sigma_log[band]
    network = path.links.network
    if collective in (Collective.ALL_REDUCE, Collective.BARRIER):
        return network.sigma_log[band]
    return max(network.sigma_log[band], network.unmeasured_sigma_log)
