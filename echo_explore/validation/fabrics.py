"""The fabrics that measured tables of collectives name, as figures of their links.

A row's `gpu` and `fabric` text pick one; a fabric that is not listed is taken as the first one of its GPU. Figures come
from cluster files where one describes the machine, else from the source on the line.
"""

from dataclasses import dataclass, replace
from functools import cache

from echo_explore.comm.coefficients import CommCoefficients
from echo_explore.comm.paths import ClusterLinks, cluster_links
from echo_explore.core import MissingCalibration
from echo_explore.specs import load_cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFabric:
    """Links of a measured machine.

    Attributes:
        gpu, fabric: how a table names it; `fabric` is a part of the text.
        cluster: the cluster file nearest to it.
        scale_up, network: keys of the coefficients.
        link_bytes_per_s: of a GPU into its domain, where it differs from the file's.
        domain_gpus: that the scale-up links join, where it differs.
        host_network_bytes_per_s, gpu_network_bytes_per_s: out of a host and of one GPU, where they differ.
        switch_reduction: the scale-up switch reduces, where it differs.
    """

    gpu: str
    fabric: str
    cluster: str
    scale_up: str
    network: str
    link_bytes_per_s: float | None = None
    domain_gpus: int | None = None
    host_network_bytes_per_s: float | None = None
    gpu_network_bytes_per_s: float | None = None
    switch_reduction: bool | None = None


_A100, _H100 = "A100-SXM4-80GB", "H100-SXM5-80GB"
_A100_KEY, _H100_KEY = "nvswitch-a100-sxm4-80gb", "nvswitch-h100-sxm5-80gb"
_BRIDGE = "pairwise NVLink bridge"

FABRICS: tuple[MeasuredFabric, ...] = (
    MeasuredFabric(
        gpu=_A100, fabric="NVSwitch NVLink3", cluster="a100-80gb-hdr", scale_up=_A100_KEY, network="infiniband-ampere"
    ),
    MeasuredFabric(gpu=_A100, fabric="p4de", cluster="a100-p4de-efa", scale_up=_A100_KEY, network="efa-ampere"),
    MeasuredFabric(
        # vidur's two-node rows run over a network that is not named: 9 GB/s one way for one pair of GPUs, 18 GB/s of
        # bus bandwidth for two hosts; taken as two cards of 100 Gbit/s (judged, 2026-11).
        gpu=_A100, fabric="NVSwitch", cluster="a100-80gb-hdr", scale_up="kineto-a100", network="kineto-a100",
        host_network_bytes_per_s=25e9, gpu_network_bytes_per_s=12.5e9,
    ),
    MeasuredFabric(
        # NVLink bridges of 600 GB/s over both directions [NVIDIA A100 datasheet 1758950-r4, 2021]; other pairs by PCIe;
        # the network between hosts is not named: 2.7 GB/s, taken as 25 Gbit/s (judged, 2026-11).
        gpu=_A100, fabric=_BRIDGE, cluster="a100-80gb-hdr", scale_up="kineto-a100-bridge", network="kineto-a100-bridge",
        domain_gpus=4, host_network_bytes_per_s=3.125e9, gpu_network_bytes_per_s=3.125e9,
    ),
    MeasuredFabric(
        gpu="A100-SXM4-40GB", fabric="NDv4", cluster="a100-40gb-hdr", scale_up="nvswitch-a100-sxm4-40gb",
        network="infiniband-ampere",
    ),
    MeasuredFabric(
        gpu="A100-SXM4", fabric="NVSwitch", cluster="a100-80gb-hdr", scale_up="lut-a100", network="infiniband-ampere"
    ),
    MeasuredFabric(
        gpu=_H100, fabric="NVSwitch NVLink4", cluster="h100-ndr", scale_up=_H100_KEY, network="infiniband-hopper"
    ),
    MeasuredFabric(gpu=_H100, fabric="EFA (p5)", cluster="h100-p5-efa", scale_up=_H100_KEY, network="efa-hopper"),
    MeasuredFabric(
        gpu=_H100, fabric="EFA (p5, k8s)", cluster="h100-p5-efa", scale_up=_H100_KEY, network="efa-hopper-k8s"
    ),
    MeasuredFabric(
        # Four GPUs a host; 41 GB/s of bus bandwidth need two cards of 200 Gbit/s at least (judged, 2026-11).
        gpu=_H100, fabric="Slingshot", cluster="h100-ndr", scale_up=_H100_KEY, network="slingshot",
        domain_gpus=4, host_network_bytes_per_s=50e9, gpu_network_bytes_per_s=25e9,
    ),
    MeasuredFabric(
        gpu=_H100, fabric="NVSwitch", cluster="h100-ndr", scale_up="kineto-h100", network="kineto-h100"
    ),
    MeasuredFabric(
        # NVLink bridges of 600 GB/s over both directions [NVIDIA H100 PCIe product brief PB-11133, 2022].
        gpu=_H100, fabric=_BRIDGE, cluster="h100-ndr", scale_up="kineto-h100-bridge", network="kineto-h100",
        link_bytes_per_s=300e9, switch_reduction=False,
    ),
    MeasuredFabric(
        gpu="H200-SXM", fabric="NVSwitch", cluster="h200-ndr", scale_up="nvswitch-h200-sxm-141gb",
        network="infiniband-hopper",
    ),
    MeasuredFabric(
        gpu="B200-SXM", fabric="NVSwitch", cluster="b200-ndr", scale_up="nvswitch-b200-sxm-180gb", network="infiniband"
    ),
    MeasuredFabric(
        gpu="GB200", fabric="NVL72", cluster="gb200-nvl72", scale_up="nvswitch-gb200", network="infiniband"
    ),
    MeasuredFabric(
        gpu="GB300", fabric="NVL72", cluster="gb300-nvl72", scale_up="nvswitch-gb300", network="infiniband"
    ),
    MeasuredFabric(
        gpu="V100-SXM2", fabric="hybrid cube mesh", cluster="v100-25gbe", scale_up="nvlink-v100-sxm2-32gb",
        network="default",
    ),
    MeasuredFabric(
        # NVLink bridges of 112.5 GB/s over both directions [NVIDIA A40 datasheet, 2020]; network not named, 3 GB/s.
        gpu="A40", fabric=_BRIDGE, cluster="a100-80gb-hdr", scale_up="kineto-a40-bridge", network="kineto-a100-bridge",
        link_bytes_per_s=56.25e9, domain_gpus=4, host_network_bytes_per_s=3.125e9, gpu_network_bytes_per_s=3.125e9,
    ),
    MeasuredFabric(
        # PCIe 5.0 x16: 32 GT/s x 16 lanes x 128/130 / 8 [PCI-SIG base specification 5.0, 2019].
        gpu="RTX-PRO-6000-Server", fabric="PCIe5", cluster="h100-ndr", scale_up="pcie-rtx-pro-6000", network="default",
        link_bytes_per_s=63e9, switch_reduction=False,
    ),
    MeasuredFabric(
        # PCIe 5.0 x8 [Intel Arc Pro B60 product page, 2025].
        gpu="Intel-Arc-B60", fabric="PCIe5", cluster="h100-ndr", scale_up="pcie-arc-b60", network="default",
        link_bytes_per_s=31.5e9, switch_reduction=False,
    ),
)  # fmt: skip


