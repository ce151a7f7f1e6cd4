"""Networks as networkx graphs, to look at, to analyse, and to bring in one's own."""

import networkx as nx

from echo_explore.core import SpecError
from echo_explore.topology.network import LinkKind, Network, NetworkBuilder, VertexKind

_LINK_KINDS = {kind.name.lower().replace("_", "-"): kind for kind in LinkKind}
_VERTEX_KINDS = {kind.name.lower().replace("_", "-"): kind for kind in VertexKind}


def as_graph(network: Network) -> nx.MultiDiGraph:
    """The network with `kind`, `host`, `domain`, `rail` on vertices; `kind`, `bandwidth_bytes_per_s`, `latency_s` on links."""  # noqa: E501
    graph = nx.MultiDiGraph()
    kinds = {kind: name for name, kind in _VERTEX_KINDS.items()}
    for v, name in enumerate(network.vertex_names):
        graph.add_node(
            name,
            kind=kinds[VertexKind(int(network.vertex_kind[v]))],
            host=int(network.host[v]),
            domain=int(network.domain[v]),
            rail=int(network.rail[v]),
        )
    link_kinds = {kind: name for name, kind in _LINK_KINDS.items()}
    for link in range(network.num_links):
        graph.add_edge(
            network.vertex_names[network.source[link]],
            network.vertex_names[network.target[link]],
            kind=link_kinds[LinkKind(int(network.link_kind[link]))],
            bandwidth_bytes_per_s=float(network.bandwidth_bytes_per_s[link]),
            latency_s=float(network.latency_s[link]),
        )
    return graph


def network_from_graph(graph: nx.Graph) -> Network:
    """The network of a graph of one's own: vertices with `kind`, links with `kind` and `bandwidth_bytes_per_s`.

    A vertex may have `host`, `domain`, `rail`, a link `latency_s` (0 if left out). An undirected edge is a cable with
    the same bandwidth both ways. In a directed graph every link needs its reverse; where the two directions differ both
    must say `asymmetric=True`, since a forgotten digit looks the same.

    Raises:
        SpecError: an unknown kind; a link without bandwidth, without reverse, or unequal to it; see also
            `NetworkBuilder.build`.
    """
    builder = NetworkBuilder()
    numbers: dict[str, int] = {}
    for name, data in graph.nodes(data=True):
        kind = _VERTEX_KINDS.get(str(data.get("kind")))
        if kind is None:
            raise SpecError(
                f"vertex {name}.kind", data.get("kind"), "is not a kind of vertex", f"use {', '.join(_VERTEX_KINDS)}"
            )
        place = {key: int(data.get(key, -1)) for key in ("host", "domain", "rail")}
        numbers[name] = builder.vertex(str(name), kind, **place)
    plain = graph.to_directed() if not graph.is_directed() else graph
    pairs: dict[tuple[str, str], list[dict[str, object]]] = {}
    for a, b, data in plain.edges(data=True):
        pairs.setdefault((a, b), []).append(data)
    for (a, b), links in pairs.items():
        back = pairs.get((b, a), [])
        if len(back) != len(links):
            raise SpecError(
                f"link {a} -> {b}",
                len(links),
                f"has {len(back)} links in the other direction",
                "give it a reverse",
            )
        if numbers[a] < numbers[b] or a == b:
            for there, home in zip(links, back, strict=True):
                _add_cable(builder, numbers, (a, b), there, home)
    return builder.build()


def _add_cable(
    builder: NetworkBuilder,
    numbers: dict[str, int],
    ends: tuple[str, str],
    there: dict[str, object],
    home: dict[str, object],
) -> None:
    a, b = ends
    name = f"link {a} -> {b}"
    kind = _LINK_KINDS.get(str(there.get("kind")))
    if kind is None or there.get("kind") != home.get("kind"):
        raise SpecError(f"{name}.kind", there.get("kind"), "is not a kind of link", f"use {', '.join(_LINK_KINDS)}")
    forth, back = (_number(data, "bandwidth_bytes_per_s", name) for data in (there, home))
    declared = bool(there.get("asymmetric")) and bool(home.get("asymmetric"))
    if forth != back and not declared:
        raise SpecError(
            f"{name}.bandwidth_bytes_per_s",
            forth,
            f"is asymmetric: {back:g} in the other direction",
            "correct one, or set asymmetric=True on both",
        )
    latency, other = (_number(data, "latency_s", name, default=0.0) for data in (there, home))
    if latency != other:
        raise SpecError(f"{name}.latency_s", latency, f"is {other:g} in the other direction", "make them equal")
    builder.link(numbers[a], numbers[b], kind, forth, latency_s=latency, back_bytes_per_s=back)


def _number(data: dict[str, object], key: str, name: str, default: float | None = None) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name}.{key}", value, "must be a number in SI units", f"set {key}")
    return float(value)
