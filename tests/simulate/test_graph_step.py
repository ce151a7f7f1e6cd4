"""Steps of traced programs: what overlaps, what is exposed, what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from echo_explore.comm import CollectiveRequest
from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, OpRow, RankTrace, build_graph
from echo_explore.simulate import GraphPrediction, SimulationOptions, default_simulator, parse_what_if, predict_trace
from echo_explore.specs import load_cluster, load_stack
from echo_explore.testing.traces import HandmadeTracer
from echo_explore.timeline.breakdown import COMPUTE_PARTS
from echo_explore.topology import GroupShape

SIZE = 4096
CLUSTER = load_cluster("a100-80gb-hdr")
STACK = load_stack("torch-ddp")


def product(dtype: DType = DType.BF16, host_calls: int = 1) -> OpRow:
    return OpRow(
        op_class=OpClass.GEMM, dims=(1, SIZE, SIZE, SIZE), flop=2.0 * SIZE**3, bytes_read=4.0 * SIZE**2,
        bytes_written=2.0 * SIZE**2, dtype=dtype, host_calls=host_calls,
    )  # fmt: skip


def reduction(message_bytes: float, *, asynchronous: bool, axis: Axis = Axis.DATA) -> OpRow:
    return OpRow(
        kind=OpKind.COLLECTIVE, collective=Collective.ALL_REDUCE, axis=axis, message_bytes=message_bytes,
        asynchronous=asynchronous, dtype=DType.BF16,
    )  # fmt: skip


def predict(
    rows: list[OpRow], *, world_size: int = 8, group: tuple[int, ...] | None = None, what_if: str = "compute=1"
) -> GraphPrediction:
    ranks = tuple(range(world_size)) if group is None else group
    graph = build_graph(rows)
    trace = RankTrace(
        graph=graph, rank=0, world_size=world_size, groups=(ranks,),
        group_of_row=np.where(graph.is_collective, 0, -1), peak_memory_bytes=1e9,
    )  # fmt: skip
    simulator = default_simulator(tracer=HandmadeTracer(), interference="none")
    options = SimulationOptions(what_if=parse_what_if([what_if]))
    return predict_trace(trace, cluster=CLUSTER, stack=STACK, simulator=simulator, options=options)


def alone(message_bytes: float, shape: GroupShape) -> float:
    request = CollectiveRequest(
        collective=Collective.ALL_REDUCE, message_bytes=message_bytes, group=shape, dtype=DType.BF16
    )
    simulator = default_simulator(tracer=HandmadeTracer())
    return simulator.collective.collective_time(request, CLUSTER).time_s


def test_an_asynchronous_collective_runs_beside_kernels() -> None:
    kernels = [product()] * 20
    compute = predict(kernels).step_time_s
    small = 64 * 2.0**20
    wait = OpRow(kind=OpKind.WAIT, awaits=0)
    beside = predict([reduction(small, asynchronous=True), *kernels, wait])
    behind = predict([reduction(small, asynchronous=False), *kernels])
    took = alone(small, GroupShape(num_ranks=8, ranks_per_node=8))
    assert beside.step_time_s == pytest.approx(max(compute, took))
    assert behind.step_time_s == pytest.approx(compute + took)
    assert behind.breakdown["data_s"] + behind.breakdown["host_s"] == pytest.approx(took)


def test_the_group_says_where_a_collective_runs() -> None:
    inside = predict([reduction(2.0**28, asynchronous=False)], world_size=64, group=tuple(range(8)))
    across = predict([reduction(2.0**28, asynchronous=False)], world_size=64, group=tuple(range(0, 64, 8)))
    assert inside.step_time_s == pytest.approx(alone(2.0**28, GroupShape(num_ranks=8, ranks_per_node=8)))
    shape = GroupShape(num_ranks=8, ranks_per_node=1, groups_per_node=8)
    assert across.step_time_s == pytest.approx(alone(2.0**28, shape))


def test_a_traced_program_is_one_class() -> None:
    rows = [product()] * 20
    assert predict(rows, what_if="slow_rank=0:1.5").step_time_s > 1.3 * predict(rows).step_time_s
    for text in ("slow_rank=0:1.5:1", "broken_link=data:2:1", "mixed_gpu=h100-ndr:1"):
        with pytest.raises(SpecError, match="the ranks of a traced program are one class"):
            predict(rows, what_if=text)


def test_the_host_counts_where_it_is_slower() -> None:
    many = predict([product(host_calls=5000)])
    assert many.step_time_s == pytest.approx(5000 * STACK.host_call_s)
    assert many.breakdown["host_s"] > 0


def test_parts_add_up_and_the_memory_says_what_libraries_take() -> None:
    done = predict([product(), reduction(2.0**26, asynchronous=False)])
    parts = [value for key, value in done.breakdown.items() if key not in COMPUTE_PARTS]
    assert sum(parts) == pytest.approx(done.step_time_s, rel=1e-9)
    assert done.peak_memory_bytes == 1e9 + STACK.memory.context_bytes + STACK.memory.communicator_bytes
    assert done.to_json()["step_time_low_s"] < done.step_time_s < done.to_json()["step_time_high_s"]


def test_a_nameless_group_counts_as_data_parallel_and_is_told() -> None:
    done = predict([reduction(2.0**26, asynchronous=False, axis=Axis.NONE)])
    assert done.breakdown["data_s"] > 0
    assert "no known name" in done.warnings[0]


def test_tf32_is_faster_than_fp32() -> None:
    assert predict([product(DType.TF32)]).step_time_s < predict([product(DType.FP32)]).step_time_s


def test_transfers_between_stages_are_refused() -> None:
    row = replace(reduction(8.0, asynchronous=False), collective=Collective.SEND, axis=Axis.PIPELINE)
    with pytest.raises(
        SpecError, match="row 0 = 'send': ranks 0 and 1 do it together, and the trace is of rank 0 alone"
    ):
        predict([row], group=(0, 1))


def test_a_world_beyond_the_cluster_is_refused() -> None:
    with pytest.raises(SpecError, match="is more than the"):
        predict([product()], world_size=10**7)
