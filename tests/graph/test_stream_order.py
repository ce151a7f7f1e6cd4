"""Programs with several streams as one stream of kernels and asynchronous collectives."""

from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import Axis, Collective, OpClass, OpKind, OpRow, StreamJoin, build_graph, order_streams


def kernel(name: str, stream: int = 0, deps: tuple[int, ...] = ()) -> OpRow:
    return OpRow(op_class=OpClass.ELEMENTWISE, name=name, stream=stream, deps=deps)


def gather(name: str, stream: int, deps: tuple[int, ...] = ()) -> OpRow:
    return OpRow(
        kind=OpKind.COLLECTIVE, collective=Collective.ALL_GATHER, axis=Axis.DATA, name=name, stream=stream, deps=deps
    )


def names(rows: list[OpRow]) -> list[str]:
    return [row.name for row in rows]


def test_a_gather_of_another_stream_moves_up_to_what_it_waits_for() -> None:
    rows = [
        kernel("a"),
        kernel("b"),
        kernel("copy", 1),
        gather("gather", 2, (2,)),
        kernel("use", 0, (3,)),
    ]
    joins = [StreamJoin(at=2, waiting=1, awaited=0, last=0)]
    ordered = order_streams(rows, joins)
    assert names(ordered.rows) == ["a", "copy", "gather", "b", "wait", "use"]
    assert ordered.rows[2].asynchronous
    assert ordered.rows[4].awaits == 2
    assert ordered.rows[5].deps == (2,)
    assert ordered.origin == [0, 2, 3, 1, -1, 4]
    build_graph(ordered.rows)


def test_kernels_wait_for_a_collective_whose_result_they_read() -> None:
    rows = [kernel("a"), gather("reduce", 0, (0,)), kernel("b"), kernel("c", 0, (1,)), kernel("d", 0, (1,))]
    rows[1].asynchronous = True
    assert names(order_streams(rows, []).rows) == ["a", "reduce", "b", "wait", "c", "d"]


def test_a_stream_that_waits_for_another_waits_for_its_collective() -> None:
    rows = [kernel("a"), gather("reduce", 3, (0,)), kernel("b"), kernel("c")]
    joins = [StreamJoin(at=3, waiting=0, awaited=3, last=2)]
    assert names(order_streams(rows, joins).rows) == ["a", "reduce", "b", "wait", "c"]


def test_a_kernel_behind_a_collective_of_its_stream_runs_where_it_is_needed() -> None:
    rows = [kernel("a"), gather("reduce", 3, (0,)), kernel("add", 3, (1,)), kernel("b"), kernel("step", 0, (2,))]
    assert names(order_streams(rows, []).rows) == ["a", "reduce", "b", "wait", "add", "step"]


def test_a_gather_behind_a_wait_of_its_stream_comes_behind_what_that_waited_for() -> None:
    """Megatron-FSDP frees a gathered layer that nobody used, on the stream of gathers, and gathers the next one."""
    rows = [kernel("a"), gather("unused", 1), kernel("b"), OpRow(kind=OpKind.WAIT, name="join", stream=1, awaits=1)]
    joins = [StreamJoin(at=1, waiting=1, awaited=0, last=0), StreamJoin(at=3, waiting=1, awaited=0, last=2)]
    ordered = order_streams([*rows, gather("next", 1)], joins)
    assert names(ordered.rows) == ["a", "unused", "b", "wait", "next"]


def test_nothing_moves_over_a_wait_of_the_host() -> None:
    rows = [kernel("a"), OpRow(kind=OpKind.HOST_SYNC, name="item"), kernel("copy", 1), kernel("b")]
    assert names(order_streams(rows, []).rows) == ["a", "item", "copy", "b"]


@st.composite
def programs(draw: st.DrawFn) -> list[OpRow]:
    rows: list[OpRow] = []
    for index in range(draw(st.integers(1, 12))):
        stream = draw(st.integers(0, 3))
        deps = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=2)))) if index else ()
        make = gather if draw(st.booleans()) and stream else kernel
        rows.append(make(f"row {index}", stream, deps))
    return rows


@given(programs())
def test_every_row_is_there_once_and_after_what_it_reads(rows: list[OpRow]) -> None:
    ordered = order_streams(rows, [])
    assert sorted(i for i in ordered.origin if i >= 0) == list(range(len(rows)))
    place = {origin: at for at, origin in enumerate(ordered.origin)}
    for index, row in enumerate(rows):
        assert all(place[d] < place[index] for d in row.deps)
    main = [i for i in ordered.origin if i >= 0 and rows[i].stream == 0]
    assert main == sorted(main)
    waited: set[int] = set()
    for at, row in enumerate(ordered.rows):
        if row.kind is OpKind.WAIT:
            assert ordered.rows[row.awaits].kind is OpKind.COLLECTIVE
            assert row.awaits < at
            waited.add(row.awaits)
        elif row.kind is OpKind.COMPUTE:
            needed = {d for d in row.deps if ordered.rows[d].kind is OpKind.COLLECTIVE}
            assert needed <= waited
