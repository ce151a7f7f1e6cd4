"""Traces of PyTorch's profiler as graphs: one made here on the CPU, one written by hand after Kineto's format."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_explore.calibration.profiler_graph import measured_graph, read_profiler_graph
from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective, DType, ExecutionGraph, OpClass, OpKind, Phase
from tests.graph.support import check_references


def complete(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    arguments = {key.replace("_", " ") if key[0].isupper() else key: value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def launch(correlation: int, ts: float, name: str = "cudaLaunchKernel", tid: int = 1) -> dict[str, Any]:
    return complete("cuda_runtime", name, ts, 1.0, tid, correlation=correlation)


def flow(kind: str, ts: float, tid: int) -> dict[str, Any]:
    return {"ph": kind, "id": 1, "pid": 7, "tid": tid, "ts": ts, "cat": "fwdbwd", "name": "fwdbwd"}


MATRICES: dict[str, Any] = {"Input_Dims": [[128, 64], [64, 32]], "Input_type": ["c10::BFloat16", "c10::BFloat16"]}
NCCL: dict[str, Any] = {
    "Collective_name": "_allgather_base", "In_msg_nelems": 1000, "Out_msg_nelems": 8000, "Group_size": 8,
    "dtype": "BFloat16", "Process_Group_Name": "3", "Process_Group_Description": "TENSOR_MODEL_PARALLEL_GROUP",
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    # Format: pytorch/kineto, libkineto/src/output_json.cpp; NCCL arguments: ParamCommsUtils.hpp (torch 2.13).
    {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}},
    complete("cpu_op", "aten::mm", 100, 10, External_id=1, **MATRICES),
    launch(11, 102),
    complete("kernel", "gemm_kernel", 120, 50, 7, External_id=1, correlation=11, stream=7, device=0),
    launch(12, 112),
    complete("kernel", "ncclDevKernel_AllGather_RING_LL", 171, 30, 20, correlation=12, stream=20, device=0, **NCCL),
    launch(13, 113, "cudaEventRecordWithFlags"),
    launch(14, 114, "cudaStreamWaitEvent"),
    complete(
        "cuda_sync", "Stream Wait Event", 115, 0, 7, correlation=14, stream=7, wait_on_stream=20,
        wait_on_cuda_event_record_corr_id=13,
    ),
    complete("cpu_op", "MmBackward0", 200, 30, 2, External_id=5),
    complete("cpu_op", "aten::mm", 205, 10, 2, External_id=2, **MATRICES),
    launch(15, 206, tid=2),
    complete("kernel", "gemm_backward", 230, 60, 7, External_id=2, correlation=15, stream=7, device=0),
    launch(16, 300, "cudaDeviceSynchronize"),
    complete("cpu_op", "Optimizer.step#AdamW.step", 310, 50, External_id=8),
    launch(17, 320, "cudaMemcpyAsync"),
    complete("gpu_memcpy", "Memcpy DtoD", 330, 5, 7, correlation=17, stream=7, bytes=4096),
    flow("s", 100, 1), flow("f", 200, 2),
]  # fmt: skip


def write(path: Path, events: object) -> Path:
    data = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def names(graph: ExecutionGraph) -> list[str]:
    return [graph.strings[i] for i in graph.name]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_of_a_gpu(tmp_path: Path, name: str) -> None:
    measured = measured_graph(write(tmp_path / name, EVENTS))
    graph = measured.graph
    check_references(graph)
    assert names(graph) == [
        "gemm_kernel", "ncclDevKernel_AllGather_RING_LL", "wait", "gemm_backward", "cudaDeviceSynchronize",
        "Memcpy DtoD",
    ]  # fmt: skip
    kinds = [OpKind.COMPUTE, OpKind.COLLECTIVE, OpKind.WAIT, OpKind.COMPUTE, OpKind.HOST_SYNC, OpKind.COMPUTE]
    assert graph.kind.tolist() == kinds
    assert graph.stream.tolist() == [0, 1, 0, 0, 0, 0]
    assert graph.op_class.tolist() == [OpClass.GEMM, 0, 0, OpClass.GEMM, 0, OpClass.COPY]
    assert graph.flop.tolist() == [2 * 128 * 64 * 32, 0, 0, 2 * 128 * 64 * 32, 0, 0]
    assert (graph.collective[1], graph.axis[1], graph.dtype[1]) == (Collective.ALL_GATHER, Axis.TENSOR, DType.BF16)
    assert (graph.message_bytes[1], graph.bytes_read[1], graph.bytes_written[1]) == (16000, 2000, 16000)
    assert graph.awaits.tolist() == [-1, -1, 1, -1, -1, -1]
    assert graph.forward_op[3] == 0
    assert graph.phase.tolist() == [0, 0, Phase.BACKWARD, Phase.BACKWARD, 0, Phase.OPTIMIZER]
    assert graph.bytes_written[5] == 4096
    assert measured.time_s * 1e6 == pytest.approx([50, 30, 0, 60, 1, 5])
    assert measured.start_s[0] == pytest.approx(20e-6)


def test_an_nccl_kernel_that_says_nothing_is_refused(tmp_path: Path) -> None:
    event = complete("kernel", "ncclDevKernel_AllReduce", 5, 1, correlation=1, stream=20)
    with pytest.raises(SpecError, match="ncclDevKernel_AllReduce at ts 5 has no Collective name"):
        read_profiler_graph(write(tmp_path / "t.json", [event]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"traceEvents": [{"ph": "X", "na', r"is no JSON trace: .*\(char 2\d\)"),
        (b'{"schema": "1.1.1-chakra.0.0.4", "nodes": []}', "traceEvents = .*must be a list"),
        (b'{"traceEvents": [{"ph": "M"}]}', "no kernels and no operators"),
        (b"\x1f\x8b\x08\x00", "is no JSON trace"),
        (b"\x00\x01\x02", "is no JSON trace"),
    ],
)
def test_broken_and_foreign_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(SpecError, match=message) as caught:
        read_profiler_graph(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", EVENTS)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 8] = b"\xff" * 8
    for broken in (bytes(data), bytes(data[:60])):
        path.write_bytes(broken)
        with pytest.raises(SpecError, match="is no JSON trace: its gzip stream is damaged or cut off"):
            read_profiler_graph(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((3, "dur"), float("nan"), r"traceEvents\[3\].dur = 'nan': must be microseconds, finite and not negative"),
        ((3, "dur"), -1.0, r"traceEvents\[3\].dur = '-1.0': must be microseconds, finite and not negative"),
        ((3, "ts"), 1e400, r"traceEvents\[3\].ts = 'inf': must be microseconds, finite"),
        ((3, "ts"), 10**400, r"traceEvents\[3\].ts = '1000000"),
        ((1, "tid"), [1], r"traceEvents\[1\].tid = '\[1\]': must be text or a number"),
        ((3, "args"), "x", r"traceEvents\[3\].args = 'x': must be a table"),
        ((3, "args", "stream"), {}, r"traceEvents\[3\].args.stream = '{}': must be text or a number"),
        ((5, "args", "In msg nelems"), -1, "no Collective name, dtype, In and Out msg nelems that are known"),
    ],
)
def test_a_wrong_event_is_named(tmp_path: Path, place: tuple[Any, ...], value: object, message: str) -> None:
    events = copy.deepcopy(EVENTS)
    entry: Any = events
    for step in place[:-1]:
        entry = entry[step]
    entry[place[-1]] = value
    with pytest.raises(SpecError, match=message) as caught:
        read_profiler_graph(write(tmp_path / "t.json", events))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("dims", [[[2**70, 64], [64, 32]], [[None, 64], [64, 32]], "128", [[2**40, 2**40], [2**40, 1]]])
def test_an_operator_with_impossible_shapes_has_no_class(tmp_path: Path, dims: object) -> None:
    events = copy.deepcopy(EVENTS)
    events[1]["args"]["Input Dims"] = dims
    graph = read_profiler_graph(write(tmp_path / "t.json", events))
    assert graph.op_class[0] == OpClass.OTHER
    assert graph.flop[0] == 0


@pytest.mark.torch
def test_a_trace_of_this_cpu(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(torch.ones(32, 64)).sum().backward()
        optimizer.step()
    path = tmp_path / "cpu.json.gz"
    profiler.export_chrome_trace(str(path))
    measured = measured_graph(path)
    graph = measured.graph
    check_references(graph)
    is_product = graph.op_class == OpClass.GEMM
    layer = 2 * 32 * 64 * 128
    assert graph.flop[is_product & (graph.phase == Phase.FORWARD)].tolist() == [layer, layer]
    # Weights of both, the input of the second: the input of the first needs no gradient.
    backward = np.flatnonzero(is_product & (graph.phase == Phase.BACKWARD))
    assert graph.flop[backward].tolist() == [layer] * 3
    for row in backward:
        assert graph.phase[graph.forward_op[row]] == Phase.FORWARD
    assert (graph.phase == Phase.OPTIMIZER).any()
    assert (measured.time_s > 0).all()
    assert (np.diff(measured.start_s) >= 0).all()
