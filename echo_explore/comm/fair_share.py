"""Max-min fair rates of flows over links; compiled.

Rates rise together until a link is full; the flows on it keep that rate, the others rise on (progressive filling:
Bertsekas and Gallager, "Data networks", 2nd edition (1992), section 6.5.2). A flow may put only a share of itself on a
link (spraying). Symbols: capacity c_l of link l, share a_lf of flow f on it, rates x_f with sum_f a_lf x_f <= c_l.

Rates are max-min fair exactly if every flow has a full link on which nobody is faster, its bottleneck. So where flows
come or go, only some are rated anew, beside the others as they are; then flows whose bottleneck no longer holds, or
which are faster than one that is held back beside them, join those (`rerate`). What a link allows, (c_l - settled) /
(shares of the rest), only grows while others settle: a heap of links needs no update but when a link comes to its top.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from echo_explore.core.jit import jit

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_EQUAL = 1e-9
"""Rates, and loads and capacities, that differ by less are equal."""
_MOST_LOCAL = 4
"""Where more than one in so many flows would be rated anew, all are: one pass settles them."""


class FlowTable(NamedTuple):
    """Which flow passes which links: links of flow f are links[offsets[f]:offsets[f + 1]], and the same by link."""

    capacity: Floats
    offsets: Indices
    links: Indices
    shares: Floats
    link_offsets: Indices
    link_flows: Indices
    link_shares: Floats


class Rates(NamedTuple):
    """State of the flows: which send, how fast, and the link that holds each back; and work space.

    `members` are flows that are rated anew, `is_member` marks them; other arrays are by link.
    """

    active: Flags
    rate: Floats
    bottleneck: Indices
    members: Indices
    is_member: Flags
    is_open: Flags
    mark: Indices
    touched: Indices
    left: Floats
    weight: Floats
    waiting: Indices
    key: Floats
    heap: Indices


def new_rates(num_flows: int, num_links: int) -> Rates:
    """No flow sends yet."""
    return Rates(
        active=np.zeros(num_flows, np.bool_),
        rate=np.zeros(num_flows),
        bottleneck=np.full(num_flows, -1, np.int64),
        members=np.empty(num_flows, np.int64),
        is_member=np.zeros(num_flows, np.bool_),
        is_open=np.zeros(num_flows, np.bool_),
        mark=np.zeros(num_links, np.int64),
        touched=np.empty(num_links, np.int64),
        left=np.empty(num_links),
        weight=np.empty(num_links),
        waiting=np.empty(num_links, np.int64),
        key=np.empty(num_links),
        heap=np.empty(num_links, np.int64),
    )


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
def _gather(table: FlowTable, state: Rates, num_members: int, stamp: int) -> int:
    """Links of the members with what the other flows leave of them; how many these are."""
    num_touched = 0
    for i in range(num_members):
        f = state.members[i]
        state.is_open[f] = True
        for j in range(table.offsets[f], table.offsets[f + 1]):
            link = table.links[j]
            if state.mark[link] != stamp:
                state.mark[link] = stamp
                state.touched[num_touched] = link
                num_touched += 1
                state.left[link] = table.capacity[link]
                state.weight[link] = 0.0
                state.waiting[link] = 0
            state.weight[link] += table.shares[j]
            state.waiting[link] += 1
    for i in range(num_touched):
        link = state.touched[i]
        for j in range(table.link_offsets[link], table.link_offsets[link + 1]):
            f = table.link_flows[j]
            if state.active[f] and not state.is_member[f]:
                state.left[link] -= table.link_shares[j] * state.rate[f]
    return num_touched


@jit
def _settle(table: FlowTable, state: Rates, num_members: int, stamp: int) -> int:
    """Max-min fair rates and bottlenecks of the members beside the other flows as they are; links that they pass."""
    size = num_touched = _gather(table, state, num_members, stamp)
    left, weight, waiting, key, heap = state.left, state.weight, state.waiting, state.key, state.heap
    for at in range(size):
        heap[at] = link = state.touched[at]
        key[link] = max(left[link], 0.0) / weight[link]
    for at in range(size // 2 - 1, -1, -1):
        _sift(heap, key, size, at)
    level = 0.0
    while size:
        link = heap[0]
        if waiting[link]:
            allows = max(max(left[link], 0.0) / weight[link], level)
            if allows > key[link] * (1.0 + 1e-12):
                key[link] = allows
                _sift(heap, key, size, 0)
                continue
            level = allows
            for i in range(table.link_offsets[link], table.link_offsets[link + 1]):
                f = table.link_flows[i]
                if not state.is_open[f]:
                    continue
                state.is_open[f] = False
                state.rate[f] = level
                state.bottleneck[f] = link
                for j in range(table.offsets[f], table.offsets[f + 1]):
                    left[table.links[j]] -= table.shares[j] * level
                    weight[table.links[j]] -= table.shares[j]
                    waiting[table.links[j]] -= 1
        size -= 1
        heap[0] = heap[size]
        _sift(heap, key, size, 0)
    return num_touched


@jit
def _more_members(table: FlowTable, state: Rates, num_members: int, num_touched: int) -> int:
    """Members with the flows whose rate no longer is fair beside them."""
    for i in range(num_touched):
        link = state.touched[i]
        load, top, held = 0.0, 0.0, np.inf
        for j in range(table.link_offsets[link], table.link_offsets[link + 1]):
            f = table.link_flows[j]
            if state.active[f]:
                load += table.link_shares[j] * state.rate[f]
                top = max(top, state.rate[f])
                if state.is_member[f] and state.bottleneck[f] == link:
                    held = min(held, state.rate[f])
        free = load < table.capacity[link] * (1.0 - _EQUAL)
        for j in range(table.link_offsets[link], table.link_offsets[link + 1]):
            f = table.link_flows[j]
            if not state.active[f] or state.is_member[f]:
                continue
            unheld = state.bottleneck[f] == link and (free or state.rate[f] < top * (1.0 - _EQUAL))
            if unheld or state.rate[f] > held * (1.0 + _EQUAL):
                state.is_member[f] = True
                state.members[num_members] = f
                num_members += 1
    return num_members


@jit
def rerate(table: FlowTable, state: Rates, num_members: int, num_active: int, stamp: int) -> int:
    """Make all rates max-min fair again, given the flows that certainly need another; how many were rated anew.

    Args:
        table: routes.
        state: `members[:num_members]` and `is_member` name the flows to start from; on return those that were rated.
        num_members: of them.
        num_active: flows that send.
        stamp: a number above all earlier ones; the call uses up to num_active of them.
    """
    while num_members:
        if num_members * _MOST_LOCAL > num_active:
            num_members = 0
            for f in range(len(state.active)):
                state.is_member[f] = state.active[f]
                if state.active[f]:
                    state.members[num_members] = f
                    num_members += 1
        num_touched = _settle(table, state, num_members, stamp)
        stamp += 1
        if num_members == num_active:
            break
        before = num_members
        num_members = _more_members(table, state, num_members, num_touched)
        if num_members == before:
            break
    return num_members


@jit
def fill(table: FlowTable, state: Rates) -> None:
    """Max-min fair rates of the active flows, into `state.rate`; infinite for one that passes no link."""
    num_members = 0
    for f in range(len(state.active)):
        if state.active[f] and table.offsets[f] == table.offsets[f + 1]:
            state.rate[f] = np.inf
        elif state.active[f]:
            state.members[num_members] = f
            state.is_member[f] = True
            num_members += 1
    _settle(table, state, num_members, 1)
