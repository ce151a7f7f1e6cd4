"""Hosts: GPUs, scale-up links, PCIe trees with the cards' place in them."""

from dataclasses import dataclass
from typing import Literal

from echo_explore.core import SpecError
from echo_explore.topology.network import LinkKind, NetworkBuilder, VertexKind

_CUBE_MESH = (
    *((0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2), (2, 6, 1), (3, 7, 1)),
    *((4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)),
)
"""(GPU, GPU, links) of the hybrid cube mesh: DGX-1 with V100 system architecture WP-08437 (2017), figure 4."""
_CUBE_MESH_GPUS, _CUBE_MESH_LINKS = 8, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShape:
    """A host; bandwidths are of one direction.

    Attributes:
        link: `nvswitch` joins all GPUs of a domain by a switch; `infinity-fabric` each two by a link of their own;
            `nvlink` likewise, but eight GPUs in the hybrid cube mesh of DGX-1; `pcie` has no such links.
        link_bandwidth_bytes_per_s: of all scale-up links of a GPU together.
        link_latency_s: between two GPUs of a domain.
        domain_hosts: hosts that one scale-up switch joins (18 in an NVL72 rack).
        gpus_per_pcie_switch: GPUs that share a PCIe switch and its uplink to the root complex; 0: as many as there are
            GPUs to a card.
        nic_place: cards lie under the GPUs' PCIe switches, or at the root complex, behind the uplinks.
    """

    num_gpus: int
    link: Literal["nvlink", "nvswitch", "infinity-fabric", "pcie"]
    link_bandwidth_bytes_per_s: float
    link_latency_s: float
    pcie_bandwidth_bytes_per_s: float
    num_nics: int
    nic_bandwidth_bytes_per_s: float
    domain_hosts: int = 1
    gpus_per_pcie_switch: int = 0
    nic_place: Literal["switch", "root"] = "switch"

    def __post_init__(self) -> None:
        if self.domain_hosts > 1 and self.link != "nvswitch":
            raise SpecError("link", self.link, "joins the GPUs of one host only", 'use "nvswitch" or one host a domain')
        if self.gpus_per_pcie_switch and self.num_gpus % self.gpus_per_pcie_switch:
            raise SpecError(
                "gpus_per_pcie_switch",
                self.gpus_per_pcie_switch,
                f"must divide {self.num_gpus} GPUs",
                "correct one of them",
            )

    @property
    def gpus_per_switch(self) -> int:
        """GPUs under one PCIe switch."""
        return self.gpus_per_pcie_switch or max(1, self.num_gpus // max(1, self.num_nics))

    @property
    def num_pcie_switches(self) -> int:
        """PCIe switches of a host."""
        return -(-self.num_gpus // self.gpus_per_switch)


def cards_of_gpu(num_gpus: int, num_nics: int, local: int) -> range:
    """Cards of its host that lie next to a GPU: an equal share, at least one; none where the host has none."""
    if num_nics >= num_gpus:
        each = num_nics // num_gpus
        return range(local * each, (local + 1) * each)
    first = local * num_nics // num_gpus
    return range(first, first + 1) if num_nics else range(0)


def add_host(builder: NetworkBuilder, shape: HostShape, host: int, *, ordinals: list[int]) -> list[int]:
    """Add a host and return the vertices of its cards; `ordinals` are its devices' (see `Network.ordinal`)."""
    first = host * shape.num_gpus
    domain = host // shape.domain_hosts
    gpus = [
        builder.vertex(
            f"gpu/{first + i}",
            VertexKind.DEVICE,
            host=host,
            domain=domain,
            rail=next(iter(cards_of_gpu(shape.num_gpus, shape.num_nics, i)), -1),
            ordinal=ordinals[i],
        )
        for i in range(shape.num_gpus)
    ]
    _add_scale_up(builder, shape, gpus, domain)
    root = builder.vertex(f"root/{host}", VertexKind.PCIE_SWITCH, host=host)
    switches = []
    for i in range(shape.num_pcie_switches):
        switch = builder.vertex(f"pcie/{host}/{i}", VertexKind.PCIE_SWITCH, host=host)
        port = builder.vertex(f"root-port/{host}/{i}", VertexKind.PCIE_SWITCH, host=host)
        builder.link(switch, port, LinkKind.PCIE, shape.pcie_bandwidth_bytes_per_s)
        builder.link(port, root, LinkKind.PCIE, shape.pcie_bandwidth_bytes_per_s)
        switches.append(switch)
    for i, gpu in enumerate(gpus):
        builder.link(gpu, switches[i // shape.gpus_per_switch], LinkKind.PCIE, shape.pcie_bandwidth_bytes_per_s)
    cards = []
    for i in range(shape.num_nics):
        card = builder.vertex(f"nic/{host}/{i}", VertexKind.CARD, host=host, rail=i)
        place = root if shape.nic_place == "root" else switches[i * len(switches) // shape.num_nics]
        builder.link(card, place, LinkKind.PCIE, shape.pcie_bandwidth_bytes_per_s)
        cards.append(card)
    return cards


def _add_scale_up(builder: NetworkBuilder, shape: HostShape, gpus: list[int], domain: int) -> None:
    bandwidth, latency = shape.link_bandwidth_bytes_per_s, shape.link_latency_s
    if shape.link == "pcie" or shape.num_gpus * shape.domain_hosts == 1:
        return
    if shape.link == "nvswitch":
        switch = builder.vertex_or_known(f"scale-up/{domain}", VertexKind.SCALE_UP_SWITCH, domain=domain)
        for gpu in gpus:
            builder.link(gpu, switch, LinkKind.SCALE_UP, bandwidth, latency_s=latency / 2)
        return
    if shape.link == "nvlink" and shape.num_gpus == _CUBE_MESH_GPUS:
        for a, b, links in _CUBE_MESH:
            each = bandwidth * links / _CUBE_MESH_LINKS
            builder.link(gpus[a], gpus[b], LinkKind.SCALE_UP, each, latency_s=latency)
        return
    for i, gpu in enumerate(gpus):
        for other in gpus[i + 1 :]:
            builder.link(gpu, other, LinkKind.SCALE_UP, bandwidth / (len(gpus) - 1), latency_s=latency)
