"""A network as arrays: vertices, directed links with bandwidth and latency, and the builder that checks them.

Vertices are devices (GPUs, which end paths and never forward), network cards, and switches (scale-up, PCIe, leaf,
spine, core, torus routers, site gateways). Every link has its reverse; the two directions may differ where the builder
is told so. `graphs.py` turns a network into a networkx graph and back.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


class VertexKind(IntEnum):
    """What a vertex is. Only devices do not forward."""

    DEVICE = 0
    CARD = 1
    """A network card."""
    SCALE_UP_SWITCH = 2
    PCIE_SWITCH = 3
    """Also the root complex of a host."""
    SWITCH = 4
    """A switch or router of the network between hosts."""


class LinkKind(IntEnum):
    """What a link is; also the order in which pairs prefer them: scale-up, then PCIe, then network."""

    SCALE_UP = 0
    PCIE = 1
    NETWORK = 2
    WIDE_AREA = 3
    """Between sites."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """A connected network; built by `NetworkBuilder.build`.

    Attributes:
        vertex_names: shape (num_vertices,).
        vertex_kind: `VertexKind`, shape (num_vertices,).
        host: of each vertex, -1 for what belongs to no host.
        domain: scale-up domain of each device, else -1.
        rail: of each device and card: its place among those of its host; else -1.
        devices: vertex of each device, by device number.
        ordinal: of each device: its number for routing by destination, counted leaf switch by leaf switch.
        source, target: vertices of each directed link, shape (num_links,).
        link_kind: `LinkKind` of each link.
        bandwidth_bytes_per_s: of each link in its direction.
        latency_s: of each link.
        reverse: link in the other direction.
        offsets: links of vertex v are offsets[v]..offsets[v + 1]; links are sorted by source, then as they were added.
    """

    vertex_names: tuple[str, ...]
    vertex_kind: Ints
    host: Ints
    domain: Ints
    rail: Ints
    devices: Ints
    ordinal: Ints
    source: Ints
    target: Ints
    link_kind: Ints
    bandwidth_bytes_per_s: Floats
    latency_s: Floats
    reverse: Ints
    offsets: Ints

    @property
    def num_devices(self) -> int:
        """GPUs."""
        return len(self.devices)

    @property
    def num_vertices(self) -> int:
        """Devices, cards and switches."""
        return len(self.vertex_names)

    @property
    def num_links(self) -> int:
        """Directed links; a cable counts twice."""
        return len(self.source)

    def link_name(self, link: int) -> str:
        """`leaf/0/1 -> spine/3`."""
        return f"{self.vertex_names[self.source[link]]} -> {self.vertex_names[self.target[link]]}"


@dataclass(slots=True)
class NetworkBuilder:
    """Collects vertices and links, then checks them all at once."""

    _names: dict[str, int] = field(default_factory=dict)
    _kind: list[int] = field(default_factory=list)
    _host: list[int] = field(default_factory=list)
    _domain: list[int] = field(default_factory=list)
    _rail: list[int] = field(default_factory=list)
    _ordinal: list[int] = field(default_factory=list)
    _source: list[int] = field(default_factory=list)
    _target: list[int] = field(default_factory=list)
    _link_kind: list[int] = field(default_factory=list)
    _bandwidth: list[float] = field(default_factory=list)
    _latency: list[float] = field(default_factory=list)

    def vertex(
        self, name: str, kind: VertexKind, *, host: int = -1, domain: int = -1, rail: int = -1, ordinal: int = -1
    ) -> int:
        """Add a vertex; devices count up in the order in which they are added, and so does `ordinal` if left out.

        Raises:
            SpecError: the name is taken.
        """
        number = len(self._kind)
        if self._names.setdefault(name, number) != number:
            raise SpecError("vertex", name, "is given twice", "give every vertex a name of its own")
        self._kind.append(kind)
        self._host.append(host)
        self._domain.append(domain)
        self._rail.append(rail)
        if kind == VertexKind.DEVICE:
            self._ordinal.append(len(self._ordinal) if ordinal < 0 else ordinal)
        return number

    @property
    def num_vertices(self) -> int:
        """Vertices so far."""
        return len(self._kind)

    @property
    def num_devices(self) -> int:
        """Devices so far."""
        return len(self._ordinal)

    @property
    def num_hosts(self) -> int:
        """Hosts so far: one more than the highest number."""
        return max(self._host, default=-1) + 1

    @property
    def num_domains(self) -> int:
        """Scale-up domains so far."""
        return max(self._domain, default=-1) + 1

    def vertex_or_known(self, name: str, kind: VertexKind, *, domain: int = -1) -> int:
        """The vertex of that name, added if there is none."""
        known = self._names.get(name)
        return self.vertex(name, kind, domain=domain) if known is None else known

    def link(
        self,
        a: int,
        b: int,
        kind: LinkKind,
        bandwidth_bytes_per_s: float,
        *,
        latency_s: float = 0.0,
        back_bytes_per_s: float | None = None,
    ) -> None:
        """Add a cable: a link in each direction; `back_bytes_per_s` from b to a where that differs."""
        self._source += (a, b)
        self._target += (b, a)
        self._link_kind += (kind, kind)
        back = bandwidth_bytes_per_s if back_bytes_per_s is None else back_bytes_per_s
        self._bandwidth += (bandwidth_bytes_per_s, back)
        self._latency += (latency_s, latency_s)

    def build(self) -> Network:
        """The network.

        Raises:
            SpecError: no device; a link from a vertex to itself, without bandwidth, or with negative latency; parts
                that no link joins. Each names the link or vertex.
        """
        names = tuple(self._names)
        source, target = np.array(self._source, np.int32), np.array(self._target, np.int32)
        bandwidth, latency = np.array(self._bandwidth, np.float64), np.array(self._latency, np.float64)
        kind = np.array(self._kind, np.int32)
        devices = np.flatnonzero(kind == VertexKind.DEVICE).astype(np.int32)
        if not len(devices):
            raise SpecError("network", "(no devices)", "has no GPU", "add a device")
        _check_links(names, source, target, bandwidth, latency)
        _check_connected(names, source, target)
        order = np.argsort(source, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        reverse = place[order ^ 1]  # cables were added as pairs of links
        return Network(
            vertex_names=names,
            vertex_kind=kind,
            host=np.array(self._host, np.int32),
            domain=np.array(self._domain, np.int32),
            rail=np.array(self._rail, np.int32),
            devices=devices,
            ordinal=np.array(self._ordinal, np.int32),
            source=source[order],
            target=target[order],
            link_kind=np.array(self._link_kind, np.int32)[order],
            bandwidth_bytes_per_s=bandwidth[order],
            latency_s=latency[order],
            reverse=reverse.astype(np.int32),
            offsets=np.searchsorted(source[order], np.arange(len(names) + 1)).astype(np.int32),
        )


def _check_links(names: tuple[str, ...], source: Ints, target: Ints, bandwidth: Floats, latency: Floats) -> None:
    for wrong, what, rule, fix in (
        (source == target, "", "joins a vertex to itself", "name two vertices"),
        (
            ~(bandwidth > 0) | ~np.isfinite(bandwidth),
            ".bandwidth_bytes_per_s",
            "a link needs a positive, finite bandwidth",
            "give one, or leave the link out",
        ),
        (
            ~(latency >= 0) | ~np.isfinite(latency),
            ".latency_s",
            "must be finite and not negative",
            "give the time of one hop",
        ),
    ):
        if wrong.any():
            link = int(np.argmax(wrong))
            value = {".bandwidth_bytes_per_s": bandwidth, ".latency_s": latency}.get(what)
            shown: object = names[source[link]] if value is None else float(value[link])
            raise SpecError(f"link {names[source[link]]} -> {names[target[link]]}{what}", shown, rule, fix)


def component_labels(num_vertices: int, source: Ints, target: Ints) -> Ints:
    """The least vertex that links join each vertex to; labels spread, halving paths, until nothing changes."""
    label = np.arange(num_vertices, dtype=np.int32)
    while True:
        least = label.copy()
        np.minimum.at(least, target, label[source])
        least = np.minimum(least, least[least])
        if np.array_equal(least, label):
            return label
        label = least


def _check_connected(names: tuple[str, ...], source: Ints, target: Ints) -> None:
    label = component_labels(len(names), source, target)
    if label.any():
        apart = int(np.argmax(label != 0))
        raise SpecError(
            "network", names[apart], f"no path joins it to {names[0]}: the network is in parts", "add the missing link"
        )
