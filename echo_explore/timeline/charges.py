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
_BUSY, _IDLE = 0, 8
_LEVEL_OF: Ints = np.full(len(Charge), _IDLE, dtype=np.int64)
_LEVEL_OF[[Charge.BODY, Charge.KERNEL, Charge.RECOMPUTE, Charge.OPTIMIZER]] = _BUSY
_LEVEL_OF[[Charge.TENSOR, Charge.CONTEXT, Charge.EXPERT, Charge.LAUNCH, Charge.DATA, Charge.PIPELINE, Charge.HOST]] = (
    np.arange(1, _IDLE)
)
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
        own: by rank, its ops.
        incoming: by rank, transfers of peers to it.
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
    own: tuple[Ints, ...]
    incoming: tuple[Ints, ...]


def charge_rank(ops: RanOps, rank: int, bodies: Floats, *, from_s: float, to_s: float) -> Floats:
    """Charges of a rank between two instants, `(NUM_COLUMNS,)`.

    Kernels of one rank never overlap each other. An instant without one goes to a transfer of the rank that is under
    way (tensor, context, expert), to the host if the rank waits for its launches, to other transfers (data, pipeline),
    else to the host if it launches, else to the bubble.

    Args:
        ops: of all ranks. Bodies must lie wholly inside or outside the window.
        rank: the rank.
        bodies: (num_bodies, NUM_COLUMNS) charges of the bodies.
        from_s: start of the window.
        to_s: end of the window.
    """
    own, incoming = ops.own[rank], ops.incoming[rank]
    charges = np.zeros(NUM_COLUMNS)
    num_of_body = np.zeros(bodies.shape[0])
    most = own.shape[0] + incoming.shape[0]
    times, levels, sigmas = np.empty(2 * most), np.empty(most, np.int64), np.empty(most)
    busy, exclusive, weighted = np.zeros(_IDLE + 1), np.zeros(_IDLE + 1), np.zeros(_IDLE + 1)
    columns = (
        ops.start_s,
        ops.end_s,
        ops.charge,
        ops.op_class,
        ops.duration_s,
        ops.sigma_log,
        ops.straggler_fraction,
    )
    body_of = (ops.source, ops.body_of_source, ops.alone_s)
    n = _collect(
        own, incoming, columns, body_of, from_s, to_s, _LEVEL_OF, charges, num_of_body, busy, times, levels, sigmas
    )
    if num_of_body.any():
        charges += num_of_body @ bodies
    time = times[: 2 * n]
    sweep(time, time.argsort(kind="stable"), levels, sigmas, from_s, to_s, exclusive, weighted)
    charges[Column.TENSOR : Column.TENSOR + NUM_AXES] += exclusive[_AXIS_LEVELS]
    charges[Column.HOST] += exclusive[_HOST_LEVELS].sum()
    charges[Column.BUBBLE] += exclusive[_IDLE]
    charges[AXIS_SIGMA : AXIS_SIGMA + NUM_AXES] += weighted[_AXIS_LEVELS]
    charges[BUSY : BUSY + NUM_AXES] += busy[_AXIS_LEVELS]
    return charges


@jit
def _collect(
    own: Ints,
    incoming: Ints,
    columns: tuple[Floats, Floats, Ints, Ints, Floats, Floats, Floats],
    body_of: tuple[Ints, Ints, Floats],
    from_s: float,
    to_s: float,
    level_of: Ints,
    charges: Floats,
    num_of_body: Floats,
    busy: Floats,
    times: Floats,
    levels: Ints,
    sigmas: Floats,
) -> int:
    """Number of intervals for the sweep; kernels that touch are one.

    Args:
        own: ops of the rank.
        incoming: transfers of others to it.
        columns: start_s, end_s, charge, op_class, duration_s, sigma_log and straggler_fraction of all ops.
        body_of: source, body_of_source and alone_s, see `RanOps`.
        from_s: start of the window.
        to_s: its end.
        level_of: level of a Charge.
        charges: in and out: what kernels add.
        num_of_body: in and out: bodies that ran.
        busy: in and out: seconds by level.
        times: out: start and end of each interval in turn.
        levels: out: of each interval.
        sigmas: out: of each interval.
    """
    start, end, charge, op_class, duration, sigma_log, straggler_fraction = columns
    source, body_of_source, alone = body_of
    last_kernel = -1
    count = 0
    for position in range(own.shape[0] + incoming.shape[0]):
        op = own[position] if position < own.shape[0] else incoming[position - own.shape[0]]
        low = min(max(start[op], from_s), to_s)
        high = min(max(end[op], from_s), to_s)
        kind = charge[op]
        if kind == _MARK or high <= low:
            continue
        took = high - low
        level = level_of[kind]
        busy[level] += took
        if kind == _BODY:
            num_of_body[body_of_source[source[op]]] += took / alone[source[op]]
        elif kind <= _OPTIMIZER:
            if kind == _OPTIMIZER:
                charges[_IN_OPTIMIZER] += took
            else:
                charges[_IN_COMPUTE] += took
                charges[_IN_INTERFERENCE] += took - duration[op]
                charges[_IN_STRAGGLER] += took * straggler_fraction[op]
                charges[CLASS_SLOWED + op_class[op]] += took - duration[op]
                if kind == _RECOMPUTE:
                    charges[_IN_RECOMPUTE] += took
            charges[CLASS_SIGMA + op_class[op]] += took * sigma_log[op]
        if level == _BUSY:
            if last_kernel >= 0 and times[2 * last_kernel + 1] == low:
                times[2 * last_kernel + 1] = high
                continue
            last_kernel = count
        times[2 * count] = low
        times[2 * count + 1] = high
        levels[count] = level
        sigmas[count] = sigma_log[op]
        count += 1
    return count


@jit
def sweep(
    time: Floats,
    order: Ints,
    level: Ints,
    sigma_log: Floats,
    from_s: float,
    to_s: float,
    exclusive: Floats,
    weighted: Floats,
) -> None:
    """Give every instant to the lowest level that is open then; fills `exclusive` and `weighted`, (num_levels,).

    Where several intervals of that level are open, the instant has the mean of their sigmas, so that windows add up.

    Args:
        time: (2 n,) start and end of n intervals in turn.
        order: (2 n,) that sorts them.
        level: (n or more,) of each interval; the last level is idle.
        sigma_log: (n or more,) of each interval.
        from_s: start of the window.
        to_s: its end.
        exclusive: out: seconds by level.
        weighted: out: seconds times sigma by level.
    """
    n = time.shape[0] // 2
    num_levels = exclusive.shape[0]
    num_open = np.zeros(num_levels, np.int64)
    open_sigma = np.zeros(num_levels)
    num_open[num_levels - 1] = 1
    now = from_s
    for position in range(2 * n + 1):
        until = to_s if position == 2 * n else time[order[position]]
        if until > now:
            winner = 0
            while num_open[winner] == 0:
                winner += 1
            exclusive[winner] += until - now
            weighted[winner] += (until - now) * max(open_sigma[winner] / num_open[winner], 0.0)
            now = until
        if position < 2 * n:
            i = order[position] // 2
            if order[position] % 2 == 0:
                num_open[level[i]] += 1
                open_sigma[level[i]] += sigma_log[i]
            else:
                num_open[level[i]] -= 1
                open_sigma[level[i]] -= sigma_log[i]
                if num_open[level[i]] == 0:
                    open_sigma[level[i]] = 0.0
