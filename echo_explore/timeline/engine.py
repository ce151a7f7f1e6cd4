"""The event engine: ops on in-order streams, rendezvous, and mutual slowdown of what runs on one rank at a time.

`run_events` is compiled by numba; `python_of(run_events)` is its oracle. Nothing in it knows pipelines or layers.
"""

import numpy as np

from echo_explore.core.jit import jit
from echo_explore.graph.execution_graph import Floats, Ints


@jit
def _settle(heap: Ints, where: Ints, key: Floats, size: int, at: int) -> None:
    """Move the stream at heap position `at` to where its key belongs; ties go to the lower stream."""
    s = heap[at]
    while at > 0:
        up = (at - 1) // 2
        q = heap[up]
        if key[q] < key[s] or (key[q] == key[s] and q < s):
            break
        heap[at] = q
        where[q] = at
        at = up
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size:
            a = heap[down]
            b = heap[down + 1]
            if key[b] < key[a] or (key[b] == key[a] and b < a):
                down += 1
        q = heap[down]
        if key[s] < key[q] or (key[s] == key[q] and s < q):
            break
        heap[at] = q
        where[q] = at
        at = down
    heap[at] = s
    where[s] = at


@jit
def run_events(
    duration: Floats,
    stream: Ints,
    kernel_class: Ints,
    traffic_class: Ints,
    group: Ints,
    succ_offsets: Ints,
    succ_index: Ints,
    num_preds: Ints,
    stream_first: Ints,
    stream_order: Ints,
    streams_per_rank: int,
    group_first: Ints,
    group_members: Ints,
    pair_compute: Floats,
    pair_collective: Floats,
    shared: Floats,
    start: Floats,
    end: Floats,
) -> int:
    """Number of ops that ran (all of them, unless the program deadlocks); fills `start` and `end` in seconds.

    An op starts when it is the head of its stream, the stream is free, all its predecessors have ended and, for a
    member of a rendezvous group, all members are as far. Stream 0 of a rank holds kernels. While a kernel of class k
    (above 0) runs beside collectives c1.. (above 0) of its rank its rate is 1 / (1 + sum(pair_compute[k, ci] - 1)), and
    theirs is 1 / pair_collective[k, ci], times 1 / (1 + sum(shared[s, q] - 1)) for a collective of stream s beside
    others on streams q of its rank; rates change whenever the running set does.

    Args:
        duration: (num_ops,) seconds alone.
        stream: (num_ops,) rank * streams_per_rank + stream of the rank.
        kernel_class: (num_ops,) row of the pair table; 0: neither slows nor is slowed.
        traffic_class: (num_ops,) column of the pair table; 0: neither slows nor is slowed.
        group: (num_ops,) rendezvous group, -1 for none.
        succ_offsets: (num_ops + 1,) CSR offsets into succ_index.
        succ_index: ops that wait for the op.
        num_preds: (num_ops,) ops that the op waits for.
        stream_first: (num_streams + 1,) offsets into stream_order.
        stream_order: (num_ops,) ops of every stream in its order.
        streams_per_rank: streams of one rank.
        group_first: (num_groups + 1,) offsets into group_members.
        group_members: ops of every group.
        pair_compute: (num_kernel_classes, num_traffic_classes) slowdown of kernels.
        pair_collective: slowdown of collectives, of the same shape.
        shared: (streams_per_rank, streams_per_rank) slowdown of a collective of one stream beside one of another.
        start: (num_ops,) out.
        end: (num_ops,) out.
    """
    num_streams = stream_first.shape[0] - 1
    num_ranks = num_streams // streams_per_rank
    waits = num_preds.copy()
    group_waits = group_first[1:] - group_first[:-1]
    position = stream_first[:-1].copy()
    running = np.full(num_streams, -1, np.int64)
    arrived = np.full(num_streams, -1, np.int64)
    remaining = np.zeros(num_streams)
    rate = np.ones(num_streams)
    since = np.zeros(num_streams)
    key = np.zeros(num_streams)
    heap = np.zeros(num_streams, np.int64)
    where = np.full(num_streams, -1, np.int64)
    size = 0
    num_comms = np.zeros(num_ranks, np.int64)
    changed = np.zeros(num_ranks, np.int64)
    changed_ranks = np.zeros(num_ranks, np.int64)
    num_changed = 0
    todo = np.zeros(num_streams, np.int64)
    queued = np.ones(num_streams, np.int64)
    for s in range(num_streams):
        todo[s] = num_streams - 1 - s
    num_todo = num_streams
    has_hole = False
    now = 0.0
    done = 0
    while True:
        while num_todo > 0:
            num_todo -= 1
            s = todo[num_todo]
            queued[s] = 0
            while running[s] < 0 and position[s] < stream_first[s + 1]:
                op = stream_order[position[s]]
                if waits[op] > 0:
                    break
                g = group[op]
                if g >= 0:
                    if arrived[s] != op:
                        arrived[s] = op
                        group_waits[g] -= 1
                        if group_waits[g] == 0:
                            for j in range(group_first[g], group_first[g + 1]):
                                q = stream[group_members[j]]
                                if queued[q] == 0 and q != s:
                                    queued[q] = 1
                                    todo[num_todo] = q
                                    num_todo += 1
                    if group_waits[g] > 0:
                        break
                start[op] = now
                position[s] += 1
                if duration[op] > 0.0:
                    running[s] = op
                    remaining[s] = duration[op]
                    rate[s] = 1.0
                    since[s] = now
                    key[s] = now + duration[op]
                    if has_hole:
                        has_hole = False
                        heap[0] = s
                        _settle(heap, where, key, size, 0)
                    else:
                        heap[size] = s
                        size += 1
                        _settle(heap, where, key, size, size - 1)
                    r = s // streams_per_rank
                    if traffic_class[op] > 0:
                        num_comms[r] += 1
                    mixes = traffic_class[op] > 0 or (kernel_class[op] > 0 and num_comms[r] > 0)
                    if mixes and changed[r] == 0:
                        changed[r] = 1
                        changed_ranks[num_changed] = r
                        num_changed += 1
                    break
                end[op] = now
                done += 1
                for j in range(succ_offsets[op], succ_offsets[op + 1]):
                    d = succ_index[j]
                    waits[d] -= 1
                    if waits[d] == 0:
                        q = stream[d]
                        if queued[q] == 0 and q != s:
                            queued[q] = 1
                            todo[num_todo] = q
                            num_todo += 1
        if has_hole:
            has_hole = False
            size -= 1
            if size > 0:
                heap[0] = heap[size]
                _settle(heap, where, key, size, 0)
        while num_changed > 0:
            num_changed -= 1
            r = changed_ranks[num_changed]
            changed[r] = 0
            first = r * streams_per_rank
            kernel = running[first]
            k = 0
            if kernel >= 0:
                k = kernel_class[kernel]
            slow = 1.0
            for s in range(first + 1, first + streams_per_rank):
                op = running[s]
                if op >= 0 and traffic_class[op] > 0:
                    wanted = 1.0
                    if k > 0:
                        slow += pair_compute[k, traffic_class[op]] - 1.0
                        wanted = 1.0 / pair_collective[k, traffic_class[op]]
                    if num_comms[r] > 1:
                        beside = 1.0
                        for q in range(first + 1, first + streams_per_rank):
                            if q != s and running[q] >= 0 and traffic_class[running[q]] > 0:
                                beside += shared[s - first, q - first] - 1.0
                        wanted /= beside
                    if wanted != rate[s]:
                        remaining[s] = max(0.0, remaining[s] - (now - since[s]) * rate[s])
                        since[s] = now
                        rate[s] = wanted
                        key[s] = now + remaining[s] / wanted
                        _settle(heap, where, key, size, where[s])
            if k > 0 and 1.0 / slow != rate[first]:
                remaining[first] = max(0.0, remaining[first] - (now - since[first]) * rate[first])
                since[first] = now
                rate[first] = 1.0 / slow
                key[first] = now + remaining[first] * slow
                _settle(heap, where, key, size, where[first])
        if size == 0:
            break
        s = heap[0]
        now = key[s]
        has_hole = True  # the next stream to start takes the place of the one that has ended
        op = running[s]
        running[s] = -1
        end[op] = now
        done += 1
        r = s // streams_per_rank
        if traffic_class[op] > 0:
            num_comms[r] -= 1
        if (num_comms[r] > 0 or traffic_class[op] > 0) and changed[r] == 0:
            changed[r] = 1
            changed_ranks[num_changed] = r
            num_changed += 1
        todo[num_todo] = s
        num_todo += 1
        queued[s] = 1
        for j in range(succ_offsets[op], succ_offsets[op + 1]):
            d = succ_index[j]
            waits[d] -= 1
            if waits[d] == 0:
                q = stream[d]
                if queued[q] == 0:
                    queued[q] = 1
                    todo[num_todo] = q
                    num_todo += 1
    return done
