"""A program in which nothing slows anything: each op starts when the last that it waits for ends, in one pass.

Whether that is so is seen from its result. Up to the first instant at which two ops that slow each other would run side
by side, the events of `engine.run_events` are these; if there is no such instant, they are these to the end.
"""

import numpy as np

from echo_explore.core.jit import jit
from echo_explore.graph.execution_graph import Floats, Ints


@jit
def run_undisturbed(
    duration: Floats,
    group: Ints,
    succ_offsets: Ints,
    succ_index: Ints,
    num_preds: Ints,
    stream_first: Ints,
    stream_order: Ints,
    group_first: Ints,
    group_members: Ints,
    start: Floats,
    end: Floats,
) -> int:
    """Number of ops that ran (all of them, unless the program deadlocks); fills `start` and `end` in seconds.

    Arguments as those of `engine.run_events`.
    """
    n = duration.shape[0]
    follows = np.full(n, -1, np.int64)
    waits = num_preds.copy()
    for s in range(stream_first.shape[0] - 1):
        for at in range(stream_first[s] + 1, stream_first[s + 1]):
            follows[stream_order[at - 1]] = stream_order[at]
            waits[stream_order[at]] += 1
    group_waits = group_first[1:] - group_first[:-1]
    ready = np.zeros(n)
    free = np.empty(n, np.int64)
    num_free = 0
    for op in range(n):
        if waits[op] == 0:
            free[num_free] = op
            num_free += 1
    done = 0
    while num_free > 0:
        num_free -= 1
        op = free[num_free]
        g = group[op]
        first, last = 0, 1
        if g >= 0:
            group_waits[g] -= 1
            if group_waits[g] > 0:
                continue
            first, last = group_first[g], group_first[g + 1]
        begin = ready[op]
        if g >= 0:
            for at in range(first, last):
                begin = max(begin, ready[group_members[at]])
        for at in range(first, last):
            if g >= 0:
                op = group_members[at]
            finish = begin + duration[op]
            start[op] = begin
            end[op] = finish
            done += 1
            d = follows[op]
            if d >= 0:
                ready[d] = max(ready[d], finish)
                waits[d] -= 1
                if waits[d] == 0:
                    free[num_free] = d
                    num_free += 1
            for j in range(succ_offsets[op], succ_offsets[op + 1]):
                d = succ_index[j]
                ready[d] = max(ready[d], finish)
                waits[d] -= 1
                if waits[d] == 0:
                    free[num_free] = d
                    num_free += 1
    return done


@jit
def disturbs(
    kernel_class: Ints,
    traffic_class: Ints,
    stream_first: Ints,
    stream_order: Ints,
    streams_per_rank: int,
    pair_compute: Floats,
    pair_collective: Floats,
    shared: Floats,
    start: Floats,
    end: Floats,
) -> bool:
    """Whether two ops that slow each other run side by side, by their times; arguments as of `engine.run_events`."""
    num_streams = stream_first.shape[0] - 1
    classed = np.empty(stream_order.shape[0], np.int64)
    first = np.zeros(streams_per_rank + 1, np.int64)
    for rank_first in range(0, num_streams, streams_per_rank):
        count = 0
        for s in range(streams_per_rank):
            for at in range(stream_first[rank_first + s], stream_first[rank_first + s + 1]):
                op = stream_order[at]
                if end[op] > start[op] and ((s == 0 and kernel_class[op] > 0) or (s > 0 and traffic_class[op] > 0)):
                    classed[count] = op
                    count += 1
            first[s + 1] = count
        for s in range(1, streams_per_rank):
            for q in range(streams_per_rank):
                if q == s or first[s] == first[s + 1] or first[q] == first[q + 1]:
                    continue
                if q > 0 and shared[s, q] == 1.0:
                    continue
                at = first[q]
                for i in range(first[s], first[s + 1]):
                    op = classed[i]
                    while at < first[q + 1] and end[classed[at]] <= start[op]:
                        at += 1
                    beside = at
                    while beside < first[q + 1] and start[classed[beside]] < end[op]:
                        if q > 0:
                            return True
                        k, c = kernel_class[classed[beside]], traffic_class[op]
                        if pair_compute[k, c] > 1.0 or pair_collective[k, c] > 1.0:
                            return True
                        beside += 1
    return False
