"""When flows end that share links max-min fairly; compiled. Events are starts and ends; between them rates stand.

At an event only the flows that it touches are rated anew (`fair_share.rerate`), and only those get another end: a heap
of ends holds all flows that send.
"""

import numpy as np

from echo_explore.comm.fair_share import Floats, FlowTable, Indices, Rates, rerate
from echo_explore.core.jit import jit

_SAME_TIME = 1e-12
"""Events nearer than this part of the time are one."""


@jit
def _move(heap: Indices, place: Indices, end_s: Floats, size: int, flow: int) -> None:
    """Bring a flow whose end has changed to where it belongs in the heap."""
    at = place[flow]
    while at and end_s[heap[(at - 1) // 2]] > end_s[flow]:
        heap[at] = heap[(at - 1) // 2]
        place[heap[at]] = at
        at = (at - 1) // 2
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and end_s[heap[down + 1]] < end_s[heap[down]]:
            down += 1
        if end_s[heap[down]] >= end_s[flow]:
            break
        heap[at] = heap[down]
        place[heap[at]] = at
        at = down
    heap[at] = flow
    place[flow] = at


@jit
def _join(state: Rates, num_members: int, flow: int) -> int:
    """The flow among those to be rated anew."""
    if not state.is_member[flow]:
        state.is_member[flow] = True
        state.members[num_members] = flow
        num_members += 1
    return num_members


@jit
def run_flows(table: FlowTable, state: Rates, num_bytes: Floats, start_s: Floats) -> Floats:
    """Seconds at which each flow ends; `state` is new. Exact but for events that are within 1e-12 of each other."""
    num_flows = len(num_bytes)
    order = np.argsort(start_s)
    end_s, left, since = start_s.copy(), num_bytes.copy(), start_s.copy()
    old_rate = np.zeros(num_flows)
    heap, place = np.empty(num_flows, np.int64), np.full(num_flows, -1, np.int64)
    size, begun, stamp = 0, 0, 1
    while size or begun < num_flows:
        now = np.inf
        if size:
            now = end_s[heap[0]]
        if begun < num_flows:
            now = min(now, start_s[order[begun]])
        num_members = 0
        while size and end_s[heap[0]] <= now * (1.0 + _SAME_TIME):
            f = heap[0]
            size -= 1
            last = heap[size]
            place[f] = -1
            state.active[f] = False
            if size:
                heap[0] = last
                place[last] = 0
                _move(heap, place, end_s, size, last)
            for i in range(table.offsets[f], table.offsets[f + 1]):
                link = table.links[i]
                for j in range(table.link_offsets[link], table.link_offsets[link + 1]):
                    other = table.link_flows[j]
                    if state.active[other] and state.bottleneck[other] == link:
                        num_members = _join(state, num_members, other)
        kept = 0
        for i in range(num_members):  # some of them ended too
            f = state.members[i]
            if state.active[f]:
                state.members[kept] = f
                kept += 1
            else:
                state.is_member[f] = False
        num_members = kept
        num_active = size
        while begun < num_flows and start_s[order[begun]] <= now * (1.0 + _SAME_TIME):
            f = order[begun]
            begun += 1
            if left[f] > 0.0 and table.offsets[f] < table.offsets[f + 1]:
                state.active[f] = True
                state.rate[f] = 0.0
                num_active += 1
                num_members = _join(state, num_members, f)
        num_members = rerate(table, state, num_members, num_active, stamp)
        stamp += num_members + 1
        for i in range(num_members):
            f = state.members[i]
            state.is_member[f] = False
            if place[f] >= 0:
                left[f] = max(left[f] - old_rate[f] * (now - since[f]), 0.0)
            else:
                place[f] = size
                heap[size] = f
                size += 1
            since[f] = now
            old_rate[f] = state.rate[f]
            end_s[f] = now + left[f] / state.rate[f]
            _move(heap, place, end_s, size, f)
    return end_s
