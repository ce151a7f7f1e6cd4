"""Files of ExecutionTraceObserver as graphs: one made here on the CPU, one written by hand after its format."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_explore.calibration.observer_graph import read_observer_trace
from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective, DType, ExecutionGraph, OpClass, OpKind, Phase, RankTrace
from tests.graph.support import check_references

MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
GATHER = "c10d::_allgather_base_(Tensor output, Tensor input, ProcessGroup group, bool async_op=True) -> (Tensor, Work)"


def side(*tensors: tuple[int, int, list[int]]) -> dict[str, Any]:
    """Tensors in bf16 on the GPU: storage, offset in elements, shape."""
    values = [[0, storage, offset, int(np.prod(shape)), 2, "cuda:0"] for storage, offset, shape in tensors]
    shapes = [shape for _, _, shape in tensors]
    return {"values": values, "shapes": shapes, "types": ["Tensor(c10::BFloat16)"] * len(tensors), "strides": []}


def node(number: int, name: str, given: Any, got: Any, *, parent: int = 1, **attrs: Any) -> dict[str, Any]:
    listed = [{"name": key, "type": "", "value": value} for key, value in ({"rf_id": number} | attrs).items()]
    return {"id": number, "name": name, "ctrl_deps": parent, "inputs": given, "outputs": got, "attrs": listed}


def nodes() -> list[dict[str, Any]]:
    """A gather beside a product that does not need it, one that reads half of it, its backward, a view, an update."""
    groups = json.dumps([{"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 4}])
    text = {"values": [groups], "shapes": [[]], "types": ["String"], "strides": []}
    gather = side((2, 0, [8, 8]), (1, 0, [2, 8]))
    gather["values"] += ["<Object>", True]
    gather["shapes"] += [[], []]
    gather["types"] += ["Object", "Bool"]
    view = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
    update = "aten::_fused_adamw_(Tensor(a!)[] self, Tensor[] grads, *, float lr) -> ()"
    lists = {
        "values": [[[0, 4, 0, 32, 2, "cuda:0"]], [[0, 7, 0, 32, 2, "cuda:0"]]], "shapes": [[[4, 8]], [[4, 8]]],
        "types": ["GenericList[Tensor(c10::BFloat16)]"] * 2, "strides": [],
    }  # fmt: skip
    return [
        node(1, "[pytorch|profiler|execution_trace|process]", side(), side()),
        node(2, "## process_group:init ##", text, side()),
        node(3, "c10d::_allgather_base_", gather, side((2, 0, [8, 8])), op_schema=GATHER),
        node(
            4,
            "aten::linear",
            side((3, 0, [4, 8]), (4, 0, [8, 4])),
            side((5, 0, [4, 4])),
            op_schema="aten::linear() -> Tensor",
        ),
        node(
            5, "aten::mm", side((3, 0, [4, 8]), (4, 0, [8, 4])), side((5, 0, [4, 4])), parent=4, op_schema=MM, seq_id=9
        ),
        node(6, "aten::view", side((2, 0, [8, 8])), side((2, 32, [4, 8])), op_schema=view),
        node(7, "aten::mm", side((5, 0, [4, 4]), (2, 32, [4, 8])), side((6, 0, [4, 8])), op_schema=MM),
        node(8, "MmBackward0", side(), side(), scope=1, seq_id=9),
        node(9, "aten::mm", side((6, 0, [4, 8]), (3, 0, [8, 8])), side((7, 0, [4, 8])), parent=8, op_schema=MM),
        node(10, "Optimizer.step#AdamW.step", side(), side()),
        node(11, "aten::_fused_adamw_", lists, side(), parent=10, op_schema=update),
    ]


def write(path: Path, entries: object) -> Path:
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 7, "nodes": entries}), encoding="utf-8")
    return path


def deps(graph: ExecutionGraph, row: int) -> list[int]:
    found: list[int] = graph.dep_index[graph.dep_offsets[row] : graph.dep_offsets[row + 1]].tolist()
    return found


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    trace = read_observer_trace(write(tmp_path / "et.json", nodes()))
    assert isinstance(trace, RankTrace)
    assert (trace.groups, trace.world_size) == (((0, 1, 2, 3),), 4)
    graph = trace.graph
    check_references(graph)
    assert [graph.strings[i] for i in graph.name] == [
        "c10d::_allgather_base_", "aten::mm", "wait", "aten::mm", "aten::mm", "aten::_fused_adamw_",
    ]  # fmt: skip
    assert (graph.collective[0], graph.axis[0], graph.dtype[0]) == (Collective.ALL_GATHER, Axis.DATA, DType.BF16)
    assert (graph.message_bytes[0], graph.bytes_read[0], bool(graph.asynchronous[0])) == (128, 32, True)
    assert graph.awaits.tolist() == [-1, -1, 0, -1, -1, -1]
    assert [deps(graph, row) for row in (1, 3, 4, 5)] == [[], [0, 1], [3], [4]]
    assert graph.flop.tolist() == [0, 2 * 4 * 8 * 4, 0, 2 * 4 * 4 * 8, 2 * 4 * 8 * 8, 0]
    assert graph.phase.tolist() == [0, 0, 0, 0, Phase.BACKWARD, Phase.OPTIMIZER]
    assert graph.forward_op.tolist() == [-1, -1, -1, -1, 1, -1]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"id": 1}], r"breaks at entry 0 of nodes \(\?\): KeyError 'attrs'"),
        ([{**nodes()[0], "outputs": None}], r"breaks at entry 0 of nodes \(.*\): AttributeError"),
        ([*nodes(), 5], r"breaks at entry 11 of nodes \(5\)"),
        (nodes()[:2], "has 2 nodes, but no operator that does something"),
        (
            [*nodes()[:2], node(3, "c10d::gather_", side(), side(), op_schema="x() -> y")],
            "c10d::gather_.* no counterpart",
        ),
    ],
)
def test_broken_files(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        read_observer_trace(write(tmp_path / "et.json", entries))
    assert len(str(caught.value).splitlines()) == 1


def test_a_cut_file_says_where(tmp_path: Path) -> None:
    path = write(tmp_path / "et.json", nodes())
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(SpecError, match=r"is no JSON trace: .*\(char \d+\)"):
        read_observer_trace(path)


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "et.json", nodes())
    data = bytearray(gzip.compress(path.read_bytes()))
    data[len(data) // 2 : len(data) // 2 + 8] = b"\xff" * 8
    path.write_bytes(bytes(data))
    with pytest.raises(SpecError, match="is no JSON trace: its gzip stream is damaged or cut off"):
        read_observer_trace(path)


@pytest.mark.torch
def test_a_trace_of_this_cpu(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ExecutionTraceObserver

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "et.json"))
    observer.start()
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    observer.stop()
    observer.unregister_callback()
    trace = read_observer_trace(tmp_path / "et.json")
    assert isinstance(trace, RankTrace)
    graph = trace.graph
    check_references(graph)
    assert (trace.world_size, trace.groups) == (1, ())
    layer = 2 * 32 * 64 * 128
    product = graph.op_class == OpClass.GEMM
    assert graph.flop[product & (graph.phase == Phase.FORWARD)].tolist() == [layer, layer]
    backward = np.flatnonzero(product & (graph.phase == Phase.BACKWARD))
    assert graph.flop[backward].tolist() == [layer] * 3
    for row in backward:
        assert product[graph.forward_op[row]]
        assert graph.phase[graph.forward_op[row]] == Phase.FORWARD
    names = [graph.strings[i] for i in graph.name]
    assert "aten::sum" in names
    second = np.flatnonzero(product)[1]
    assert names[deps(graph, int(second))[0]] == "aten::gelu"
    assert (graph.phase == Phase.OPTIMIZER).any()
    assert not (graph.kind == OpKind.WAIT).any()
