"""Files of graphs and traces."""

import zipfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from echo_explore.core import SpecError
from echo_explore.core.versions import GRAPH_SCHEMA
from echo_explore.graph import (
    Axis,
    Collective,
    ExecutionGraph,
    OpClass,
    OpKind,
    OpRow,
    Parameter,
    Piece,
    Trace,
    build_graph,
    load_graph,
    load_trace,
    save_graph,
    save_trace,
)


def graph(num_rows: int) -> ExecutionGraph:
    rows = [
        OpRow(
            op_class=OpClass.GEMM, name=f"op{i}", dims=(1, i, 2, 3), flop=1e9 + i, deps=tuple(range(max(0, i - 2), i))
        )
        for i in range(num_rows)
    ]
    if num_rows:
        rows.append(
            OpRow(
                kind=OpKind.COLLECTIVE,
                axis=Axis.TENSOR,
                collective=Collective.ALL_REDUCE,
                message_bytes=8.5,
                asynchronous=True,
            )
        )
        rows.append(OpRow(kind=OpKind.WAIT, awaits=num_rows))
    return build_graph(rows)


def trace() -> Trace:
    piece = Piece(
        forward=graph(5),
        backward=graph(9),
        parameters=(Parameter(name="weight", num_elements=12, tensor_sharded=True),),
        saved_bytes=1.0,
        forward_peak_bytes=2.0,
        backward_peak_bytes=3.5,
    )
    other = Piece(
        forward=graph(0),
        backward=graph(1),
        parameters=(),
        saved_bytes=0.0,
        forward_peak_bytes=0.0,
        backward_peak_bytes=0.0,
    )
    return Trace(
        key="0" * 32,
        request={"tensor_parallel": 8},
        pieces={"embedding": other, "layer.dense": piece},
        layer_kinds=("dense", "dense"),
        boundary_bytes=7.0,
        oracles=({"what": "item", "assumed": 1.0},),
        facts={"versions": {"torch": "2.13.0"}},
    )


def same(first: ExecutionGraph, second: ExecutionGraph) -> bool:
    return all(np.array_equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(ExecutionGraph))


@pytest.mark.parametrize("num_rows", [0, 1, 30])
def test_a_graph_comes_back(tmp_path: Path, num_rows: int) -> None:
    path = tmp_path / "graph.npz"
    save_graph(path, graph(num_rows), facts={"rank": 3})
    assert same(load_graph(path), graph(num_rows))


def test_a_trace_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(path, trace())
    loaded, expected = load_trace(path), trace()
    for name in ("key", "request", "layer_kinds", "boundary_bytes", "oracles", "facts"):
        assert getattr(loaded, name) == getattr(expected, name)
    assert list(loaded.pieces) == list(expected.pieces)
    for name, piece in expected.pieces.items():
        found = loaded.pieces[name]
        assert same(found.forward, piece.forward)
        assert same(found.backward, piece.backward)
        assert found.parameters == piece.parameters
        assert (found.saved_bytes, found.forward_peak_bytes) == (piece.saved_bytes, piece.forward_peak_bytes)
        assert found.backward_peak_bytes == piece.backward_peak_bytes


def test_equal_contents_make_equal_files(tmp_path: Path) -> None:
    for name in "ab":
        save_trace(tmp_path / name, trace())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("array", ["kind", "freed_bytes", "dep_index", "header"])
def test_a_changed_byte_is_noticed(tmp_path: Path, array: str) -> None:
    path = tmp_path / "trace.npz"
    save_trace(path, trace())
    with zipfile.ZipFile(path) as file:
        entry = file.getinfo(f"{array}.npy")
    data = bytearray(path.read_bytes())
    data[entry.header_offset + 30 + len(entry.filename) + entry.compress_size - 1] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(SpecError, match="is damaged"):
        load_trace(path)


def test_a_cut_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(path, trace())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpecError, match="is damaged") as caught:
        load_trace(path)
    assert str(caught.value).count("fix:") == 1


def test_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    save_graph(path, graph(2))
    with pytest.raises(SpecError, match=f"is a graph of schema {GRAPH_SCHEMA}, not a trace"):
        load_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.npz.*does not exist"):
        load_graph(tmp_path / "gone.npz")
