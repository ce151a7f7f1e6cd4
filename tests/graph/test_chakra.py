"""Chakra traces: both ways, of others, and broken ones."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from echo_explore.core import SpecError
from echo_explore.graph import Collective, ExecutionGraph, build_graph, load_chakra, save_chakra
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
