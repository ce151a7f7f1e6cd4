"""Max-min fair rates of flows over links, and when the flows end; compiled.

Rates rise together until a link is full; the flows on it keep that rate, the others rise on (progressive filling:
Bertsekas and Gallager, "Data networks", 2nd edition (1992), section 6.5.2). A flow may put only a share of itself on a
link (spraying). Symbols: capacity c_l of link l, share a_lf of flow f on it, rates x_f with sum_f a_lf x_f <= c_l.

Two facts keep it fast. What a link allows, (c_l - settled) / (shares of the rest), only grows while others settle: a
heap of links needs no update but when a link comes to its top. And a flow that ends at rate x changes no rate below x:
links that were full below x have no part in it. So flows of equal size that start together need one filling.
"""

import numpy as np
import numpy.typing as npt

from echo_explore.core.jit import jit

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@jit
def _sift(heap: Indices, key: Floats, size: int, at: int) -> None:
    """Move the link at heap position `at` down to where its key belongs."""
    link = heap[at]
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and key[heap[down + 1]] < key[heap[down]]:
            down += 1
        if key[heap[down]] >= key[link]:
            break
        heap[at] = heap[down]
        at = down
    heap[at] = link


@jit
def fill(
    capacity: Floats,
    offsets: Indices,
    links: Indices,
    shares: Floats,
    link_offsets: Indices,
    link_flows: Indices,
    active: Flags,
    floor: float,
    rate: Floats,
) -> None:
    """Max-min fair rates of the active flows, into `rate`; those below `floor` are taken as settled.

    Args:
        capacity: of each link, shape (num_links,).
        offsets: links of flow f are links[offsets[f]:offsets[f + 1]].
        links: of each flow.
        shares: of the flow on each of them.
        link_offsets: flows of link l are link_flows[link_offsets[l]:link_offsets[l + 1]].
        link_flows: of each link.
        active: which flows send.
        floor: 0 to compute all rates anew.
        rate: of each flow; infinite for one that passes no link.
    """
    num_flows, num_links = len(offsets) - 1, len(capacity)
    left, weight = capacity.copy(), np.zeros(num_links)
    waiting = np.zeros(num_links, np.int64)
    open_flow = np.zeros(num_flows, np.bool_)
    for f in range(num_flows):
        if not active[f]:
            continue
        if offsets[f] == offsets[f + 1]:
            rate[f] = np.inf
            continue
        open_flow[f] = floor <= 0.0 or rate[f] >= floor
        for i in range(offsets[f], offsets[f + 1]):
            if open_flow[f]:
                weight[links[i]] += shares[i]
                waiting[links[i]] += 1
            else:
                left[links[i]] -= shares[i] * rate[f]
    key = np.full(num_links, np.inf)
    heap = np.empty(num_links, np.int64)
    size = 0
    for link in range(num_links):
        if waiting[link]:
            key[link] = max(left[link], 0.0) / weight[link]
            heap[size] = link
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        _sift(heap, key, size, at)
    level = floor
    while size:
        link = heap[0]
        if waiting[link]:
            allows = max(max(left[link], 0.0) / weight[link], level)
            if allows > key[link] * (1.0 + 1e-12):
                key[link] = allows
                _sift(heap, key, size, 0)
                continue
            level = allows
            for i in range(link_offsets[link], link_offsets[link + 1]):
                f = link_flows[i]
                if not open_flow[f]:
                    continue
                open_flow[f] = False
                rate[f] = level
                for j in range(offsets[f], offsets[f + 1]):
                    left[links[j]] -= shares[j] * level
                    weight[links[j]] -= shares[j]
                    waiting[links[j]] -= 1
        size -= 1
        heap[0] = heap[size]
        _sift(heap, key, size, 0)


@jit
def run_flows(
    capacity: Floats,
    offsets: Indices,
    links: Indices,
    shares: Floats,
    link_offsets: Indices,
    link_flows: Indices,
    num_bytes: Floats,
    start_s: Floats,
    merge_fraction: float,
) -> Floats:
    """Seconds at which each flow ends; rates are filled anew whenever a flow starts or ends.

    A flow that ends within `merge_fraction` of the time since the first start after another ends with it, at its own
    time: its link is free a little early.
    """
    num_flows = len(num_bytes)
    order = np.argsort(start_s)
    left, rate = num_bytes.copy(), np.zeros(num_flows)
    active = np.zeros(num_flows, np.bool_)
    end_s = start_s.copy()
    running = np.empty(num_flows, np.int64)
    num_running, begun = 0, 0
    now = start_s[order[0]] if num_flows else 0.0
    first = now
    while num_running or begun < num_flows:
        if not num_running:
            now = max(now, start_s[order[begun]])
        arrived = False
        while begun < num_flows and start_s[order[begun]] <= now:
            f = order[begun]
            begun += 1
            if left[f] > 0.0 and offsets[f] < offsets[f + 1]:
                active[f] = arrived = True
                running[num_running] = f
                num_running += 1
        if arrived:
            fill(capacity, offsets, links, shares, link_offsets, link_flows, active, 0.0, rate)
        if not num_running:
            continue
        until = np.inf
        for i in range(num_running):
            until = min(until, left[running[i]] / rate[running[i]])
        if begun < num_flows:
            until = min(until, start_s[order[begun]] - now)
        slack = merge_fraction * (now + until - first) + 1e-12 * until
        kept, lowest, highest = 0, np.inf, 0.0
        for i in range(num_running):
            f = running[i]
            needs = left[f] / rate[f]
            if needs <= until + slack:
                end_s[f] = now + needs
                active[f] = False
                lowest = min(lowest, rate[f])
            else:
                left[f] -= rate[f] * until
                running[kept] = f
                kept += 1
                highest = max(highest, rate[f])
        num_running = kept
        now += until
        if highest >= lowest:
            fill(capacity, offsets, links, shares, link_offsets, link_flows, active, lowest, rate)
    return end_s
