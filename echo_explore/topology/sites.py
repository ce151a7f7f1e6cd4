"""Several sites joined by wide-area links."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_explore.core import SpecError
from echo_explore.topology.network import LinkKind, Network, NetworkBuilder, VertexKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLink:
    """A wide-area link between two sites, by their number.

    Attributes:
        bandwidth_bytes_per_s: from `a` to `b`.
        back_bytes_per_s: from `b` to `a` where that differs.
        latency_s: one way.
    """

    a: int
    b: int
    bandwidth_bytes_per_s: float
    latency_s: float
    back_bytes_per_s: float | None = None


def join_sites(sites: Sequence[Network], links: Sequence[SiteLink]) -> Network:
    """One network: vertices are named `site/<i>/...`, devices count up site by site.

    A gateway per site hangs on the switches of its highest level (the farthest from GPUs), by cables that never limit
    the wide-area links.

    Raises:
        SpecError: a link names a site that is not there, or a site without a switch; see also `NetworkBuilder.build`.
    """
    builder = NetworkBuilder()
    for link in links:
        for end in (link.a, link.b):
            if not 0 <= end < len(sites):
                raise SpecError("site", end, f"must lie in 0..{len(sites) - 1}", "name a site")
    gateways = []
    for number, site in enumerate(sites):
        first = _copy(builder, site, number)
        total = sum(
            max(link.bandwidth_bytes_per_s, link.back_bytes_per_s or 0.0)
            for link in links
            if number in (link.a, link.b)
        )
        gateway = builder.vertex(f"site/{number}/gateway", VertexKind.SWITCH)
        for switch in _top_switches(site, number):
            builder.link(gateway, first + switch, LinkKind.NETWORK, max(total, 1.0))
        gateways.append(gateway)
    for link in links:
        builder.link(
            gateways[link.a],
            gateways[link.b],
            LinkKind.WIDE_AREA,
            link.bandwidth_bytes_per_s,
            latency_s=link.latency_s,
            back_bytes_per_s=link.back_bytes_per_s,
        )
    return builder.build()


def _copy(builder: NetworkBuilder, site: Network, number: int) -> int:
    """Add a site's vertices and links; the vertex that its first one became."""
    hosts = builder.num_hosts
    domains = builder.num_domains
    ordinal = np.full(site.num_vertices, -1)
    ordinal[site.devices] = site.ordinal + builder.num_devices
    first = builder.num_vertices
    for v, name in enumerate(site.vertex_names):
        host, domain = int(site.host[v]), int(site.domain[v])
        builder.vertex(
            f"site/{number}/{name}",
            VertexKind(int(site.vertex_kind[v])),
            host=host + hosts if host >= 0 else -1,
            domain=domain + domains if domain >= 0 else -1,
            rail=int(site.rail[v]),
            ordinal=int(ordinal[v]),
        )
    for link in np.flatnonzero(np.arange(site.num_links) < site.reverse).tolist():
        builder.link(
            first + int(site.source[link]),
            first + int(site.target[link]),
            LinkKind(int(site.link_kind[link])),
            float(site.bandwidth_bytes_per_s[link]),
            latency_s=float(site.latency_s[link]),
            back_bytes_per_s=float(site.bandwidth_bytes_per_s[site.reverse[link]]),
        )
    return first


def _top_switches(site: Network, number: int) -> list[int]:
    """Switches of the network that are farthest from the devices."""
    distance = np.where(site.vertex_kind == VertexKind.DEVICE, 0, site.num_vertices)
    while True:
        nearer = distance.copy()
        np.minimum.at(nearer, site.target, distance[site.source] + 1)
        if np.array_equal(nearer, distance):
            break
        distance = nearer
    is_switch = site.vertex_kind == VertexKind.SWITCH
    if not is_switch.any():
        raise SpecError(f"site {number}", "(no switch)", "has no network to join to other sites", "add a fabric")
    return np.flatnonzero(is_switch & (distance == distance[is_switch].max())).tolist()
