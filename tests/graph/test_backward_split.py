"""The rows that lead to the gradient of an input, and the rest."""

from functools import partial

import numpy as np

from echo_explore.graph import Axis, Collective, OpClass, OpKind, OpRow, Phase, build_graph, input_rows, select_rows


def linear_backward() -> list[OpRow]:
    """A linear layer behind a norm with a residual, as a framework runs its backward."""
    kernel = partial(OpRow, op_class=OpClass.GEMM, phase=Phase.BACKWARD)
    return [
        OpRow(kind=OpKind.COLLECTIVE, axis=Axis.TENSOR, collective=Collective.ALL_GATHER, asynchronous=True),
        kernel(name="gradient of the input"),
        OpRow(kind=OpKind.WAIT, awaits=0, deps=(0,)),
        kernel(name="gradient of the weight", deps=(0,), flop=3.0),
        OpRow(op_class=OpClass.GEMM, phase=Phase.RECOMPUTE, name="forward again"),
        kernel(name="norm", deps=(1,)),
        kernel(name="add to the weight's gradient", deps=(3,)),
        kernel(name="add to the norm's gradient", deps=(5,)),
        kernel(name="add the residual's gradient", deps=(1, 5)),
    ]


def test_input_rows_follow_the_dependences() -> None:
    leads = input_rows(build_graph(linear_backward()))
    assert np.flatnonzero(leads).tolist() == [1, 4, 5, 8]


def test_the_rest_is_a_graph_of_its_own() -> None:
    graph = build_graph(linear_backward())
    rest = select_rows(graph, ~input_rows(graph))
    assert rest.rows.tolist() == [0, 2, 3, 6, 7]
    assert rest.graph.awaits.tolist() == [-1, 0, -1, -1, -1]
    reads = [
        rest.graph.dep_index[a:b].tolist()
        for a, b in zip(rest.graph.dep_offsets, rest.graph.dep_offsets[1:], strict=False)
    ]
    assert reads == [[], [0], [0], [2], []]
    assert rest.graph.flop.sum() == 3.0


def test_nothing_is_lost_and_empty_graphs_pass() -> None:
    graph = build_graph(linear_backward())
    everything = select_rows(graph, np.ones(graph.num_ops, dtype=np.bool_)).graph
    assert everything.dep_index.tolist() == graph.dep_index.tolist()
    empty = build_graph([])
    assert select_rows(empty, input_rows(empty)).graph.num_ops == 0
