"""Chakra traces: both ways, of others, and broken ones."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from echo_explore.core import SpecError
from echo_explore.core.versions import GRAPH_SCHEMA
from echo_explore.graph import (
    Axis,
    Collective,
    ExecutionGraph,
    OpKind,
    OpRow,
    RankTrace,
    build_graph,
    groups_of_rows,
    load_chakra,
    load_chakra_trace,
    save_chakra,
)
from echo_explore.graph.chakra_messages import (
    CommType,
    Node,
    NodeType,
    Value,
    messages,
    read_node,
    write_metadata,
    write_node,
)
from echo_explore.graph.rank_trace import facts_of
from tests.graph.support import check_references, graphs, op_rows, row_of, without_zeros


def written(path: Path, *nodes: Node) -> Path:
    path.write_bytes(write_metadata("0.0.4", {}) + b"".join(map(write_node, nodes)))
    return path


@given(rows=op_rows())
def test_every_row_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("chakra") / "trace.0.et"
    if not rows:
        return
    save_chakra(path, build_graph(rows))
    graph = load_chakra(path)
    assert [row_of(graph, i) for i in range(graph.num_ops)] == [without_zeros(row) for row in rows]


def test_the_wire_is_that_of_the_published_field_numbers(tmp_path: Path) -> None:
    """Bytes written by hand after et_def.proto: not by the code under test."""
    attr = bytes([0x0A, 7]) + b"num_ops" + bytes([0x48, 0x90, 0x03])  # name = 1; int64_val = 9: 400
    node = (
        bytes([0x08, 5, 0x12, 4]) + b"gemm" + bytes([0x18, 4])  # id = 5, name, type = COMP_NODE
        + bytes([0x2A, 2, 3, 4])  # data_deps = 5, packed
        + bytes([0x52, len(attr)]) + attr
    )  # fmt: skip
    data = memoryview(bytes([len(node)]) + node)
    (message,) = messages(data)
    read = read_node(data, message)
    assert (read.number, read.name, read.kind, read.data_deps) == (5, "gemm", NodeType.COMP, (3, 4))
    assert read.attrs == {"num_ops": 400}
    assert write_node(read) == bytes(data)


def test_a_trace_of_another_program(tmp_path: Path) -> None:
    """Numbers in any order, unpacked dependences on host nodes, a collective that a kernel needs."""
    path = written(
        tmp_path / "other.et",
        Node(number=40, name="gemm2", kind=NodeType.COMP, data_deps=(30,), attrs={"num_ops": 8, "tensor_size": 64}),
        Node(number=10, name="aten::mm", kind=NodeType.COMP, attrs={"is_cpu_op": True}),
        Node(number=20, name="gemm", kind=NodeType.COMP, ctrl_deps=(10,), attrs={"num_ops": 16}),
        Node(
            number=30, name="nccl:all_reduce", kind=NodeType.COMM_COLL, data_deps=(20,),
            attrs={"comm_type": int(CommType.ALL_REDUCE), "comm_size": 4096, "pg_name": "tensor"},
        ),
        Node(number=50, name="send", kind=NodeType.COMM_SEND, attrs={"comm_size": 7}),
    )  # fmt: skip
    graph = load_chakra(path)
    check_references(graph)
    names = [graph.strings[i] for i in graph.name]
    assert names == ["gemm", "nccl:all_reduce", "wait", "gemm2", "send"]
    assert graph.flop.tolist() == [16, 0, 0, 8, 0]
    assert graph.collective.tolist() == [0, Collective.ALL_REDUCE, 0, 0, Collective.SEND]
    assert graph.message_bytes.tolist() == [0, 4096, 0, 0, 7]
    assert graph.awaits.tolist() == [-1, -1, 1, -1, -1]


def peers() -> RankTrace:
    """A stage between two others, with a group beside."""
    common: dict[str, Any] = {"kind": OpKind.COLLECTIVE, "axis": Axis.PIPELINE, "message_bytes": 8.0}
    rows = [
        OpRow(collective=Collective.RECV, **common), OpRow(name="gemm", deps=(0,)),
        OpRow(collective=Collective.SEND, deps=(1,), **common),
        OpRow(kind=OpKind.COLLECTIVE, collective=Collective.ALL_REDUCE, axis=Axis.DATA, message_bytes=16.0),
    ]  # fmt: skip
    groups, group_of_row = groups_of_rows([(1, 5), None, (5, 9), (4, 5, 6, 7)])
    return RankTrace(
        graph=build_graph(rows), rank=5, world_size=12, groups=groups, group_of_row=group_of_row,
        peak_memory_bytes=0.1 + 0.2, versions={"torch": "2.13.0"}, oracles=({"what": "item", "assumed": 1.0},),
    )  # fmt: skip


def test_a_trace_of_a_rank_comes_back_with_its_peers(tmp_path: Path) -> None:
    save_chakra(tmp_path / "stage.5.et", peers())
    back = load_chakra_trace(tmp_path / "stage.5.et")
    assert back is not None
    assert facts_of(back) == facts_of(peers())
    assert [row_of(back.graph, i) for i in range(4)] == [row_of(peers().graph, i) for i in range(4)]
    save_chakra(tmp_path / "again.et", back)
    assert (tmp_path / "again.et").read_bytes() == (tmp_path / "stage.5.et").read_bytes()


def test_consumers_find_peers_where_they_look(tmp_path: Path) -> None:
    """int32_val = 7 for the ranks, uint64_val = 13 for the bytes of a kernel."""
    save_chakra(tmp_path / "stage.5.et", peers())
    raw = (tmp_path / "stage.5.et").read_bytes()
    for name, value in (
        (b"comm_src", bytes([0x38, 1])),
        (b"comm_dst", bytes([0x38, 5])),
        (b"comm_dst", bytes([0x38, 9])),
    ):
        assert bytes([0x0A, len(name)]) + name + value in raw
    assert bytes([0x0A, 11]) + b"tensor_size" + bytes([0x68, 0]) in raw


@pytest.mark.parametrize(("name", "rank"), [("theirs.et", 5), ("theirs.5.et", 5)])
def test_peers_of_another_program(tmp_path: Path, name: str, rank: int) -> None:
    ranks: list[dict[str, Value]] = [{"comm_src": 1, "comm_dst": 5}, {"comm_src": 5, "comm_dst": 9}]
    path = written(
        tmp_path / name,
        Node(number=0, name="recv", kind=NodeType.COMM_RECV, attrs={"comm_size": 4096, **ranks[0]}),
        Node(number=1, name="gemm", kind=NodeType.COMP, data_deps=(0,), attrs={"num_ops": 8}),
        Node(number=2, name="send", kind=NodeType.COMM_SEND, data_deps=(1,), attrs={"comm_size": 4096, **ranks[1]}),
    )  # fmt: skip
    trace = load_chakra_trace(path)
    assert trace is not None
    assert (trace.rank, trace.world_size, trace.groups) == (rank, 10, ((1, 5), (5, 9)))
    sends = trace.graph.collective == Collective.SEND
    assert [trace.groups[group] for group in trace.group_of_row[sends]] == [(5, 9)]


def test_a_file_of_another_rank_than_its_name_says(tmp_path: Path) -> None:
    node = Node(number=0, name="send", kind=NodeType.COMM_SEND, attrs={"comm_src": 1, "comm_dst": 5})
    with pytest.raises(SpecError, match="is of rank 7 by its name, but its transfers are not"):
        load_chakra_trace(written(tmp_path / "x.7.et", node))


@given(graph=graphs(max_size=6))
def test_a_cut_file_says_where_it_breaks(tmp_path_factory: pytest.TempPathFactory, graph: ExecutionGraph) -> None:
    folder = tmp_path_factory.mktemp("chakra")
    save_chakra(folder / "whole.et", graph)
    data = (folder / "whole.et").read_bytes()
    cut = folder / "cut.et"
    ends, at = set(), 0
    for message in messages(memoryview(data)):
        at = message.stop
        ends.add(at)
    for size in range(1, len(data), max(len(data) // 20, 1)):
        cut.write_bytes(data[:size])
        if size in ends and size != min(ends):
            continue  # whole nodes
        with pytest.raises(SpecError, match=r"Chakra trace.*(byte \d+: |without nodes)"):
            load_chakra(cut)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b'{"traceEvents": []}', "is JSON"),
        (b'{\n  "a": 1}', "is JSON"),
        (b"PK\x03\x04....", "is a zip or NumPy archive"),
        (b"\x1f\x8b\x08", "is a gzip file"),
        (b"hello, this is no trace at all" * 5, "is no Chakra trace: byte"),
        (bytes(range(200, 256)), "is no Chakra trace: byte"),
    ],
)
def test_another_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(data)
    with pytest.raises(SpecError, match=message):
        load_chakra(path)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([Node(number=1, name="a", kind=NodeType.COMP, data_deps=(9,))], r"node 1 \(a\) depends on node 9"),
        ([Node(number=1, name="a", kind=NodeType.COMP, data_deps=(1,))], r"node 1 \(a\) depends on itself"),
        (
            [
                Node(number=n, name=f"op{n}", kind=NodeType.COMP, data_deps=(d,))
                for n, d in ((5, 0), (0, 2), (2, 1), (1, 0))
            ],
            r"node 0 \(op0\) depends on itself: on node 2 \(op2\), which depends on node 1 \(op1\), which depends on "
            r"node 0",
        ),
        ([Node(number=1, name=n, kind=NodeType.COMP) for n in "ab"], r"node 1 \(a\) has an id that another"),
        (
            [Node(number=3, name="g", kind=NodeType.COMM_COLL, attrs={"comm_type": 3})],
            r"node 3 \(g\) has comm_type = 3",
        ),
        ([Node(number=1, name="a", kind=NodeType.COMP, attrs={"num_ops": "x"})], r"node 1 \(a\) has num_ops = 'x'"),
    ],
)
def test_a_wrong_node_is_named(tmp_path: Path, nodes: list[Node], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_chakra(written(tmp_path / "x.et", *nodes))


def test_values_of_every_attribute_type() -> None:
    attrs: dict[str, Value] = {
        "b": True, "i": -5, "d": 0.1, "s": "ä", "y": b"\x00", "is": (1, -2, 2**40), "ss": ("a", ""), "ds": (0.5, 2.0),
    }  # fmt: skip
    data = memoryview(write_node(Node(number=0, name="", kind=NodeType.COMP, attrs=attrs)))
    (message,) = messages(data)
    assert read_node(data, message).attrs == attrs


@pytest.mark.parametrize(
    ("attrs", "shown"),
    [
        ({"echo.flop": float("nan")}, "echo.flop = nan"),
        ({"echo.bytes_read": -5.0}, r"echo.bytes_read = -5.0"),
        ({"echo.message_bytes": float("inf")}, "echo.message_bytes = inf"),
        ({"echo.layer": 2**40}, "echo.layer = 1099511627776"),
        ({"echo.awaits": 7}, "echo.awaits = 7"),
        ({"echo.forward_op": -2}, "echo.forward_op = -2"),
        ({"echo.dims": tuple(range(40))}, r"echo.dims = \(0, 1, .*"),
    ],
)
def test_a_value_that_no_column_holds_is_named(tmp_path: Path, attrs: dict[str, Value], shown: str) -> None:
    """In a file of our own whose numbers were damaged."""
    path = tmp_path / "x.et"
    node = write_node(Node(number=0, name="a", kind=NodeType.COMP, attrs=attrs))
    path.write_bytes(write_metadata("0.0.4", {"echo.schema": GRAPH_SCHEMA}) + node)
    with pytest.raises(SpecError, match=rf"node 0 \(a\) has {shown}, which no column holds"):
        load_chakra(path)


@pytest.mark.parametrize(
    ("kind", "attrs", "message"),
    [
        (NodeType.COMP, {"num_ops": float("nan")}, "num_ops = nan, not a number of 0 or more"),
        (NodeType.COMM_SEND, {"comm_src": 1, "comm_dst": 1}, "goes from rank 1 to rank 1, which no transfer does"),
        (NodeType.COMM_SEND, {"comm_src": 0.5, "comm_dst": 1}, "goes from rank 0.5 to rank 1"),
        (NodeType.COMM_RECV, {"comm_src": 2**62, "comm_dst": 1}, "goes from rank 4.6.*e.18 to rank 1"),
        (NodeType.METADATA, {}, "has 1 nodes, all of kind METADATA"),
    ],
)
def test_amounts_and_ranks_of_another_program(
    tmp_path: Path, kind: NodeType, attrs: dict[str, Value], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        load_chakra(written(tmp_path / "x.et", Node(number=1, name="a", kind=kind, attrs=attrs)))


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b"\xff" * 8 + b"\x7f", r"a message of 9223372036854775807 bytes begins, 0 are left"),
        (b"\xff" * 12, "a number is longer than 10 bytes"),
        (b"\x0b\x12" + b"\xff" * 8 + b"\x7f\x01", "field 2 needs 9223372036854775807 bytes, 1 are left"),
        (b"\x02\x0b\x01", "field 1 has the unknown wire type 3"),
    ],
)
def test_lengths_that_no_file_has(tmp_path: Path, tail: bytes, message: str) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(write_metadata("0.0.4", {}) + tail)
    with pytest.raises(SpecError, match=rf"breaks after 0 nodes: byte \d+: {message}"):
        load_chakra(path)
