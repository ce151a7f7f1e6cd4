"""Which cluster a measured run ran on: one table by GPU and fabric, with what a run's own words change.

A run names its GPU and describes its fabric in free text. `CLUSTER_RULES` holds, first match wins, the shipped cluster
that is nearest and what to change in it; hosts of another size than the shipped one get their share of the cards.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo_explore.specs import ClusterSpec, load_cluster
from echo_explore.validation.rows import MeasuredRow

GB_PER_S = 1e9
GBIT_PER_S = 1e9 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRule:
    """A kind of run and the cluster that stands for it.

    Attributes:
        gpu: regular expression for the whole text of the GPU column.
        fabric: regular expression found anywhere in the fabric column, case ignored; empty matches all.
        cluster: name of a shipped cluster.
        device, node, network: fields of its DeviceSpec, NodeSpec and FabricSpec to replace, in SI units.
        why: where the difference comes from.
    """

    gpu: str
    fabric: str = ""
    cluster: str
    device: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


_ROCE = {"kind": "roce"}
_A100_80 = r"A100-80GB-SXM|A100-SXM"
_H100 = r"H100-80GB-SXM"

CLUSTER_RULES = (
    ClusterRule(gpu=r"V100.*", cluster="v100-25gbe", why="the only V100 cluster"),
    ClusterRule(
        gpu=_A100_80,
        fabric=r"Omni-Path",
        cluster="a100-80gb-hdr",
        node={"num_nics": 4, "nic_bandwidth_bytes_per_s": 100 * GBIT_PER_S},
        why="4 x 100 Gbit/s Omni-Path a host: Jean Zay, IDRIS (2022)",
    ),
    ClusterRule(
        gpu=_A100_80,
        fabric=r"800 Gb/s per node",
        cluster="a100-80gb-hdr",
        node={"num_nics": 4},
        why="four HDR cards a host: vTrain (MICRO 2024), config/validation",
    ),
    ClusterRule(
        gpu=_A100_80,
        fabric=r"^HDR InfiniBand",
        cluster="a100-80gb-hdr",
        node={"num_nics": 4},
        # Approximation: hosts of eight A100 have up to 8 cards (Jean Zay and vTrain 4, DGX 8); of 1, 2, 4 and 8 the
        # second most is taken, as those two have; a run with another count is off by its transfers between hosts.
        why="HDR without a count of cards (arXiv 2311.05610, 2023): four, between the one and the eight of such hosts",
    ),
    ClusterRule(
        gpu=_A100_80,
        fabric=r"RoCE",
        cluster="a100-80gb-hdr",
        network=_ROCE,
        why="1,600 Gbit/s a host, as HDR, over RoCE",
    ),
    ClusterRule(
        gpu=_A100_80, fabric=r"EFA|^400 ?Gb/s per node", cluster="a100-p4de-efa", why="400 Gbit/s a host, as p4de"
    ),
    ClusterRule(gpu=_A100_80, cluster="a100-80gb-hdr", why="8 x HDR, or one host, or nothing said: DGX A100"),
    ClusterRule(
        gpu=r"A100-40GB-SXM",
        fabric=r"RoCE",
        cluster="a100-40gb-hdr",
        network=_ROCE,
        why="1,600 Gbit/s a host, as HDR, over RoCE",
    ),
    ClusterRule(gpu=r"A100-40GB-SXM", cluster="a100-40gb-hdr", why="DGX A100"),
    ClusterRule(
        gpu=r"A800-(80GB-)?SXM",
        cluster="a100-80gb-hdr",
        node={"link_bandwidth_bytes_per_s": 200 * GB_PER_S},
        why="A100 with 400 GB/s of NVLink over both directions: NVIDIA A800 datasheet (2022)",
    ),
    ClusterRule(gpu=r"L40S.*", cluster="l40s-pcie", why="PCIe hosts, from specification"),
    ClusterRule(gpu=_H100, fabric=r"EFA", cluster="h100-p5-efa", why="AWS p5"),
    ClusterRule(
        gpu=_H100, fabric=r"RoCE", cluster="h100-ndr", network=_ROCE, why="400 Gbit/s a GPU, as NDR, over RoCE"
    ),
    ClusterRule(gpu=_H100, cluster="h100-ndr", why="NDR, or one host, or nothing said: DGX H100"),
    ClusterRule(
        gpu=r"H100-96GB-HBM2e.*",
        cluster="h100-ndr",
        device={"memory_bytes": 96 * 2.0**30, "memory_bandwidth_bytes_per_s": 2400 * GB_PER_S, "power_w": 500.0},
        why="96 GB HBM2e at 2.4 TB/s and 500 W: TorchTitan (arXiv 2410.06511, 2024), appendix B",
    ),
    ClusterRule(gpu=r"H800.*", cluster="h800-ndr", why="H800"),
    ClusterRule(
        gpu=r"H200.*",
        fabric=r"BlueField-3 200 ?Gb/s",
        cluster="h200-ndr",
        node={"nic_bandwidth_bytes_per_s": 200 * GBIT_PER_S},
        why="200 Gbit/s cards",
    ),
    ClusterRule(gpu=r"H200.*", cluster="h200-ndr", why="DGX H200"),
    ClusterRule(gpu=r"B200.*", fabric=r"RoCE", cluster="b200-ndr", network=_ROCE, why="400 Gbit/s a GPU over RoCE"),
    ClusterRule(gpu=r"B200.*", cluster="b200-ndr", why="DGX B200"),
    ClusterRule(gpu=r"B300.*", cluster="b300-xdr", why="DGX B300"),
    ClusterRule(gpu=r"GB200.*", cluster="gb200-nvl72", why="NVL72 racks"),
    ClusterRule(gpu=r"GB300.*", cluster="gb300-nvl72", why="NVL72 racks"),
    ClusterRule(gpu=r"MI300X.*", cluster="mi300x-roce", why="MI300X"),
    ClusterRule(gpu=r"MI325X.*", cluster="mi325x-roce", why="MI325X"),
    ClusterRule(gpu=r"MI355X.*", cluster="mi355x-roce", why="MI355X"),
)
"""Every GPU and fabric that measured tables name; first match wins."""


def rule_of(row: MeasuredRow) -> ClusterRule | None:
    """The first rule that the run's GPU and fabric match; None when its GPU is not in the table."""
    matches = (r for r in CLUSTER_RULES if re.fullmatch(r.gpu, row.gpu, re.I) and re.search(r.fabric, row.fabric, re.I))
    return next(matches, None)


