"""Tables of fused exchanges for the calibration of collectives: DeepEP from measured rows, HybridEP as published.

Rows are those of kernels/moe_a2a.csv.gz with DeepEP's normal kernels and 12 SMs or more: with fewer, and on eight hosts
(where one cluster's network gives half of what DeepEP's own table of eight hosts has), other things limit.
"""

import csv
import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from echo_explore.calibration.comm_toml import exchange_table
from echo_explore.calibration.exchange_fit import START, ExchangeSamples, exchange_samples, fit_exchange, hybrid_samples
from echo_explore.comm.coefficients import ExchangeCosts
from echo_explore.specs import load_cluster

Row = Mapping[str, str]

CLUSTERS = {
    "H100-SXM5-80GB": "h100-ndr", "H200-SXM": "h200-ndr", "B200-SXM": "b200-ndr", "B300-SXM": "b300-xdr",
    "GB200": "gb200-nvl72", "GB300": "gb300-nvl72",
}  # fmt: skip
"""The cluster file of each measured GPU."""
SAME_AS = {"hopper": "H100-SXM5-80GB", "blackwell": "B200-SXM", "default": "H100-SXM5-80GB"}
"""Whose constants others take: those of the architecture; `default` with twice the spread (judged)."""
PHASES = ("dispatch", "combine")
LEAST_SMS = 12
_MOST_NODES = 4
HYBRID_SIGMA = 0.2
"""Of constants from one publication's rounded bandwidths, without small messages (judged)."""


def read_exchanges(path: Path) -> list[Row]:
    """The rows of the fit."""
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["kernel"] == "deepep_normal"
            and float(row["sms"]) >= LEAST_SMS
            and int(row["nodes"]) <= _MOST_NODES
            and row["gpu"] in CLUSTERS
        ]


def samples_of(rows: Sequence[Row], gpu: str, phase: str) -> ExchangeSamples:
    """Those of one phase on one GPU as columns."""
    node = load_cluster(CLUSTERS[gpu]).node
    return exchange_samples(
        [row for row in rows if row["gpu"] == gpu and row["phase"] == phase],
        link_bytes_per_s=node.link_bandwidth_bytes_per_s,
        gpu_network_bytes_per_s=node.nic_bandwidth_bytes_per_s,
    )


def left_out_errors(rows: Sequence[Row], seed: int, num_parts: int = 3) -> dict[tuple[str, str], tuple[float, float]]:
    """Median and mean absolute errors by GPU and phase, each workload predicted by a fit to the other two parts.

    A workload is (hidden size, experts, experts a token, hosts) on all SMs and numbers of tokens.
    """

    def part(row: Row) -> int:
        name = "|".join(row[key] for key in ("hidden", "experts", "topk", "nodes"))
        return zlib.crc32(f"{seed}|{name}".encode()) % num_parts

    found = {}
    for gpu in CLUSTERS:
        for phase in PHASES:
            errors = []
            for turn in range(num_parts):
                costs = fit_exchange(samples_of([row for row in rows if part(row) != turn], gpu, phase))
                judged = samples_of([row for row in rows if part(row) == turn], gpu, phase)
                errors.append(np.abs(judged.modelled_s(costs) / judged.time_s - 1))
            joined = np.concatenate(errors)
            found[gpu, phase] = (float(np.median(joined)), float(np.mean(joined)))
    return found


def exchange_tables(path: Path, date: str) -> str:
    """TOML tables of DeepEP and HybridEP."""
    rows = read_exchanges(path)
    text = ""
    deepep: dict[str, dict[str, ExchangeCosts]] = {}
    for gpu, cluster in CLUSTERS.items():
        deepep[gpu] = {phase: fit_exchange(samples_of(rows, gpu, phase)) for phase in PHASES}
        count = sum(row["gpu"] == gpu for row in rows)
        source = f"DeepEP 1.2, normal kernels: aiconfigurator-core 0.12.0 (Apache-2.0), SGLang; {count} rows, {date}"
        text += _table(f"deepep.{load_cluster(cluster).device.calibration}", deepep[gpu], source)
    for key, gpu in SAME_AS.items():
        costs = deepep[gpu]
        if key == "default":
            costs = {phase: replace(c, sigma_log=2 * c.sigma_log) for phase, c in costs.items()}
        text += _table(f"deepep.{key}", costs, f"Other devices: as {gpu} (judged)")
    for key in ("hopper", "blackwell", "default"):
        architecture = "hopper" if key == "default" else key
        hybrid = {phase: hybrid_costs(architecture, phase) for phase in PHASES}
        if key == "default":
            hybrid = {phase: replace(c, sigma_log=2 * c.sigma_log) for phase, c in hybrid.items()}
        text += _table(f"hybridep.{key}", hybrid, "DeepEP docs/README_Hybrid-EP.md (2025), kernel only, bf16")
    return text


def hybrid_costs(architecture: str, phase: str) -> ExchangeCosts:
    """HybridEP's constants on an architecture.

    16 SMs: Megatron-core 0.16 moe_hybridep_num_sms (2026). Its launch is judged as one kernel with flags, 10 us;
    without a published row inside a host of Hopper its share of the link is that of Blackwell.
    """
    start = replace(START, launch_s=10e-6, byte_s=1e-12, node_s=10e-6, num_sms=16)
    free = ("visit_s", "sm_bytes_per_s", "link_efficiency")
    blackwell = fit_exchange(hybrid_samples("blackwell", phase), start, free=free)
    if architecture == "blackwell":
        return replace(blackwell, sigma_log=HYBRID_SIGMA)
    start = replace(start, link_efficiency=blackwell.link_efficiency)
    free = ("visit_s", "sm_bytes_per_s", "network_efficiency")
    return replace(fit_exchange(hybrid_samples("hopper", phase), start, free=free), sigma_log=HYBRID_SIGMA)


def _table(name: str, costs: Mapping[str, ExchangeCosts], source: str) -> str:
    return exchange_table(name, costs["dispatch"], costs["combine"], source)
