"""Coarser graphs: nothing is lost, nothing points forward, rows that others wait for stay apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import ExecutionGraph, OpKind, OpRow, Phase, TimedGraph, build_graph
from echo_explore.graph.coalesce import coalesce
from tests.graph.support import graphs


def _timed(graph: ExecutionGraph) -> TimedGraph:
    time_s = np.where(graph.is_compute | graph.is_collective, 1.0 + np.arange(graph.num_ops), 0.0)
    return TimedGraph(graph=graph, time_s=time_s, sigma_log=np.full(graph.num_ops, 0.1))


@given(graphs(max_size=20), st.data())
def test_certificate(graph: ExecutionGraph, data: st.DataObject) -> None:
    rows = st.lists(st.integers(0, max(graph.num_ops - 1, 0)), max_size=2) if graph.num_ops else st.just([])
    before, after = data.draw(rows), data.draw(rows)
    fine = _timed(graph)
    coarse = coalesce(fine, break_before=before, break_after=after)
    merged, row_of = coarse.timed.graph, coarse.row_of
    assert coarse.timed.time_s.sum() == pytest.approx(fine.time_s.sum())
    for name in ("flop", "bytes_read", "bytes_written", "message_bytes", "host_calls"):
        assert getattr(merged, name).sum() == pytest.approx(getattr(graph, name).sum())
    assert np.array_equal(row_of, np.sort(row_of))
    assert row_of.size == graph.num_ops
    assert np.array_equal(merged.kind[row_of], graph.kind) if graph.num_ops else merged.num_ops == 0
    assert np.array_equal(merged.phase[row_of], graph.phase) if graph.num_ops else True
    for reader in range(graph.num_ops):
        for read in graph.dep_index[graph.dep_offsets[reader] : graph.dep_offsets[reader + 1]].tolist():
            if row_of[read] != row_of[reader]:
                deps = merged.dep_index[merged.dep_offsets[row_of[reader]] : merged.dep_offsets[row_of[reader] + 1]]
                assert row_of[read] in deps
    for row in before:
        assert row == 0 or row_of[row] != row_of[row - 1]
    for row in after:
        assert row == graph.num_ops - 1 or row_of[row] != row_of[row + 1]
    waits = np.flatnonzero(graph.kind == OpKind.WAIT)
    assert np.array_equal(merged.awaits[row_of[waits]], row_of[graph.awaits[waits]])


def test_runs_of_kernels_become_one() -> None:
    kernel, send = OpRow(flop=1.0), OpRow(kind=OpKind.COLLECTIVE, message_bytes=1.0)
    again = OpRow(flop=1.0, phase=Phase.RECOMPUTE)
    coarse = coalesce(_timed(build_graph([kernel, kernel, send, kernel, again, again])))
    assert coarse.row_of.tolist() == [0, 0, 1, 2, 3, 3]
    assert coarse.timed.graph.flop.tolist() == [2.0, 0.0, 1.0, 2.0]


def test_an_empty_graph_stays() -> None:
    assert coalesce(_timed(build_graph([]))).timed.graph.num_ops == 0
