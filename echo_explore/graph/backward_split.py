"""The rows of a backward apart: those that lead to the gradient of its input, and those only weights need.

# Approximation: a kernel that makes both (the backward of a norm) counts as leading to the input (the input pass is
# over-estimated, the weight pass under-estimated by the same).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.graph.execution_graph import COLUMNS, ExecutionGraph, Ints
from echo_explore.graph.kinds import OpKind, Phase

Mask = npt.NDArray[np.bool_]


def input_rows(graph: ExecutionGraph) -> Mask:
    """(num_ops,) whether a row of the backward of one piece leads to the gradient of the piece's input.

    Every result of a backward that no other row of it reads is a gradient of a weight or that of the input. The latter
    comes at the end of the chain through all the piece's operators, so it is the one with the most rows before it; on
    ties the one that reads most (it adds the gradient of a residual), then the first. Recomputation runs as a whole
    before what reads it, so its rows count as leading to the input; a wait goes with what it waits for.
    """
    n = graph.num_ops
    if n == 0:
        return np.zeros(0, dtype=np.bool_)
    before = np.zeros((n, n), dtype=np.bool_)
    is_read = np.zeros(n, dtype=np.bool_)
    for row in range(n):
        for read in graph.dep_index[graph.dep_offsets[row] : graph.dep_offsets[row + 1]].tolist():
            before[row] |= before[read]
            before[row, read] = True
            is_read[read] = True
    num_before = np.where(is_read, -1, before.sum(axis=1))
    last = int(np.lexsort((np.arange(n), -np.diff(graph.dep_offsets), -num_before))[0])
    leads: Mask = before[last].copy()
    leads[last] = True
    leads |= (graph.phase == Phase.RECOMPUTE) | (graph.kind == OpKind.HOST_SYNC)
    is_wait = (graph.kind == OpKind.WAIT) & (graph.awaits >= 0)
    leads[is_wait] = leads[graph.awaits[is_wait]]
    return leads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selected:
    """Some rows of a graph as a graph.

    Attributes:
        graph: those rows, in their order; what they read of other rows is left out.
        rows: (num_ops,) their numbers in the graph they come from.
    """

    graph: ExecutionGraph
    rows: Ints


def select_rows(graph: ExecutionGraph, mask: Mask) -> Selected:
    """The rows of `graph` where `mask` is true; a wait must be chosen together with what it waits for."""
    rows = np.flatnonzero(mask).astype(np.int64)
    number = np.full(graph.num_ops + 1, -1, dtype=np.int64)
    number[rows] = np.arange(rows.shape[0])
    columns = {name: getattr(graph, name)[rows] for name in COLUMNS}
    for name in ("awaits", "forward_op"):
        columns[name] = number[columns[name]].astype(np.int32)
    reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.dep_offsets))
    kept = mask[reader] & mask[graph.dep_index]
    counts = np.bincount(number[reader[kept]], minlength=rows.shape[0]) if rows.size else np.zeros(0, dtype=np.int64)
    return Selected(
        graph=ExecutionGraph(
            **columns,
            dims=graph.dims[rows],
            dep_offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)]),
            dep_index=number[graph.dep_index[kept]].astype(np.int32),
            strings=graph.strings,
        ),
        rows=rows,
    )
