"""The rows of a graph in another order."""

from collections.abc import Sequence

import numpy as np

from echo_explore.graph.execution_graph import COLUMNS, ExecutionGraph


def reordered(graph: ExecutionGraph, order: Sequence[int]) -> ExecutionGraph:
    """The graph whose row i is row `order[i]` of `graph`, references included.

    Args:
        graph: any.
        order: every row once; what a row reads or awaits must come before it.
    """
    rows = np.asarray(order, dtype=np.int64)
    if not np.array_equal(np.sort(rows), np.arange(graph.num_ops)):
        raise ValueError("an order names every row once")
    number = np.full(graph.num_ops + 1, -1, dtype=np.int64)  # the last entry stands for no row
    number[rows] = np.arange(graph.num_ops)
    columns = {name: getattr(graph, name)[rows] for name in COLUMNS}
    for name in ("awaits", "forward_op"):
        columns[name] = number[columns[name]].astype(np.int32)
    counts = np.diff(graph.dep_offsets)[rows]
    read = [graph.dep_index[graph.dep_offsets[row] : graph.dep_offsets[row + 1]] for row in rows.tolist()]
    return ExecutionGraph(
        **columns,
        dims=graph.dims[rows],
        dep_offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)]),
        dep_index=number[np.concatenate([np.zeros(0, dtype=np.int64), *read])].astype(np.int32),
        strings=graph.strings,
    )
