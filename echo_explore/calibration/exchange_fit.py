"""Fits of fused exchanges: DeepEP's normal kernels to measured times, HybridEP's to published bandwidths.

Rows of kernels/moe_a2a.csv.gz: tokens of a rank, uniform routing, fp8 with a float32 scale for each 128 elements in the
dispatch, bf16 in the combine [DeepEP 1.2 tests/test_intranode.py, 2025]. The fit is a least square of logs with a soft
absolute loss, as of collectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from echo_explore.comm.coefficients import ExchangeCosts
from echo_explore.comm.exchange import exchange_s
from echo_explore.comm.paths import Floats
from echo_explore.specs.routing import Routing

FP8_BYTES = 1.0 + 4.0 / 128.0
BF16_BYTES = 2.0
BOUNDS = {
    "launch_s": (5e-6, 100e-6), "byte_s": (1e-12, 5e-9), "visit_s": (1e-9, 2e-6), "sm_bytes_per_s": (5e9, 117e9),
    "link_efficiency": (0.3, 0.92), "node_s": (1e-6, 50e-6), "network_efficiency": (0.5, 1.0),
}  # fmt: skip
"""Launch as of collectives; a token's way through shared memory at 0.2 GB/s at least; an SM's time for a token; bytes a
second of an SM, which loads 64 a clock at most [NVIDIA H100 whitepaper v1.04, 2023, at 1.83 GHz]; no curve of a
collective passes 0.92 of a link; a host's handshake; half of the cards at least (judged, 2026-12)."""
START = ExchangeCosts(
    launch_s=25e-6, byte_s=0.5e-9, visit_s=150e-9, sm_bytes_per_s=30e9, link_efficiency=0.66, node_s=16e-6,
    network_efficiency=0.88, num_sms=20, sigma_log=0.2,
)  # fmt: skip
"""Start of each fit, and what is held where the rows do not show it: 0.66 of the link with 48 SMs on B200, 646 GB/s of
bf16 of which 7/8 pass the link, and 0.88 of the cards on 8 hosts of H100 [DeepEP docs/README_Hybrid-EP.md, 2025]. 20
SMs: Megatron-core 0.16 moe_deepep_num_sms (2026)."""
_HELD = 0.02
"""Weight of the squared logs of the parameters over the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSamples:
    """Measured exchanges of one phase on one device as columns.

    Attributes:
        rank_visits, domain_visits, token_bytes: see `ExchangeRequest`.
        gpu_network_bytes_per_s: cards next to a GPU.
        time_s: measured.
    """

    rank_visits: Floats
    domain_visits: Floats
    token_bytes: Floats
    num_sms: Floats
    ranks_per_node: Floats
    num_nodes: Floats
    time_s: Floats
    link_bytes_per_s: float
    gpu_network_bytes_per_s: float

    def modelled_s(self, costs: ExchangeCosts) -> Floats:
        """Seconds of each."""
        leaving = (1.0 - 1.0 / self.num_nodes) * self.domain_visits * self.token_bytes
        return exchange_s(
            costs,
            rank_visits=self.rank_visits,
            token_bytes=self.token_bytes,
            num_sms=self.num_sms,
            ranks_per_node=self.ranks_per_node,
            num_nodes=self.num_nodes,
            network_s=leaving / (self.gpu_network_bytes_per_s * costs.network_efficiency),
            link_bytes_per_s=self.link_bytes_per_s,
        )


def exchange_samples(
    rows: Sequence[Mapping[str, str]], *, link_bytes_per_s: float, gpu_network_bytes_per_s: float
) -> ExchangeSamples:
    """Rows of one phase on one device as columns."""

    def column(name: str) -> Floats:
        return np.array([float(row[name]) for row in rows])

    tokens, ranks, nodes = column("tokens"), column("ep"), column("nodes")
    routings = [Routing(num_experts=int(r["experts"]), experts_per_token=int(r["topk"])) for r in rows]
    fp8 = np.array([row["phase"] == "dispatch" for row in rows])
    return ExchangeSamples(
        rank_visits=tokens * np.array([sum(o.visits(int(n))) for o, n in zip(routings, ranks, strict=True)]),
        domain_visits=tokens * np.array([sum(o.visits(int(n))) for o, n in zip(routings, nodes, strict=True)]),
        token_bytes=column("hidden") * np.where(fp8, FP8_BYTES, BF16_BYTES),
        num_sms=column("sms"),
        ranks_per_node=ranks / nodes,
        num_nodes=nodes,
        time_s=column("latency_us") * 1e-6,
        link_bytes_per_s=link_bytes_per_s,
        gpu_network_bytes_per_s=gpu_network_bytes_per_s,
    )


def fit_exchange(samples: ExchangeSamples, start: ExchangeCosts = START, free: Sequence[str] = ()) -> ExchangeCosts:
    """The constants of a phase on a device, its spread with them.

    Args:
        samples: measured.
        start: near which the free constants are held, and which the others keep.
        free: names of constants; none: all but `link_efficiency`, and those of the network where samples cross it.
    """
    from scipy.optimize import least_squares

    if not free:
        crosses = bool((samples.num_nodes > 1).any())
        free = ("launch_s", "byte_s", "visit_s", "sm_bytes_per_s", *(("node_s", "network_efficiency") * crosses))
    origin = np.log([getattr(start, name) for name in free])
    least, most = (np.log([BOUNDS[name][i] for name in free]) for i in (0, 1))

    def costs_at(x: Floats) -> ExchangeCosts:
        return replace(start, **dict(zip(free, np.exp(x).tolist(), strict=True)))

    def residuals(x: Floats) -> Floats:
        held = _HELD * np.sqrt(len(samples.time_s)) * (x - origin)
        return np.concatenate([np.log(samples.modelled_s(costs_at(x)) / samples.time_s), held])

    fit = least_squares(residuals, origin, bounds=(least, most), loss="soft_l1", f_scale=0.05, max_nfev=200)
    costs = costs_at(fit.x)
    spread = float(np.sqrt(np.mean(np.log(samples.modelled_s(costs) / samples.time_s) ** 2)))
    return replace(costs, sigma_log=round(spread, 3))


# Ranks, ranks of a domain, SMs, GB/s of a bf16 dispatch, of a combine: kernel time alone, 4,096 tokens of 7,168
# elements, 8 experts a rank and 8 a token, uniform, own ranks and domains counted
# [DeepEP docs/README_Hybrid-EP.md, 2025].
_HYBRID = {
    "blackwell": (
        (8, 8, 16, 734.95, 673.84), (8, 8, 16, 750.15, 684.27), (8, 8, 32, 764.03, 737.13),
        (16, 16, 16, 661.93, 600.75), (16, 16, 32, 706.95, 666.26), (24, 24, 16, 637.80, 565.53),
        (24, 24, 32, 665.97, 639.80), (32, 32, 16, 629.79, 547.25), (32, 32, 32, 642.23, 605.15),
        (36, 36, 16, 612.85, 543.27), (36, 36, 32, 632.31, 596.99),
    ),
    "hopper": (
        (16, 8, 8, 76.80, 68.00), (16, 8, 16, 71.71, 62.95), (32, 8, 8, 54.50, 56.40), (32, 8, 16, 57.69, 57.46),
        (64, 8, 8, 50.55, 51.03), (64, 8, 16, 49.97, 49.77),
    ),
}  # fmt: skip
_HYBRID_TOKENS, _HYBRID_HIDDEN, _HYBRID_EXPERTS, _HYBRID_TOPK = 4096, 7168, 8, 8
_HYBRID_LINKS = {"blackwell": (900e9, 50e9), "hopper": (450e9, 50e9)}
"""NVLink of a GPU [NVIDIA GB200 NVL72 and H100 datasheets, 2024 and 2023] and one card of 400 Gbit/s."""


def hybrid_samples(architecture: str, phase: str) -> ExchangeSamples:
    """HybridEP's published bandwidths on an architecture as times: of cards where hosts are crossed, else of links."""
    rows = np.array(_HYBRID[architecture], dtype=float)
    ranks, per_node, sms = rows.T[:3]
    nodes = ranks / per_node

    def visits(units: Floats) -> Floats:
        routings = [Routing(num_experts=int(n) * _HYBRID_EXPERTS, experts_per_token=_HYBRID_TOPK) for n in ranks]
        return _HYBRID_TOKENS * np.array([sum(r.visits(int(u))) for r, u in zip(routings, units, strict=True)])

    rank_visits, domain_visits = visits(ranks), visits(nodes)
    counted = np.where(nodes > 1, domain_visits, rank_visits)
    width = _HYBRID_HIDDEN * BF16_BYTES
    link, card = _HYBRID_LINKS[architecture]
    return ExchangeSamples(
        rank_visits=rank_visits,
        domain_visits=domain_visits,
        token_bytes=np.full(len(ranks), width),
        num_sms=sms,
        ranks_per_node=per_node,
        num_nodes=nodes,
        time_s=counted * width / (rows.T[3 + (phase == "combine")] * 1e9),
        link_bytes_per_s=link,
        gpu_network_bytes_per_s=card,
    )
