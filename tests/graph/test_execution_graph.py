"""Graphs as columns: what goes in comes out; graphs joined; columns locked and checked."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import ExecutionGraph, OpRow, build_graph, concatenate
from echo_explore.graph.execution_graph import COLUMNS
from tests.graph.support import check_references, graphs, op_rows, row_of, without_zeros


@given(op_rows())
def test_round_trip(rows: list[OpRow]) -> None:
    graph = build_graph(rows)
    assert graph.num_ops == len(rows)
    assert [row_of(graph, i) for i in range(graph.num_ops)] == [without_zeros(row) for row in rows]
    check_references(graph)


@given(st.lists(graphs(max_size=6), min_size=1, max_size=4))
def test_joined_rows_are_the_rows_in_order(parts: list[ExecutionGraph]) -> None:
    joined = concatenate(parts)
    check_references(joined)
    start = 0
    for part in parts:
        for number in range(part.num_ops):
            row, whole = row_of(part, number), row_of(joined, start + number)
            row.deps = tuple(dep + start for dep in row.deps)
            row.awaits += start if row.awaits >= 0 else 0
            row.forward_op += start if row.forward_op >= 0 else 0
            assert whole == row
        start += part.num_ops
    assert joined.num_ops == start
    assert len(set(joined.strings)) == len(joined.strings)


@given(graphs(), graphs())
def test_layers_are_counted_on_where_there_is_one(one: ExecutionGraph, other: ExecutionGraph) -> None:
    joined = concatenate([one, other], layers=[7, 9])
    before = np.concatenate([one.layer, other.layer])
    wanted = np.repeat([7, 9], [one.num_ops, other.num_ops])
    assert np.array_equal(joined.layer, np.where(before >= 0, before + wanted, -1))


def test_every_column_is_an_array_and_a_row_field() -> None:
    arrays = {item.name for item in fields(ExecutionGraph)} - {"dims", "dep_offsets", "dep_index", "strings"}
    assert arrays == set(COLUMNS)
    assert {item.name for item in fields(OpRow)} == arrays | {"dims", "deps"}


def test_columns_are_locked() -> None:
    graph = build_graph([OpRow(flop=1.0)])
    with pytest.raises(ValueError, match="read-only"):
        graph.flop[0] = 2.0
    for name, dtype in COLUMNS.items():
        assert getattr(graph, name).dtype == dtype


def test_columns_of_another_length_are_refused() -> None:
    graph = build_graph([OpRow(), OpRow()])
    with pytest.raises(ValueError, match="column flop has shape"):
        replace(graph, flop=np.zeros(3))
    with pytest.raises(ValueError, match="dims has shape"):
        replace(graph, dims=np.zeros((2, 3), dtype=np.int64))
    with pytest.raises(ValueError, match="dep_offsets and dep_index"):
        replace(graph, dep_index=np.zeros(4, dtype=np.int32))


@given(graphs())
def test_every_row_has_a_text(graph: ExecutionGraph) -> None:
    assert all(graph.text(row).strip() for row in range(graph.num_ops))
