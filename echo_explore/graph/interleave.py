"""Two graphs run as one: exchanges of experts of either beside the kernels of the other."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.graph.execution_graph import COLUMNS, ExecutionGraph, Ints, concatenate
from echo_explore.graph.kinds import Axis, DType, OpKind
from echo_explore.graph.timed import TimedGraph

_COUNTS = (DType.INT64, DType.INT32, DType.INT8, DType.BOOL)


def exchanges(graph: ExecutionGraph) -> npt.NDArray[np.bool_]:
    """(num_ops,) Collectives that carry tokens to experts or back, and that the compute stream waits for."""
    on_axis = np.isin(graph.axis, (Axis.EXPERT, Axis.EXPERT_MODEL, Axis.EXPERT_TENSOR))
    mask: npt.NDArray[np.bool_] = graph.is_collective & on_axis & ~graph.asynchronous & ~np.isin(graph.dtype, _COUNTS)
    return mask


@dataclass(slots=True)
class _Cursor:
    """Where one of the graphs is: rows up to `at` are laid out, exchanges in `pending` are under way."""

    first: int
    is_exchange: npt.NDArray[np.bool_]
    at: int = 0
    pending: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        return self.at >= int(self.is_exchange.shape[0])

    def next_part(self) -> tuple[list[int], list[int]]:
        """Rows up to the next exchange, and the exchanges there that follow one another."""
        ahead = np.flatnonzero(self.is_exchange[self.at :])
        start = self.at + int(ahead[0]) if ahead.size else self.is_exchange.shape[0]
        end = start
        while end < self.is_exchange.shape[0] and self.is_exchange[end]:
            end += 1
        rows = list(range(self.first + self.at, self.first + start))
        self.at = end
        return rows, list(range(self.first + start, self.first + end))


def interleave(first: TimedGraph, second: TimedGraph) -> TimedGraph:
    """Both graphs as Megatron's combined forward and backward run them (pipeline_parallel/combined_1f1b.py, 0.16.1).

    The host goes through one up to its next exchange, starts that beside the compute stream, goes on with the other,
    and comes back where that has started one of its own; a graph waits for its exchange when it is its turn again.
    Layer by layer a combine of the backward then runs beside attention of the forward, a dispatch of the forward beside
    the experts of the backward, and the reverse. Dependences are left out: the timeline reads rows in order.
    """
    graph = concatenate([first.graph, second.graph])
    cursors = [
        _Cursor(first=0, is_exchange=exchanges(first.graph)),
        _Cursor(first=first.graph.num_ops, is_exchange=exchanges(second.graph)),
    ]
    take: list[int] = []
    is_wait: list[bool] = []

    def lay(rows: list[int] | tuple[int, ...], *, wait: bool = False) -> None:
        take.extend(rows)
        is_wait.extend([wait] * len(rows))

    turn = 0
    while True:
        cursor = cursors[turn]
        lay(cursor.pending, wait=True)
        cursor.pending = ()
        if not cursor.done:
            rows, started = cursor.next_part()
            lay(rows)
            lay(started)
            cursor.pending = tuple(started)
        other = cursors[1 - turn]
        if not other.done or other.pending:
            turn = 1 - turn
        elif cursor.done and not cursor.pending:
            break
    return _taken(first, second, graph, np.array(take, dtype=np.int64), np.array(is_wait, dtype=np.bool_))


def _taken(
    first: TimedGraph, second: TimedGraph, graph: ExecutionGraph, take: Ints, is_wait: npt.NDArray[np.bool_]
) -> TimedGraph:
    place = np.full(graph.num_ops + 1, -1, dtype=np.int64)  # the last entry stands for none
    place[take[~is_wait]] = np.flatnonzero(~is_wait)
    started = np.concatenate([exchanges(first.graph), exchanges(second.graph)])[take]
    columns = {name: getattr(graph, name)[take].copy() for name in COLUMNS}
    columns["awaits"] = np.where(is_wait, place[take], place[graph.awaits[take]]).astype(np.int32)
    columns["forward_op"][:] = -1
    columns["asynchronous"] |= started
    dims = graph.dims[take].copy()
    dims[is_wait] = 0
    amounts = ("message_bytes", "flop", "bytes_read", "bytes_written", "host_calls", "allocated_bytes", "freed_bytes")
    for name in ("axis", "collective", "dtype", *amounts):
        columns[name][is_wait] = 0
    columns["asynchronous"][is_wait] = False
    columns["kind"][is_wait] = OpKind.WAIT
    merged = ExecutionGraph(
        **columns,
        dims=dims,
        dep_offsets=np.zeros(take.shape[0] + 1, dtype=np.int64),
        dep_index=np.zeros(0, dtype=np.int32),
        strings=graph.strings,
    )

    def column(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        values = np.concatenate([getattr(first, name), getattr(second, name)])[take]
        return np.where(is_wait, 0, values)

    return TimedGraph(
        graph=merged,
        time_s=column("time_s"),
        sigma_log=column("sigma_log"),
        pair_class=column("pair_class").astype(np.int64),
        straggler_fraction=column("straggler_fraction"),
    )
