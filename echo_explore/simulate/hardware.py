"""What-if on hardware: the candidate on a cluster with other figures, or with another GPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from echo_explore.specs import Candidate, ClusterSpec, load_cluster

_NODE_BANDWIDTHS = ("link_bandwidth_bytes_per_s", "nic_bandwidth_bytes_per_s", "pcie_bandwidth_bytes_per_s")
_FIGURES: dict[str, tuple[tuple[str, str], ...]] = {
    "bandwidth": tuple(("node", name) for name in _NODE_BANDWIDTHS),
    "latency": (("node", "link_latency_s"), ("fabric", "latency_s"), ("fabric", "hop_latency_s")),
    "link_bandwidth": (("node", "link_bandwidth_bytes_per_s"),),
    "nic_bandwidth": (("node", "nic_bandwidth_bytes_per_s"),),
    "pcie_bandwidth": (("node", "pcie_bandwidth_bytes_per_s"),),
    "link_latency": (("node", "link_latency_s"),),
    "fabric_latency": (("fabric", "latency_s"), ("fabric", "hop_latency_s")),
    "memory_bandwidth": (("device", "memory_bandwidth_bytes_per_s"),),
    "peak_flop": (("device", "peak_flop_per_s"),),
}
HARDWARE = tuple(_FIGURES)
"""Names of figures that a what-if may multiply."""


def on_other_hardware(candidate: Candidate, factors: Mapping[str, float], gpu: str) -> Candidate:
    """The candidate with the figures of its cluster multiplied, and with the GPU of another cluster.

    Args:
        candidate: as it is.
        factors: by name of `HARDWARE`; others are ignored.
        gpu: name or file of a cluster whose GPU is taken; empty: the candidate's own.

    Raises:
        SpecError: there is no such cluster.
    """
    cluster = other_cluster(candidate.cluster, factors, gpu)
    return candidate if cluster is candidate.cluster else replace(candidate, cluster=cluster)


def other_cluster(cluster: ClusterSpec, factors: Mapping[str, float], gpu: str) -> ClusterSpec:
    """The cluster with its figures multiplied, and with the GPU of another cluster; see `on_other_hardware`."""
    if gpu:
        cluster = cluster.model_copy(update={"device": load_cluster(gpu).device})
    for name in HARDWARE:
        if name in factors:
            cluster = _scaled(cluster, _FIGURES[name], factors[name])
    return cluster


def beside_other_gpu(candidate: Candidate, factors: Mapping[str, float], gpu: str) -> Candidate:
    """The candidate of `on_other_hardware` on the GPU of one more cluster, with the factors on figures of GPUs.

    Raises:
        SpecError: there is no such cluster.
    """
    of_gpus = {name: f for name, f in factors.items() if name in HARDWARE and _FIGURES[name][0][0] == "device"}
    return on_other_hardware(candidate, of_gpus, gpu)


def _scaled(cluster: ClusterSpec, fields: tuple[tuple[str, str], ...], factor: float) -> ClusterSpec:
    for part_name, field in fields:
        part = getattr(cluster, part_name)
        value: Any = getattr(part, field)
        scaled = {k: v * factor for k, v in value.items()} if isinstance(value, dict) else value * factor
        cluster = cluster.model_copy(update={part_name: part.model_copy(update={field: scaled})})
    return cluster