@cache
def fabric_of(gpu: str, fabric: str) -> MeasuredFabric | None:
    """The longest listed text that the row's fabric holds, else the first fabric of the GPU; None for other GPUs."""
    own = [known for known in FABRICS if known.gpu == gpu]
    named = sorted((known for known in own if known.fabric in fabric), key=lambda known: len(known.fabric))
    special = [known for known in named if known.fabric not in ("NVSwitch", "NVSwitch NVLink3", "NVSwitch NVLink4")]
    if special:
        return special[-1]
    return named[-1] if named else own[0] if own else None


def links_of_fabric(fabric: MeasuredFabric, coefficients: CommCoefficients) -> ClusterLinks:
    """The links of a measured machine with its coefficients.

    Raises:
        MissingCalibration: the calibration lacks one of the two tables.
    """
    for name, tables in (("scale_up", coefficients.scale_up), ("network", coefficients.network)):
        key = fabric.scale_up if name == "scale_up" else fabric.network
        if key not in tables:
            raise MissingCalibration(f"{name}.{key}: no such table in the comm calibration; fix: fit it again")
    links = cluster_links(
        load_cluster(fabric.cluster),
        coefficients,
        scale_up=coefficients.scale_up[fabric.scale_up],
        network=coefficients.network[fabric.network],
    )
    return replace(
        links,
        scale_up_bytes_per_s=fabric.link_bytes_per_s or links.scale_up_bytes_per_s,
        has_switch_reduction=links.has_switch_reduction if fabric.switch_reduction is None else fabric.switch_reduction,
        gpu_network_bytes_per_s=fabric.gpu_network_bytes_per_s or links.gpu_network_bytes_per_s,
        network_bytes_per_s=fabric.host_network_bytes_per_s or links.network_bytes_per_s,
        domain_gpus=fabric.domain_gpus or links.domain_gpus,
        domain_hosts=1.0 if fabric.domain_gpus else links.domain_hosts,
        host_gpus=fabric.domain_gpus or links.host_gpus,
    )