_PER_NODE = re.compile(r"(?:(\d{1,2}) ?x ?)?(\d{1,2},\d{3}|\d{2,5}) ?Gb(?:it)?/s [^;,+]{0,40}?\bper node\b", re.I)
_KNOWN_FABRIC = re.compile(r"infiniband|\bIB\b|\b[NHX]DR\b|NVL|RoCE|RDMA|EFA", re.I)


def cards_of(row: MeasuredRow) -> dict[str, Any]:
    """Fields of a node that the fabric's words state: `4x100Gb/s per node` counts cards, `800 Gb/s per node` does not.

    Only where no rule knows the fabric by its words.
    """
    rule, found = rule_of(row), _PER_NODE.search(row.fabric)
    if rule is None or rule.fabric or found is None:
        return {}
    cards, rate = found[1], float(found[2].replace(",", "")) * GBIT_PER_S
    node = load_cluster(rule.cluster).node
    num_nics = max(1, node.num_nics * row.gpus_per_node // node.num_gpus) if cards is None else max(1, int(cards))
    stated = {"num_nics": num_nics, "nic_bandwidth_bytes_per_s": rate if cards else rate / num_nics}
    same = stated == {"num_nics": node.num_nics, "nic_bandwidth_bytes_per_s": node.nic_bandwidth_bytes_per_s}
    return {} if same else stated


def fabric_is_known(row: MeasuredRow) -> bool:
    """The fabric column says something that its cluster follows."""
    rule = rule_of(row)
    return rule is not None and bool(rule.fabric or cards_of(row) or _KNOWN_FABRIC.search(row.fabric))


def cluster_of(row: MeasuredRow) -> ClusterSpec | None:
    """The cluster that the run ran on; None when its GPU is not in the table.

    Hosts hold what the row says, with the shipped cluster's cards a GPU; max_nodes grows to what the run used.
    """
    rule = rule_of(row)
    if rule is None:
        return None
    cluster = load_cluster(rule.cluster)
    node = dict(rule.node)
    if row.gpus_per_node != cluster.node.num_gpus:
        cards = node.get("num_nics", cluster.node.num_nics)
        node |= {"num_gpus": row.gpus_per_node, "num_nics": max(1, cards * row.gpus_per_node // cluster.node.num_gpus)}
    node |= cards_of(row)
    network = dict(rule.network)
    if row.overlap.in_network_reduction:
        network["in_network_reduction"] = True
    hosts = -(-row.num_gpus // row.gpus_per_node)
    changed = [
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in ({**rule.device, **node, **network}).items()
    ]
    return cluster.model_copy(
        update={
            "name": cluster.name + (f" ({', '.join(changed)})" if changed else ""),
            "max_nodes": max(cluster.max_nodes, hosts),
            "device": cluster.device.model_copy(update=dict(rule.device)),
            "node": cluster.node.model_copy(update=node),
            "fabric": cluster.fabric.model_copy(update=network),
        }
    )
