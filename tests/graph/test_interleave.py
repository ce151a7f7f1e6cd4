"""A forward and a backward run as one: nothing is lost, exchanges run beside the other graph."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import Axis, Collective, DType, OpKind, OpRow, Phase, TimedGraph, build_graph
from echo_explore.graph.interleave import exchanges, interleave
from tests.examples import examples


def timed(rows: list[OpRow]) -> TimedGraph:
    times = np.arange(1.0, len(rows) + 1)
    return TimedGraph(graph=build_graph(rows), time_s=times, sigma_log=np.full(len(rows), 0.1))


def exchange(name: str, dtype: DType = DType.BF16) -> OpRow:
    return OpRow(
        kind=OpKind.COLLECTIVE,
        name=name,
        axis=Axis.EXPERT,
        collective=Collective.ALL_TO_ALL,
        message_bytes=8.0,
        dtype=dtype,
    )


@st.composite
def graphs(draw: st.DrawFn, phase: Phase) -> TimedGraph:
    rows: list[OpRow] = []
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["kernel", "exchange", "counts", "sync"]))
        if kind == "exchange":
            rows.append(exchange(f"{phase.name}{number}"))
        elif kind == "counts":
            rows.append(exchange(f"{phase.name}{number}", DType.INT64))
        elif kind == "sync":
            awaits = draw(st.integers(-1, number - 1))
            rows.append(OpRow(kind=OpKind.HOST_SYNC, name=f"{phase.name}{number}", awaits=awaits))
        else:
            rows.append(OpRow(name=f"{phase.name}{number}", phase=phase, flop=float(number + 1), host_calls=2))
    return timed(rows)


@examples(200)
@given(graphs(Phase.BACKWARD), graphs(Phase.FORWARD))
def test_nothing_is_lost_and_each_keeps_its_order(first: TimedGraph, second: TimedGraph) -> None:
    merged = interleave(first, second)
    graph = merged.graph
    waits = graph.kind == OpKind.WAIT
    for one in (first, second):
        own = [one.graph.strings[i] for i in one.graph.name]
        names = [graph.strings[i] for i, wait in zip(graph.name, waits, strict=True) if not wait]
        assert [name for name in names if name in set(own)] == own
    assert (~waits).sum() == first.graph.num_ops + second.graph.num_ops
    assert merged.time_s.sum() == first.time_s.sum() + second.time_s.sum()
    assert graph.host_calls.sum() == first.graph.host_calls.sum() + second.graph.host_calls.sum()
    assert graph.flop.sum() == first.graph.flop.sum() + second.graph.flop.sum()
    moved = int(exchanges(first.graph).sum() + exchanges(second.graph).sum())
    assert waits.sum() == moved == (graph.asynchronous & graph.is_collective).sum()
    for row in np.flatnonzero(waits):
        assert graph.asynchronous[graph.awaits[row]]
        assert graph.awaits[row] < row
    for row in np.flatnonzero(graph.kind == OpKind.HOST_SYNC):
        assert graph.awaits[row] < row


def test_layers_go_as_in_the_combined_schedule() -> None:
    def row(name: str) -> OpRow:
        return OpRow(name=name)

    backward = timed(
        [row("b.post"), exchange("b.combine"), row("b.experts"), exchange("b.dispatch"), row("b.attention")]
    )
    forward = timed(
        [row("f.attention"), exchange("f.dispatch"), row("f.experts"), exchange("f.combine"), row("f.post")]
    )
    graph = interleave(backward, forward).graph
    said = [
        graph.strings[graph.name[graph.awaits[i]]] + " awaited"
        if graph.kind[i] == OpKind.WAIT
        else graph.strings[graph.name[i]]
        for i in range(graph.num_ops)
    ]
    assert said == [
        "b.post", "b.combine", "f.attention", "f.dispatch", "b.combine awaited", "b.experts", "b.dispatch",
        "f.dispatch awaited", "f.experts", "f.combine", "b.dispatch awaited", "b.attention", "f.combine awaited",
        "f.post",
    ]  # fmt: skip
