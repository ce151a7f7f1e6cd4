"""Every instant of a rank charged once, as a vector that adds up over blocks and periods."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from echo_explore.core.jit import jit
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.timeline.ops import Charge
from echo_explore.timeline.ports import NUM_CODES


class Column(IntEnum):
    """Entries of a charge vector, in seconds; those up to HOST add up to the time of the rank."""

    COMPUTE = 0
    OPTIMIZER = 1
    TENSOR = 2
    CONTEXT = 3
    EXPERT = 4
    DATA = 5
    PIPELINE = 6
    BUBBLE = 7
    HOST = 8
    RECOMPUTE = 9
    """Part of COMPUTE."""
    INTERFERENCE = 10
    """Part of COMPUTE."""
    STRAGGLER = 11
    """Part of COMPUTE."""


NUM_AXES = 5
"""Tensor, context, expert, data, pipeline."""
BUSY = 12
"""First of NUM_AXES columns: seconds of transfers from and to the rank by axis, exposed or not, each counted."""
CLASS_SIGMA = BUSY + NUM_AXES
"""First of NUM_CODES columns: charged seconds of kernels times the sigma of their log, by OpClass."""
AXIS_SIGMA = CLASS_SIGMA + NUM_CODES
"""First of NUM_AXES columns: charged seconds of transfers times the sigma of their log, by axis."""
CLASS_SLOWED = AXIS_SIGMA + NUM_AXES
"""First of NUM_CODES columns: seconds of INTERFERENCE by OpClass."""
NUM_COLUMNS = CLASS_SLOWED + NUM_CODES

_BODY, _RECOMPUTE, _OPTIMIZER, _MARK = (
    int(kind) for kind in (Charge.BODY, Charge.RECOMPUTE, Charge.OPTIMIZER, Charge.MARK)
)
_IN_COMPUTE, _IN_OPTIMIZER, _IN_RECOMPUTE, _IN_INTERFERENCE, _IN_STRAGGLER = (
    int(column)
    for column in (Column.COMPUTE, Column.OPTIMIZER, Column.RECOMPUTE, Column.INTERFERENCE, Column.STRAGGLER)
)  # compiled code wants plain numbers

# Levels of the sweep, the lowest present gets the instant. What waits inside a forward or backward comes before what
# runs beside it from outside, so that one whose charges are known beforehand is charged alike.
_BUSY, _IDLE = 0, 9
_LEVEL_OF: Ints = np.full(len(Charge), _IDLE, dtype=np.int64)
_LEVEL_OF[[Charge.BODY, Charge.KERNEL, Charge.RECOMPUTE, Charge.OPTIMIZER]] = _BUSY
_LEVEL_OF[[Charge.TENSOR, Charge.CONTEXT, Charge.EXPERT, Charge.LAUNCH]] = np.arange(1, 5)
_WAIT = 5
"""A transfer inside a pass is ready, and ranks of other kinds of replicas have not come."""
_LEVEL_OF[[Charge.DATA, Charge.PIPELINE, Charge.HOST]] = np.arange(6, _IDLE)
_AXIS_LEVELS: Ints = _LEVEL_OF[[Charge.TENSOR, Charge.CONTEXT, Charge.EXPERT, Charge.DATA, Charge.PIPELINE]]
_HOST_LEVELS: Ints = _LEVEL_OF[[Charge.LAUNCH, Charge.HOST]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RanOps:
    """Ops of all ranks as they ran; columns of shape (num_ops,).

    Attributes:
        start_s: start.
        end_s: end.
        charge: Charge.
        op_class: OpClass of a kernel.
        duration_s: alone.
        sigma_log: of duration_s.
        straggler_fraction: share of a kernel's time that the slowest GPU takes longer than the mean one.
        source: op of the pool that it is a copy of, -1 for others.
        body_of_source: (num_pool_ops,) row of the body table of an op of the pool.
        alone_s: (num_pool_ops,) duration of an op of the pool: a copy that takes longer has its body's charges grow.
        ready_s: when a transfer inside a pass could have started, had the ranks that it meets been as far; start_s of
            others.
        stream_first: (num_ranks * NUM_STREAMS + 1,) offsets of every stream into ...
        stream_order: ... the ops of all streams in order.
        incoming_first: (num_ranks + 1,) offsets of every rank into ...
        incoming: ... transfers of peers to it, by stream and in its order.
        stream: (num_ops,) stream of all ranks.
    """

    start_s: Floats
    end_s: Floats
    charge: Ints
    op_class: Ints
    duration_s: Floats
    sigma_log: Floats
    straggler_fraction: Floats
    source: Ints
    body_of_source: Ints
    alone_s: Floats
    ready_s: Floats
    stream_first: Ints
    stream_order: Ints
    incoming_first: Ints
    incoming: Ints
    stream: Ints


def charge_ranks(ops: RanOps, bodies: Floats, *, from_s: Floats, to_s: Floats) -> Floats:
    """Charges of all ranks, each between two instants, `(num_ranks, NUM_COLUMNS)`.

    Kernels of one rank never overlap each other. An instant without one goes to a transfer of the rank that is under
    way (tensor, context, expert), to the host if the rank waits for its launches, to the bubble if the rank is inside a
    pass and others have not come to a transfer of it, to other transfers (data, pipeline), to the host if it is busy,
    else to the bubble.

    Args:
        ops: of all ranks. Bodies must lie wholly inside or outside the window.
        bodies: (num_bodies, NUM_COLUMNS) charges of the bodies.
        from_s: (num_ranks,) start of the windows.
        to_s: (num_ranks,) their ends.
    """
    num_ranks = from_s.shape[0]
    charges = np.zeros((num_ranks, NUM_COLUMNS))
    num_of_body = np.zeros((num_ranks, bodies.shape[0]))
    busy, exclusive, weighted = (np.zeros((num_ranks, _IDLE + 1)) for _ in range(3))
    times = (ops.start_s, ops.end_s, ops.ready_s, ops.duration_s, ops.sigma_log, ops.straggler_fraction)
    kinds = (ops.charge, ops.op_class, ops.source, ops.body_of_source, ops.alone_s, _LEVEL_OF)
    streams = (ops.stream_first, ops.stream_order, ops.incoming_first, ops.incoming, ops.stream)
    _charge_all(times, kinds, streams, from_s, to_s, charges, num_of_body, busy, exclusive, weighted)
    charges += num_of_body @ bodies
    charges[:, Column.TENSOR : Column.TENSOR + NUM_AXES] += exclusive[:, _AXIS_LEVELS]
    charges[:, Column.HOST] += exclusive[:, _HOST_LEVELS].sum(axis=1)
    charges[:, Column.BUBBLE] += exclusive[:, _WAIT] + exclusive[:, _IDLE]
    charges[:, AXIS_SIGMA : AXIS_SIGMA + NUM_AXES] += weighted[:, _AXIS_LEVELS]
    charges[:, BUSY : BUSY + NUM_AXES] += busy[:, _AXIS_LEVELS]
    return charges


@jit
def _charge_all(
    times: tuple[Floats, Floats, Floats, Floats, Floats, Floats],
    kinds: tuple[Ints, Ints, Ints, Ints, Floats, Ints],
    streams: tuple[Ints, Ints, Ints, Ints, Ints],
    from_s: Floats,
    to_s: Floats,
    charges: Floats,
    num_of_body: Floats,
    busy: Floats,
    exclusive: Floats,
    weighted: Floats,
) -> None:
    """Charges of kernels, bodies that ran, and seconds by level, rank by rank; what `charge_ranks` adds up.

    Args:
        times: start_s, end_s, ready_s, duration_s, sigma_log, straggler_fraction of all ops.
        kinds: charge, op_class, source, body_of_source and alone_s, see `RanOps`; level of a Charge.
        streams: stream_first, stream_order, incoming_first, incoming, stream, see `RanOps`.
        from_s: (num_ranks,) start of the windows.
        to_s: (num_ranks,) their ends.
        charges: (num_ranks, NUM_COLUMNS) in and out: what kernels add.
        num_of_body: (num_ranks, num_bodies) in and out: bodies that ran.
        busy: (num_ranks, num_levels) in and out: seconds.
        exclusive: in and out: seconds that a level gets.
        weighted: in and out: these times sigma.
    """
    start, end, ready, duration, sigma_log, straggler_fraction = times
    charge, op_class, source, body_of_source, alone, level_of = kinds
    stream_first, stream_order, incoming_first, incoming, stream = streams
    num_ranks = from_s.shape[0]
    per_rank = (stream_first.shape[0] - 1) // num_ranks
    most = 0
    for r in range(num_ranks):
        own = stream_first[(r + 1) * per_rank] - stream_first[r * per_rank]
        most = max(most, own + incoming_first[r + 1] - incoming_first[r])
    low, high, sigma = np.empty(2 * most), np.empty(2 * most), np.empty(2 * most)
    level = np.empty(2 * most, np.int64)
    queue_first = np.empty(most + per_rank + 1, np.int64)
    for r in range(num_ranks):
        window_from, window_to = from_s[r], to_s[r]
        count = num_queues = 0
        queue_first[0] = 0
        first, split = stream_first[r * per_rank], stream_first[(r + 1) * per_rank]
        last = split + incoming_first[r + 1] - incoming_first[r]
        before = -1  # stream of the op before
        for position in range(first, last):
            is_own = position < split
            op = stream_order[position] if is_own else incoming[incoming_first[r] + position - split]
            if stream[op] != before or position == split:
                before = stream[op]
                if count > queue_first[num_queues]:
                    num_queues += 1
                    queue_first[num_queues] = count
            kind = charge[op]
            if kind == _MARK:
                continue
            begin, finish = max(start[op], window_from), min(end[op], window_to)
            if ready[op] < start[op]:
                wait, until = max(ready[op], window_from), min(start[op], window_to)
                if until > wait:
                    low[count], high[count], level[count], sigma[count] = wait, until, _WAIT, 0.0
                    count += 1
            if finish <= begin:
                continue
            took = finish - begin
            own_level = level_of[kind]
            busy[r, own_level] += took
            if kind == _BODY:
                num_of_body[r, body_of_source[source[op]]] += took / alone[source[op]]
            elif kind <= _OPTIMIZER:
                if kind == _OPTIMIZER:
                    charges[r, _IN_OPTIMIZER] += took
                else:
                    charges[r, _IN_COMPUTE] += took
                    charges[r, _IN_INTERFERENCE] += took - duration[op]
                    charges[r, _IN_STRAGGLER] += took * straggler_fraction[op]
                    charges[r, CLASS_SLOWED + op_class[op]] += took - duration[op]
                    if kind == _RECOMPUTE:
                        charges[r, _IN_RECOMPUTE] += took
                charges[r, CLASS_SIGMA + op_class[op]] += took * sigma_log[op]
            touches = count > queue_first[num_queues] and high[count - 1] == begin
            if touches and own_level == _BUSY and level[count - 1] == _BUSY:
                high[count - 1] = finish
                continue
            low[count], high[count], level[count], sigma[count] = begin, finish, own_level, sigma_log[op]
            count += 1
        if count > queue_first[num_queues]:
            num_queues += 1
            queue_first[num_queues] = count
        sweep(low, high, level, sigma, queue_first[: num_queues + 1], window_from, window_to, exclusive[r], weighted[r])


@jit
def sweep(
    low: Floats,
    high: Floats,
    level: Ints,
    sigma_log: Floats,
    queue_first: Ints,
    from_s: float,
    to_s: float,
    exclusive: Floats,
    weighted: Floats,
) -> None:
    """Give every instant to the lowest level that is open then; adds to `exclusive` and `weighted`, (num_levels,).

    Where several intervals of that level are open, the instant has the mean of their sigmas, so that windows add up.

    Args:
        low: start of each interval.
        high: its end.
        level: of each interval; the last level is idle.
        sigma_log: of each interval.
        queue_first: (num_queues + 1,) offsets of intervals that follow each other without overlap.
        from_s: start of the window, in which all intervals lie.
        to_s: its end.
        exclusive: in and out: seconds by level.
        weighted: in and out: seconds times sigma by level.
    """
    num_queues = queue_first.shape[0] - 1
    at = queue_first[:-1].copy()
    idle = exclusive.shape[0] - 1
    now = from_s
    while now < to_s:
        until = to_s
        winner, num_open, open_sigma = idle, 0, 0.0
        for q in range(num_queues):
            while at[q] < queue_first[q + 1] and high[at[q]] <= now:
                at[q] += 1
            i = at[q]
            if i == queue_first[q + 1]:
                continue
            if low[i] > now:
                until = min(until, low[i])
                continue
            until = min(until, high[i])
            if level[i] < winner:
                winner, num_open, open_sigma = level[i], 0, 0.0
            if level[i] == winner:
                num_open += 1
                open_sigma += sigma_log[i]
        exclusive[winner] += until - now
        weighted[winner] += (until - now) * open_sigma / max(num_open, 1)
        now = until
