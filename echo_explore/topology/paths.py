"""The search for shortest paths, compiled.

Distances count links. A pair is first looked for over scale-up links, then with PCIe; else over the network, in three
parts: the source's host up to its first switches, between switches by tables of distances, and the target's host.
Devices end paths: nothing passes through one. A fresh `stamp` forgets all labels at no cost.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echo_explore.core.jit import jit
from echo_explore.topology.network import Floats, Ints

SPRAY = 2
_FAR = 30000
"""More links than any path has, and within 16 bits."""


class Graph(NamedTuple):
    """What of a network the search reads.

    Attributes:
        offsets, target, link_kind: as in `Network`.
        stops: 0 for vertices that forward, 1 for devices, 2 for network switches.
        joined: label of the vertices joined by links up to a kind, shape (tries, num_vertices); -1 row: always try.
        switch: number of each network switch, else -1.
        row: row of each switch that hosts hang on in the table of distances, else -1.
    """

    offsets: Ints
    target: Ints
    link_kind: Ints
    stops: Ints
    joined: Ints
    switch: Ints
    row: Ints


class Search(NamedTuple):
    """Work arrays; row 0 belongs to the search from the source, row 1 to that from the target.

    Attributes:
        mark, level: stamp of the search that labelled a vertex, and its distance from that end.
        queue, size: labelled vertices, nearest first.
        left_mark, left: stamp of the pair whose shortest paths a vertex of a host is on, and links left to the target.
        table: links between a switch that hosts hang on and every other; the first column is -1 until it is filled.
        ends: rows of the table through which shortest paths reach the target.
        ends_left: links from their switches to the target; ends_left[-1] counts them.
    """

    mark: Ints
    level: Ints
    queue: Ints
    size: Ints
    left_mark: Ints
    left: Ints
    table: npt.NDArray[np.int16]
    ends: Ints
    ends_left: Ints


@jit
def _mix(value: int) -> int:
    """Well mixed bits of a number, 0..2**31 - 1."""
    x = value & 0x3FFFFFFFFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 29)) * 0x2545F491) & 0x3FFFFFFFFFFFFFFF
        x = ((x ^ (x >> 31)) * 0x9E3779B1) & 0x3FFFFFFFFFFFFFFF
    return (x ^ (x >> 32)) & 0x7FFFFFFF


@jit
def _flood(graph: Graph, work: Search, side: int, start: int, other: int, limit: int, stamp: int) -> bool:
    """Label what `start` reaches over links up to a kind without passing a device or a switch; whether that has `other`."""  # noqa: E501
    work.mark[side, start] = stamp
    work.level[side, start] = 0
    work.queue[side, 0] = start
    at, end = 0, 1
    while at < end:
        v = work.queue[side, at]
        at += 1
        if at > 1 and graph.stops[v] != 0:
            continue
        for link in range(graph.offsets[v], graph.offsets[v + 1]):
            w = graph.target[link]
            if graph.link_kind[link] > limit or work.mark[side, w] == stamp:
                continue
            if graph.stops[w] != 1 or w == other:
                work.mark[side, w] = stamp
                work.level[side, w] = work.level[side, v] + 1
                work.queue[side, end] = w
                end += 1
    work.size[side] = end
    return bool(work.mark[side, other] == stamp)


@jit
def _fill_row(graph: Graph, work: Search, switch: int) -> None:
    """Links from a switch to every other, over switches only, into its row of the table."""
    row = work.table[graph.row[switch]]
    row[:] = _FAR
    row[graph.switch[switch]] = 0
    queue = np.empty(len(row), np.int32)
    queue[0] = switch
    at, end = 0, 1
    while at < end:
        v = queue[at]
        at += 1
        for link in range(graph.offsets[v], graph.offsets[v + 1]):
            w = graph.target[link]
            if graph.stops[w] == 2 and row[graph.switch[w]] == _FAR:
                row[graph.switch[w]] = row[graph.switch[v]] + 1
                queue[end] = w
                end += 1


@jit
def _switch_left(graph: Graph, work: Search, v: int) -> int:
    """Links from a switch to the target, through the ends that shortest paths use."""
    best = 2 * _FAR
    for i in range(work.ends_left[-1]):
        best = min(best, work.table[work.ends[i], graph.switch[v]] + work.ends_left[i])
    return best


@jit
def _join_hosts(graph: Graph, work: Search) -> int:
    """Length of the shortest paths between two flooded hosts, and the ends they use, into `work`; `_FAR`: no path."""
    best = _FAR
    for keep in (False, True):
        count = 0
        for i in range(work.size[1]):
            b = work.queue[1, i]
            if graph.stops[b] != 2:
                continue
            row = graph.row[b]
            if work.table[row, 0] < 0:
                _fill_row(graph, work, b)
            nearest = _FAR
            for j in range(work.size[0]):
                a = work.queue[0, j]
                if graph.stops[a] == 2:
                    nearest = min(nearest, work.table[row, graph.switch[a]] + work.level[0, a])
            total = nearest + work.level[1, b]
            if keep and total == best:
                work.ends[count] = row
                work.ends_left[count] = work.level[1, b]
                count += 1
            best = min(best, total)
        work.ends_left[-1] = count
    return best


@jit
def _mark_left(graph: Graph, work: Search, length: int, limit: int, stamp: int) -> None:
    """Links left to the target for the vertices of both hosts that lie on shortest paths."""
    for i in range(work.size[1]):
        v = work.queue[1, i]
        if graph.stops[v] != 2:
            work.left_mark[v] = stamp
            work.left[v] = work.level[1, v]
    for i in range(work.size[0] - 1, -1, -1):
        v = work.queue[0, i]
        level = work.level[0, v]
        if graph.stops[v] == 2:
            if level + _switch_left(graph, work, v) != length:
                continue
        elif work.left_mark[v] != stamp:
            continue
        for link in range(graph.offsets[v], graph.offsets[v + 1]):
            u = graph.target[link]
            on = work.mark[0, u] == stamp and work.level[0, u] == level - 1 and graph.stops[u] != 2
            if on and graph.link_kind[link] <= limit:
                work.left_mark[u] = stamp
                work.left[u] = length - level + 1


@jit
def _choices(graph: Graph, work: Search, v: int, left: int, limit: int, stamp: int, out: Ints) -> int:
    """Links from a vertex, `left` links from the target, that stay on shortest paths, into `out`; their number."""
    count = 0
    for link in range(graph.offsets[v], graph.offsets[v + 1]):
        if graph.link_kind[link] > limit:
            continue
        w = graph.target[link]
        if graph.stops[w] == 2:
            if _switch_left(graph, work, w) != left - 1:
                continue
        elif work.left_mark[w] != stamp or work.left[w] != left - 1:
            continue
        out[count] = link
        count += 1
    return count


@jit
def _shares(
    graph: Graph, work: Search, s: int, length: int, limit: int, stamp: int, part: Floats, out: Ints, share: Floats
) -> int:
    """All links of shortest paths and the part of the flow on each, split evenly at each vertex; their number."""
    used = 0
    front, ahead = np.empty(1, np.int32), np.empty(0, np.int32)
    front[0] = s
    part[s] = 1.0
    for hop in range(length):
        start = used
        for v in front:
            count = _choices(graph, work, int(v), length - hop, limit, stamp, out[used:])
            share[used : used + count] = part[v] / count
            used += count
            part[v] = 0.0
        ahead = np.empty(used - start, np.int32)
        size = 0
        for i in range(start, used):
            w = graph.target[out[i]]
            if part[w] == 0.0:
                ahead[size] = w
                size += 1
            part[w] += share[i]
        front = ahead[:size]
    for v in front:
        part[v] = 0.0
    return used


@jit
def find_routes(
    graph: Graph,
    work: Search,
    reach: Ints,
    sources: Ints,
    targets: Ints,
    digits: npt.NDArray[np.int64],
    key: npt.NDArray[np.int64],
    spread: int,
) -> tuple[npt.NDArray[np.int64], Ints, Floats, Ints]:
    """Routes of pairs of vertices: offsets, links, shares, and path lengths (-1: no path); see `routing.Routes`.

    Args:
        graph: where.
        work: arrays to work in.
        reach: kinds of link to try, each up to that kind, in order; the last may pass network switches.
        sources: vertices, shape (num_pairs,).
        targets: vertices.
        digits: number of the target whose digits pick among equal links; -1 lets the hash pick.
        key: what the hash is of.
        spread: `SPRAY` for shares over all shortest paths, else one path.
    """
    num_pairs, num_links = len(sources), len(graph.target)
    offsets = np.zeros(num_pairs + 1, np.int64)
    links, shares = np.empty(8 * num_pairs + 16, np.int32), np.ones(8 * num_pairs + 16, np.float64)
    lengths = np.zeros(num_pairs, np.int32)
    out, share = np.empty(num_links, np.int32), np.ones(num_links, np.float64)
    part = np.zeros(len(graph.offsets) - 1, np.float64)
    used, stamp = 0, 0
    for pair in range(num_pairs):
        s, t = sources[pair], targets[pair]
        offsets[pair + 1] = used
        if s == t:
            continue
        length, limit = _FAR, 0
        for step in range(len(reach)):
            if graph.joined[step, s] != graph.joined[step, t]:
                continue
            limit, stamp = reach[step], stamp + 1
            work.ends_left[-1] = 0
            if _flood(graph, work, 1, t, s, limit, stamp):
                length, work.size[0] = work.level[1, s], 0
            elif step == len(reach) - 1:
                _flood(graph, work, 0, s, t, limit, stamp)
                length = _join_hosts(graph, work)
            if length < _FAR:
                break
        if length >= _FAR:
            lengths[pair] = -1
            continue
        lengths[pair] = length
        _mark_left(graph, work, length, limit, stamp)
        number = length
        if spread == SPRAY:
            number = _shares(graph, work, s, length, limit, stamp, part, out, share)
        while used + number > len(links):
            links, shares = np.append(links, links), np.append(shares, np.ones(len(shares)))
        if spread == SPRAY:
            links[used : used + number] = out[:number]
            shares[used : used + number] = share[:number]
        else:
            v, rest = s, digits[pair]
            for hop in range(length):
                count = _choices(graph, work, v, length - hop, limit, stamp, out)
                pick = 0
                if rest >= 0:
                    pick = rest % count
                    rest //= count
                elif count > 1:
                    pick = _mix(key[pair] + v * 0x3C6EF372) % count
                links[used + hop] = out[pick]
                v = graph.target[out[pick]]
        used += number
        offsets[pair + 1] = used
    return offsets, links[:used].copy(), shares[:used].copy(), lengths
