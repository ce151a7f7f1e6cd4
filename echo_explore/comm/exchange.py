"""Fused exchanges of tokens and experts, DeepEP and HybridEP: seconds of a dispatch and of a combine.

A token goes once to each rank that it visits: over the network once to each domain, there over the scale-up links. With
v visits of a rank's tokens, w bytes a token, s SMs, n ranks on M domains with r each, W link and B card bandwidth:

    t = a + w d + M' m + (max(P, L)^3 + N^3)^(1/3)
    P = v (c + w / k) / s,  L = (r-1)/r v w / (W e),  N = (M-1)/M x w / (B q)

with c an SM's time for a token at one rank, k the bytes that an SM moves a second, x the domains that the tokens visit,
their own counted; M' is M where M > 1, else 0. SMs write the links themselves, so that the slower of both counts;
the network is another stage of the pipeline.
# Approximation: cubes of the two stages add up; the slower alone is too short (by up to 20 % between two hosts of
H100), their sum too long.

References: DeepEP 1.2 csrc/kernels/intranode.cu and internode.cu (2025); Hybrid-EP, docs/README_Hybrid-EP.md of the
same repository (2025).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from echo_explore.comm.coefficients import DEFAULT, ExchangeCosts
from echo_explore.comm.paths import ClusterLinks, Floats, group_arrays, network_share
from echo_explore.comm.spines import spine_share
from echo_explore.core import MissingCalibration
from echo_explore.specs import DeviceSpec
from echo_explore.topology import GroupShape

_STAGES_NORM = 3.0
OPERATORS = {
    "deep_ep.dispatch": ("deepep", "dispatch"),
    "deep_ep.combine": ("deepep", "combine"),
    "deep_ep.hybrid_dispatch": ("hybridep", "dispatch"),
    "deep_ep.hybrid_combine": ("hybridep", "combine"),
}
"""Dispatcher and phase by the operator's name in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRequest:
    """One exchange.

    Attributes:
        operator: its name in the trace, one of OPERATORS.
        rank_visits: v, of the rank that sends or receives most.
        domain_visits: x, own domain counted.
        token_bytes: w.
        group: where the ranks lie.
    """

    operator: str
    rank_visits: float
    domain_visits: float
    token_bytes: float
    group: GroupShape


def exchange_costs(tables: Mapping[str, ExchangeCosts], operator: str, device: DeviceSpec) -> ExchangeCosts:
    """The constants of an operator on a device, else on its architecture, else those of devices not measured.

    Raises:
        MissingCalibration: the file has none.
    """
    dispatcher, phase = OPERATORS[operator]
    for key in (device.calibration, device.architecture, DEFAULT):
        found = tables.get(f"{dispatcher}/{key}/{phase}")
        if found is not None:
            return found
    raise MissingCalibration(
        f"exchange.{dispatcher}.{device.calibration}: not in the comm calibration; "
        f"fix: add exchange.{dispatcher}.default"
    )


def exchange_s(
    costs: ExchangeCosts,
    *,
    rank_visits: Floats,
    token_bytes: Floats,
    num_sms: Floats,
    ranks_per_node: Floats,
    num_nodes: Floats,
    network_s: Floats,
    link_bytes_per_s: float,
) -> Floats:
    """Seconds of exchanges as columns, by the formula above; `network_s` is N."""
    crosses = num_nodes > 1
    sms_s = rank_visits * (costs.visit_s + token_bytes / costs.sm_bytes_per_s) / num_sms
    inside = (ranks_per_node - 1) / ranks_per_node * rank_visits * token_bytes
    link_s = inside / (link_bytes_per_s * costs.link_efficiency)
    stages_s = (np.maximum(sms_s, link_s) ** _STAGES_NORM + network_s**_STAGES_NORM) ** (1.0 / _STAGES_NORM)
    latency_s = costs.launch_s + token_bytes * costs.byte_s + np.where(crosses, num_nodes * costs.node_s, 0.0)
    return np.asarray(latency_s + stages_s)


def exchange_time_s(request: ExchangeRequest, costs: ExchangeCosts, links: ClusterLinks) -> float:
    """Seconds of one exchange alone; 0 for one rank.

    Raises:
        PlacementError: the group spans nodes that have no network card.
    """
    group = request.group
    if group.num_ranks < 2:
        return 0.0
    network_s = 0.0
    if group.num_nodes > 1:
        leaving = (1.0 - 1.0 / group.num_nodes) * request.domain_visits * request.token_bytes
        spread = group_arrays(links, group.num_ranks, group.ranks_per_node, group.groups_per_node, group.node_stride)
        share = network_share(group, links) * float(spine_share(spread, links, "pairs")[0]) / group.ranks_per_node
        network_s = leaving / (share * costs.network_efficiency)
    columns = (
        np.array([float(value)])
        for value in (
            request.rank_visits, request.token_bytes, costs.num_sms, group.ranks_per_node, group.num_nodes, network_s,
        )
    )  # fmt: skip
    visits, width, sms, per_node, nodes, network = columns
    found = exchange_s(
        costs,
        rank_visits=visits,
        token_bytes=width,
        num_sms=sms,
        ranks_per_node=per_node,
        num_nodes=nodes,
        network_s=network,
        link_bytes_per_s=links.scale_up_bytes_per_s,
    )
    return float(found[0])
