"""Every instant of a rank charged once, as a vector that adds up over blocks and periods."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

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


NUM_EXCLUSIVE = 9
"""Columns that exclude each other."""
NUM_AXES = 5
"""Tensor, context, expert, data, pipeline."""
BUSY = 11
"""First of NUM_AXES columns: seconds of transfers by axis, exposed or not."""
CLASS_SIGMA = BUSY + NUM_AXES
"""First of NUM_CODES columns: charged seconds of kernels times the sigma of their log, by OpClass."""
AXIS_SIGMA = CLASS_SIGMA + NUM_CODES
"""First of NUM_AXES columns: charged seconds of transfers times the sigma of their log, by axis."""
NUM_COLUMNS = AXIS_SIGMA + NUM_AXES

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
class RankOps:
    """Ops of one rank as they ran, and the transfers of peers to it; columns of shape (num_ops,).

    Attributes:
        start_s: start.
        end_s: end.
        charge: Charge.
        op_class: OpClass of a kernel.
        duration_s: alone.
        sigma_log: of duration_s.
        body: row of the body table for a `Charge.BODY`, else -1.
        incoming: the op is a peer's transfer to this rank.
    """

    start_s: Floats
    end_s: Floats
    charge: Ints
    op_class: Ints
    duration_s: Floats
    sigma_log: Floats
    body: Ints
    incoming: npt.NDArray[np.bool_]


def charge_rank(ops: RankOps, bodies: Floats, *, from_s: float, to_s: float) -> Floats:
    """Charges between two instants, `(NUM_COLUMNS,)`.

    Kernels of one rank never overlap each other. An instant without one goes to a transfer of the rank that is under
    way (tensor, context, expert), to the host if the rank waits for its launches, to other transfers (data, pipeline),
    else to the host if it launches, else to the bubble.

    Args:
        ops: of the rank. Bodies must lie wholly inside or outside the window.
        bodies: (num_bodies, NUM_COLUMNS) charges of the bodies.
        from_s: start of the window.
        to_s: end of the window.
    """
    charges = np.zeros(NUM_COLUMNS)
    start = np.clip(ops.start_s, from_s, to_s)
    end = np.clip(ops.end_s, from_s, to_s)
    lasts = end > start
    is_body = (ops.charge == Charge.BODY) & lasts
    if is_body.any():
        charges += np.bincount(ops.body[is_body], minlength=bodies.shape[0]).astype(np.float64) @ bodies
    _charge_kernels(charges, ops, (end - start) * (~is_body & (ops.charge <= Charge.OPTIMIZER)))
    lasts &= ops.charge != Charge.MARK
    _charge_rest(charges, ops, start, end, np.flatnonzero(lasts), from_s=from_s, to_s=to_s)
    return charges


def _charge_kernels(charges: Floats, ops: RankOps, took: Floats) -> None:
    is_optimizer = ops.charge == Charge.OPTIMIZER
    in_optimizer = float(took[is_optimizer].sum())
    charges[Column.OPTIMIZER] += in_optimizer
    charges[Column.COMPUTE] += float(took[~is_optimizer].sum())
    charges[Column.RECOMPUTE] += float(took[ops.charge == Charge.RECOMPUTE].sum())
    slowed = np.where(is_optimizer | (took == 0), 0.0, took - ops.duration_s)
    charges[Column.INTERFERENCE] += float(slowed.sum())
    charges[CLASS_SIGMA : CLASS_SIGMA + NUM_CODES] += np.bincount(
        ops.op_class, weights=took * ops.sigma_log, minlength=NUM_CODES
    )


def _charge_rest(
    charges: Floats, ops: RankOps, start: Floats, end: Floats, rows: Ints, *, from_s: float, to_s: float
) -> None:
    level_of = _LEVEL_OF[ops.charge[rows]]
    time = np.concatenate([start[rows], end[rows]])
    exclusive, weighted = np.zeros(_IDLE + 1), np.zeros(_IDLE + 1)
    sweep(time, np.argsort(time, kind="stable"), level_of, ops.sigma_log[rows], from_s, to_s, exclusive, weighted)
    charges[Column.TENSOR : Column.TENSOR + NUM_AXES] += exclusive[_AXIS_LEVELS]
    charges[Column.HOST] += exclusive[_HOST_LEVELS].sum()
    charges[Column.BUBBLE] += exclusive[_IDLE]
    charges[AXIS_SIGMA : AXIS_SIGMA + NUM_AXES] += weighted[_AXIS_LEVELS]
    own = ~ops.incoming[rows]
    busy = np.bincount(level_of[own], weights=(end - start)[rows][own], minlength=_IDLE + 1)
    charges[BUSY : BUSY + NUM_AXES] += busy[_AXIS_LEVELS]


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
        time: (2 n,) starts of n intervals, then their ends.
        order: (2 n,) that sorts them.
        level: (n,) of each interval; the last level is idle.
        sigma_log: (n,) of each interval.
        from_s: start of the window.
        to_s: its end.
        exclusive: out: seconds by level.
        weighted: out: seconds times sigma by level.
    """
    n = level.shape[0]
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
            i = order[position]
            if i < n:
                num_open[level[i]] += 1
                open_sigma[level[i]] += sigma_log[i]
            else:
                num_open[level[i - n]] -= 1
                open_sigma[level[i - n]] -= sigma_log[i - n]
                if num_open[level[i - n]] == 0:
                    open_sigma[level[i - n]] = 0.0
