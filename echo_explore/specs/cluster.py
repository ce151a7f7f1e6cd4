"""What a cluster is: device, node, fabric, how many nodes, price."""

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from echo_explore.core import SpecError, parse_quantity
from echo_explore.specs.base import (
    LARGEST,
    Bytes,
    BytesPerSecond,
    Hertz,
    IntTuple,
    Seconds,
    StrictModel,
    UsdPerHour,
    Watts,
)

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


CLOCK_SPREAD_FRACTION = 0.016
"""Default of `DeviceSpec.clock_spread_fraction`: SGEMM on V100 at their power limit, interquartile range over 1.349 of
84 runs of Longhorn's table (hal-uw/blox-pal, aggregated_data/sim/sgemm-longhorn-agg.csv, data of 2020). The study that
it is from reports 8 % over five clusters between the whiskers of box plots, 5.4 standard deviations: 0.015 (arXiv
2208.11035, 2022). ResNet-50 on 72 A100 PCIe of Lonestar6 has 0.020 with the noise of its runs (the same repository)."""


def _peak_table(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {k: parse_quantity(v, unit="flop_per_s", field=f"device.peak.{k}") for k, v in value.items()}


class DeviceSpec(StrictModel):
    """One GPU.

    Attributes:
        calibration: name of the device whose measured coefficients apply (its own, or the nearest measured one).
        peak_flop_per_s: dense matrix rates by precision, without sparsity.
        clock_hz: boost clock at which those rates hold.
        exponentials_per_clock: that one SM computes, which bounds softmax in attention; 16 from Volta to Blackwell
            (FlashAttention-4, arXiv 2603.05451 (2026), section 3, for Hopper and Blackwell; CUDA C++ Programming Guide
            12.8 (2025), table of arithmetic throughput).
        memory_bytes: capacity as nvidia-smi shows it (usable bytes before the CUDA context).
        clock_spread_fraction: standard deviation, over the GPUs of a fleet, of the clock that they hold under load,
            over its mean; 0: all are equal.
    """

    name: str
    calibration: str
    architecture: Literal["volta", "ampere", "hopper", "blackwell", "ada", "cdna3", "cdna4"]
    num_sms: int = Field(ge=1, le=LARGEST)
    clock_hz: Hertz = Field(alias="clock")
    memory_bytes: Bytes = Field(alias="memory")
    memory_bandwidth_bytes_per_s: BytesPerSecond = Field(alias="memory_bandwidth")
    l2_cache_bytes: Bytes = Field(alias="l2_cache")
    power_w: Watts = Field(alias="power")
    exponentials_per_clock: int = Field(default=16, ge=1, le=LARGEST)
    clock_spread_fraction: float = Field(default=CLOCK_SPREAD_FRACTION, ge=0.0, le=0.2)
    peak_flop_per_s: Annotated[dict[str, float], BeforeValidator(_peak_table)] = Field(alias="peak")

    @model_validator(mode="after")
    def _positive(self) -> Self:
        known = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
        for precision, rate in self.peak_flop_per_s.items():
            if precision not in known:
                raise SpecError(
                    f"device.peak.{precision}", rate, "is not a precision", f"use one of {', '.join(known)}"
                )
            if rate <= 0:
                raise SpecError(
                    f"device.peak.{precision}", rate, "must be positive", "leave the line out if unsupported"
                )
        for field in ("clock_hz", "memory_bytes", "memory_bandwidth_bytes_per_s", "l2_cache_bytes", "power_w"):
            if getattr(self, field) <= 0:
                raise SpecError(f"device.{field}", getattr(self, field), "must be positive", "correct the value")
        return self


class NodeSpec(StrictModel):
    """One host and the scale-up links between its GPUs; bandwidths are per GPU and direction.

    Attributes:
        num_gpus: GPUs in one host.
        scale_up_gpus: GPUs that the scale-up links join (72 in an NVL72 rack); default num_gpus.
        link: kind of scale-up link.
        link_bandwidth_bytes_per_s: into the scale-up switch (or over all direct links), one direction.
        link_latency_s: one hop between two GPUs of the domain, as NCCL sees it.
        in_network_reduction: the scale-up switch can reduce (NVLS).
        num_nics: network cards used for training traffic.
        nic_bandwidth_bytes_per_s: of one card, one direction.
        pcie_bandwidth_bytes_per_s: of one GPU to its host or card, one direction; also of a PCIe switch's uplink.
        host_bandwidth_bytes_per_s: of one GPU to the memory of its host, one direction; 0: that of PCIe.
        host_operator_factor: time of an operator of PyTorch on this host, dispatch and launch, over that on the x86-64
            hosts of 2023 that stack profiles were measured on.
        host_module_factor: the same of a module of Transformer Engine, most of it Python.
        gpus_per_pcie_switch: GPUs that share a PCIe switch and its uplink; 0: as many as there are GPUs to a card.
        nic_place: cards lie under the GPUs' PCIe switches, or at the root complex, behind the uplinks.
    """

    num_gpus: int = Field(alias="gpus", ge=1, le=LARGEST)
    scale_up_gpus: int = Field(default=0, ge=0)
    link: Literal["nvlink", "nvswitch", "infinity-fabric", "pcie"]
    link_bandwidth_bytes_per_s: BytesPerSecond = Field(alias="link_bandwidth")
    link_latency_s: Seconds = Field(alias="link_latency")
    in_network_reduction: bool = False
    num_nics: int = Field(alias="nics", ge=0)
    nic_bandwidth_bytes_per_s: BytesPerSecond = Field(alias="nic_bandwidth")
    pcie_bandwidth_bytes_per_s: BytesPerSecond = Field(alias="pcie_bandwidth")
    host_bandwidth_bytes_per_s: BytesPerSecond = Field(default=0.0, alias="host_bandwidth")
    host_operator_factor: float = Field(default=1.0, gt=0, le=LARGEST)
    host_module_factor: float = Field(default=1.0, gt=0, le=LARGEST)
    gpus_per_pcie_switch: int = Field(default=0, ge=0)
    nic_place: Literal["switch", "root"] = "switch"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field in ("link_bandwidth_bytes_per_s", "nic_bandwidth_bytes_per_s", "pcie_bandwidth_bytes_per_s"):
            if getattr(self, field) <= 0:
                raise SpecError(f"node.{field}", getattr(self, field), "must be positive", "correct the value")
        if self.scale_up_gpus % self.num_gpus:
            raise SpecError(
                "node.scale_up_gpus",
                self.scale_up_gpus,
                f"must be a multiple of node.gpus = {self.num_gpus}",
                "correct one of them",
            )
        if self.gpus_per_pcie_switch and self.num_gpus % self.gpus_per_pcie_switch:
            raise SpecError(
                "node.gpus_per_pcie_switch",
                self.gpus_per_pcie_switch,
                f"must divide node.gpus = {self.num_gpus}",
                "correct one of them",
            )
        if self.nic_place == "root" and not self.gpus_per_pcie_switch:
            raise SpecError(
                "node.nic_place", "root", "needs node.gpus_per_pcie_switch, whose uplinks the cards share", "give it"
            )
        return self

    @property
    def host_link_bytes_per_s(self) -> float:
        """Of one GPU to the memory of its host, one direction."""
        return self.host_bandwidth_bytes_per_s or self.pcie_bandwidth_bytes_per_s

    @property
    def domain_gpus(self) -> int:
        """GPUs in one scale-up domain."""
        return self.scale_up_gpus or self.num_gpus

    @property
    def network_bandwidth_bytes_per_s(self) -> float:
        """All cards of one host together, one direction; not more than the uplinks that lead to them."""
        cards = self.num_nics * self.nic_bandwidth_bytes_per_s
        if self.nic_place == "switch":
            return cards
        return min(cards, self.num_gpus // self.gpus_per_pcie_switch * self.pcie_bandwidth_bytes_per_s)


class FabricSpec(StrictModel):
    """The network between hosts.

    Attributes:
        latency_s: one message between two hosts, card to card, as NCCL sees it.
        oversubscription: host bandwidth over bandwidth above the leaf switches; 1 is non-blocking.
        nodes_per_leaf: hosts under one leaf switch (or rail group; a dragonfly's router; a BiGraph's pair of switches).
        hop_latency_s: each further cable between switches; 0: counted in `latency`.
        leaves_per_pod: leaf switches (or rail groups; a dragonfly's routers) in a pod under cores; 0: no cores.
        core_oversubscription: bandwidth below over bandwidth above a pod's spines.
        dims: hosts along each dimension of a torus or mesh.
        in_network_reduction: switches can reduce (SHARP) and the stack uses it.
    """

    kind: Literal["infiniband", "roce", "ethernet", "efa", "none"]
    topology: Literal[
        "fat-tree", "rail-optimised", "single-switch", "dragonfly", "torus", "mesh", "bigraph", "none"
    ] = "rail-optimised"
    latency_s: Seconds = Field(alias="latency")
    oversubscription: float = Field(default=1.0, ge=1.0)
    nodes_per_leaf: int = Field(default=32, ge=1, le=LARGEST)
    in_network_reduction: bool = False
    hop_latency_s: Seconds = Field(alias="hop_latency", default=0.0)
    leaves_per_pod: int = Field(default=0, ge=0)
    core_oversubscription: float = Field(default=1.0, ge=1.0)
    dims: IntTuple = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        grid = self.topology in ("torus", "mesh")
        if grid != bool(self.dims):
            rule = "must hold the hosts along each dimension of a torus or mesh, and of nothing else"
            raise SpecError("fabric.dims", str(list(self.dims)), rule, "write for example dims = [8, 8]")
        if any(size < 1 for size in self.dims):
            raise SpecError("fabric.dims", str(list(self.dims)), "must be 1 or more each", "correct them")
        if self.core_oversubscription > 1.0 and not self.leaves_per_pod:
            raise SpecError(
                "fabric.core_oversubscription",
                self.core_oversubscription,
                "needs cores, which join pods",
                "give leaves_per_pod, or leave it out",
            )
        return self


class PriceSpec(StrictModel):
    """What an hour of one GPU costs."""

    gpu_hour_usd: UsdPerHour = Field(alias="gpu_hour")


class ClusterSpec(StrictModel):
    """A cluster of equal hosts; a job takes a part of it."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str
    description: str = ""
    max_nodes: int = Field(ge=1, le=LARGEST)
    device: DeviceSpec
    node: NodeSpec
    fabric: FabricSpec
    price: PriceSpec | None = None

    @property
    def max_gpus(self) -> int:
        """GPUs in the whole cluster: not more than the hosts of a torus or mesh."""
        hosts = min(self.max_nodes, math.prod(self.fabric.dims)) if self.fabric.dims else self.max_nodes
        return hosts * self.node.num_gpus
