"""A coarser graph: runs of kernels between communications become one kernel each."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from echo_explore.graph.execution_graph import COLUMNS, ExecutionGraph, Floats, Ints
from echo_explore.graph.kinds import OpKind
from echo_explore.graph.timed import TimedGraph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coalesced:
    """A coarser graph, and where the rows of the fine one went.

    Attributes:
        timed: the coarse rows.
        row_of: (num_ops of the fine graph,) coarse row that a fine row is in.
    """

    timed: TimedGraph
    row_of: Ints


def coalesce(timed: TimedGraph, *, break_before: Collection[int] = (), break_after: Collection[int] = ()) -> Coalesced:
    """`timed` with every run of kernels as one row: what adds up is added up, the rest is from its longest kernel.

    A run ends at a row of another kind and where the phase changes, so that recomputation keeps its own rows.

    # Approximation: beside a collective the whole run is slowed like its longest kernel (either direction).

    Args:
        timed: the fine rows.
        break_before: rows that must start a run, because something outside waits at their start.
        break_after: rows that must end a run, because something outside waits for their end.
    """
    graph = timed.graph
    n = graph.num_ops
    if n == 0:
        return Coalesced(timed=timed, row_of=np.zeros(0, dtype=np.int64))
    starts = np.ones(n, dtype=np.bool_)
    same_phase = graph.phase[1:] == graph.phase[:-1]
    starts[1:] = ~(graph.is_compute[1:] & graph.is_compute[:-1] & same_phase)
    starts[list(break_before)] = True
    after = [row + 1 for row in break_after if row + 1 < n]
    starts[after] = True
    row_of = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    by_time = np.lexsort((-timed.time_s, row_of))
    longest = by_time[first]
    columns = {name: getattr(graph, name)[longest] for name in COLUMNS}
    for name in ("flop", "bytes_read", "bytes_written", "host_calls", "allocated_bytes", "freed_bytes"):
        columns[name] = np.add.reduceat(getattr(graph, name), first)
    columns["awaits"] = np.where(columns["awaits"] >= 0, row_of[columns["awaits"]], -1).astype(np.int32)
    columns["forward_op"] = np.full(first.shape, -1, dtype=np.int32)
    time_s = np.add.reduceat(timed.time_s, first)

    def mean_of(values: Floats) -> Floats:
        weighted = np.add.reduceat(timed.time_s * values, first)
        return np.where(time_s > 0, weighted / np.where(time_s > 0, time_s, 1.0), values[longest])

    offsets, index = _coarse_dependences(graph, row_of, first.shape[0])
    coarse = ExecutionGraph(
        **columns, dims=graph.dims[longest], dep_offsets=offsets, dep_index=index, strings=graph.strings
    )
    assert int((coarse.kind == OpKind.COLLECTIVE).sum()) == int(graph.is_collective.sum())
    pair_class = timed.pair_class[longest]
    return Coalesced(
        timed=TimedGraph(
            graph=coarse,
            time_s=time_s,
            sigma_log=mean_of(timed.sigma_log),
            pair_class=pair_class,
            straggler_fraction=mean_of(timed.straggler_fraction),
        ),
        row_of=row_of,
    )


def _coarse_dependences(
    graph: ExecutionGraph, row_of: Ints, num_rows: int
) -> tuple[Ints, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """CSR of the dependences between different coarse rows, each once."""
    reader = row_of[np.repeat(np.arange(graph.num_ops), np.diff(graph.dep_offsets))]
    read = row_of[graph.dep_index]
    pairs = np.unique(np.stack([reader, read], axis=1)[reader != read], axis=0)
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(pairs[:, 0], minlength=num_rows), out=offsets[1:])
    return offsets, pairs[:, 1].astype(np.int32)
