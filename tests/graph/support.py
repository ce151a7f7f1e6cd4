"""Random graphs that are well formed."""

from typing import Any

from hypothesis import strategies as st

from echo_explore.graph import (
    Axis,
    Collective,
    DType,
    ExecutionGraph,
    OpClass,
    OpKind,
    OpRow,
    Phase,
    build_graph,
)

texts = st.sampled_from(["", "aten.mm", "decoder.layers.N.mlp", "8x8->8x8", "ε"])
amounts = st.floats(0, 1e15)


@st.composite
def op_rows(draw: st.DrawFn, *, max_size: int = 12) -> list[OpRow]:
    """Rows whose references point to earlier rows."""
    rows: list[OpRow] = []
    for number in range(draw(st.integers(0, max_size))):
        earlier = st.integers(0, number - 1) if number else st.nothing()
        sent = [i for i, row in enumerate(rows) if row.kind == OpKind.COLLECTIVE]
        kinds = [OpKind.COMPUTE, OpKind.COMPUTE, OpKind.COLLECTIVE, OpKind.HOST_SYNC, *([OpKind.WAIT] if sent else [])]
        kind = draw(st.sampled_from(kinds))
        common: dict[str, Any] = {
            "kind": kind,
            "phase": draw(st.sampled_from(Phase)),
            "name": draw(texts),
            "module": draw(texts),
            "layer": draw(st.integers(-1, 3)),
            "deps": tuple(draw(st.lists(earlier, max_size=2, unique=True))) if number else (),
            "forward_op": draw(st.just(-1) | earlier) if number else -1,
            "host_calls": draw(st.integers(0, 5)),
            "source": draw(st.sampled_from(["", "train.py:7"])),
            "allocated_bytes": float(draw(st.integers(0, 2**40))),
            "freed_bytes": float(draw(st.integers(0, 2**40))),
        }
        if kind == OpKind.COMPUTE:
            common |= {"op_class": draw(st.sampled_from(OpClass)), "dtype": draw(st.sampled_from(DType))}
            common |= {"shapes": draw(texts), "dims": tuple(draw(st.lists(st.integers(0, 2**40), max_size=8)))}
            common |= {name: draw(amounts) for name in ("flop", "bytes_read", "bytes_written")}
        elif kind == OpKind.COLLECTIVE:
            common |= {"axis": draw(st.sampled_from(Axis)), "collective": draw(st.sampled_from(Collective))}
            common |= {"message_bytes": draw(amounts), "asynchronous": draw(st.booleans()), "stream": 1}
        elif kind == OpKind.WAIT:
            common["awaits"] = draw(st.sampled_from(sent))
        rows.append(OpRow(**common))
    return rows


def graphs(*, max_size: int = 12) -> st.SearchStrategy[ExecutionGraph]:
    """Graphs of such rows."""
    return op_rows(max_size=max_size).map(build_graph)


def row_of(graph: ExecutionGraph, number: int) -> OpRow:
    """A row of a graph as it was given; sizes with the zeros behind them cut off."""
    start, stop = int(graph.dep_offsets[number]), int(graph.dep_offsets[number + 1])
    dims = graph.dims[number].tolist()
    while dims and dims[-1] == 0:
        dims.pop()
    return OpRow(
        kind=OpKind(int(graph.kind[number])),
        op_class=OpClass(int(graph.op_class[number])),
        phase=Phase(int(graph.phase[number])),
        dtype=DType(int(graph.dtype[number])),
        name=graph.strings[graph.name[number]],
        module=graph.strings[graph.module[number]],
        shapes=graph.strings[graph.shapes[number]],
        layer=int(graph.layer[number]),
        micro_batch=int(graph.micro_batch[number]),
        chunk=int(graph.chunk[number]),
        dims=tuple(dims),
        flop=float(graph.flop[number]),
        bytes_read=float(graph.bytes_read[number]),
        bytes_written=float(graph.bytes_written[number]),
        axis=Axis(int(graph.axis[number])),
        collective=Collective(int(graph.collective[number])),
        message_bytes=float(graph.message_bytes[number]),
        asynchronous=bool(graph.asynchronous[number]),
        awaits=int(graph.awaits[number]),
        forward_op=int(graph.forward_op[number]),
        stream=int(graph.stream[number]),
        host_calls=int(graph.host_calls[number]),
        source=graph.strings[graph.source[number]],
        allocated_bytes=float(graph.allocated_bytes[number]),
        freed_bytes=float(graph.freed_bytes[number]),
        deps=tuple(graph.dep_index[start:stop].tolist()),
    )


def without_zeros(row: OpRow) -> OpRow:
    """The row with the zeros behind its sizes cut off."""
    dims = list(row.dims)
    while dims and dims[-1] == 0:
        dims.pop()
    row.dims = tuple(dims)
    return row


def check_references(graph: ExecutionGraph) -> None:
    """The certificate: dependences and waits point backwards, and waits at collectives."""
    assert graph.dep_offsets[0] == 0
    for number in range(graph.num_ops):
        row = row_of(graph, number)
        assert all(0 <= dep < number for dep in row.deps)
        assert row.forward_op < number
        if row.kind == OpKind.WAIT:
            assert 0 <= row.awaits < number
            assert graph.kind[row.awaits] == OpKind.COLLECTIVE
        else:
            assert row.awaits == -1
