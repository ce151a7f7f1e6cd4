"""A whole rank under torch's own `fully_shard` against the rows that the simulator puts between pieces."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_explore.graph import (
    Axis,
    Collective,
    DType,
    ExecutionGraph,
    OpClass,
    OpKind,
    OpRow,
    Phase,
    TimedGraph,
    Trace,
    build_graph,
)
from echo_explore.simulate.ddp_buckets import ddp_buckets
from echo_explore.simulate.sharded_graph import ShardingFacts, Unit, sharded_backward, sharded_forward
from echo_explore.tracing import TraceService
from echo_explore.tracing.rank_request import RankRequest
from tests.tracing.models import LLAMA, request

pytestmark = pytest.mark.torch
SHARDS, LAYERS = 64, 3


def rank_request(framework: str = "fsdp2") -> RankRequest:
    return RankRequest(
        trace=request(LLAMA, framework=framework, gradient_accumulation_fusion=False),
        rank=5,
        pipeline_parallel=1,
        virtual_pipeline=1,
        data_parallel=SHARDS,
        num_micro_batches=1,
        chunk_layers=(LAYERS,),
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        overlap_p2p=False,
        bucket_elements=1,
    )


@pytest.fixture(scope="module")
def real(service: TraceService) -> ExecutionGraph:
    return service.trace_rank_request(rank_request())


@pytest.fixture(scope="module")
def composed(service: TraceService) -> tuple[ExecutionGraph, ExecutionGraph]:
    trace = service.trace(rank_request().trace)

    class Untimed:
        def piece(self, name: str, *, backward: bool) -> TimedGraph:
            return untimed(trace.pieces[name].backward if backward else trace.pieces[name].forward)

        def rows(self, rows: tuple[OpRow, ...]) -> TimedGraph:
            return untimed(build_graph(rows))

    root, layers = units(trace)
    facts = ShardingFacts(
        num_shards=SHARDS, gather_dtype=DType.BF16, reduce_dtype=DType.FP32, flat_parameters=False, reshard=True,
        reshard_last=True,
    )  # fmt: skip
    return (
        sharded_forward(root, layers, facts, Untimed()).graph,
        sharded_backward(root, layers, facts, Untimed()).graph,
    )


def units(trace: Trace) -> tuple[Unit, list[Unit]]:
    ends = trace.pieces["embedding"].num_parameters + trace.pieces["head"].num_parameters
    layer = Unit(elements=trace.pieces["layer.dense"].num_parameters, pieces=("layer.dense",))
    return Unit(elements=ends, pieces=("embedding", "head")), [layer] * LAYERS


def untimed(graph: ExecutionGraph) -> TimedGraph:
    return TimedGraph(graph=graph, time_s=np.zeros(graph.num_ops), sigma_log=np.zeros(graph.num_ops))


def traffic(graph: ExecutionGraph, phase: Phase) -> list[tuple[Any, ...]]:
    rows = np.flatnonzero(graph.is_collective & (graph.phase == phase))
    return [
        (Collective(int(graph.collective[r])), Axis(int(graph.axis[r])), float(graph.message_bytes[r])) for r in rows
    ]


def test_gathers_and_reductions_are_those_of_fully_shard(real: Any, composed: Any) -> None:
    forward, backward = composed
    assert traffic(forward, Phase.FORWARD) == traffic(real, Phase.FORWARD)
    assert traffic(backward, Phase.BACKWARD) == traffic(real, Phase.BACKWARD)


def test_copies_of_parameters_and_gradients_are_those_of_fully_shard(real: Any, composed: Any) -> None:
    def copies(graph: ExecutionGraph, phase: Phase) -> list[tuple[str, float, float]]:
        names = ("fsdp.split_with_sizes_copy", "fsdp.chunk_cat")
        found = [r for r in np.flatnonzero(graph.phase == phase) if graph.strings[graph.name[r]] in names]
        return [(graph.strings[graph.name[r]], graph.bytes_read[r], graph.bytes_written[r]) for r in found]

    forward, backward = composed
    for graph, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
        ours, torchs = copies(graph, phase), copies(real, phase)
        assert [name for name, _, _ in ours] == [name for name, _, _ in torchs]
        # Shards are padded to equal sizes, at most by one element a parameter and rank.
        assert np.array([(r, w) for _, r, w in ours]) == pytest.approx(
            np.array([(r, w) for _, r, w in torchs]), rel=1e-4
        )


def test_products_and_attention_are_those_of_the_pieces(real: Any, composed: Any) -> None:
    for graph, phase in zip(composed, (Phase.FORWARD, Phase.BACKWARD), strict=True):
        for op_class in (OpClass.GEMM, OpClass.ATTENTION):
            mine = graph.dims[graph.op_class == op_class]
            theirs = real.dims[(real.op_class == op_class) & (real.phase == phase)]
            assert mine.tolist() == theirs.tolist()


def test_a_layer_is_gathered_one_ahead_and_waited_for(composed: Any) -> None:
    for graph in composed:
        waits = np.flatnonzero(graph.kind == OpKind.WAIT)
        assert sorted(graph.awaits[waits]) == np.flatnonzero(graph.is_collective).tolist()
        assert (graph.awaits[waits] < waits).all()
    forward = composed[0]
    gathers = np.flatnonzero(forward.is_collective)
    attention = np.flatnonzero(forward.op_class == OpClass.ATTENTION)
    # root, then layer n + 1 before the attention of layer n
    assert all(gathers[n + 2] < attention[n] for n in range(LAYERS - 1))


def test_gradient_norm_is_summed_over_the_shards(real: Any) -> None:
    optimizer = real.phase == Phase.OPTIMIZER
    assert (real.is_collective & optimizer).sum() == 1
    adam = np.flatnonzero(real.op_class == OpClass.OPTIMIZER)
    assert real.dims[adam, 0].sum() == (65_537_024 + LAYERS * 11_274_240) / SHARDS


def test_ddp_reduces_its_buckets_in_the_last_micro_batch(service: TraceService) -> None:
    asked = replace(rank_request("ddp"), data_parallel=8, num_micro_batches=2)
    graph = service.trace_rank_request(asked)
    pieces = service.trace(asked.trace).pieces
    order = ("embedding", *["layer.dense"] * LAYERS, "head")
    sizes = [4 * p.num_elements for name in order for p in pieces[name].parameters]
    buckets = ddp_buckets(sizes, first_bytes=2**20, others_bytes=25 * 2**20)
    rows = np.flatnonzero(graph.is_collective)
    assert set(graph.micro_batch[rows].tolist()) == {1}
    found = traffic(graph, Phase.BACKWARD)
    assert [(kind, axis) for kind, axis, _ in found] == [(Collective.ALL_REDUCE, Axis.DATA)] * len(buckets)
    # Parameters are laid out in module order, which is not that of the forward in every module.
    assert sum(size for _, _, size in found) == float(sum(sizes))


def test_tensor_parallel_ranks_have_the_traffic_of_their_pieces(service: TraceService) -> None:
    base = rank_request()
    trace = replace(base.trace, tensor_parallel=2, sequence_parallel=True)
    graph = service.trace_rank_request(replace(base, trace=trace, data_parallel=8))
    pieces = service.trace(trace).pieces
    order = ("embedding", *["layer.dense"] * LAYERS, "head")
    for phase, names in ((Phase.FORWARD, order), (Phase.BACKWARD, order[::-1])):
        graphs = [pieces[n].forward if phase is Phase.FORWARD else pieces[n].backward for n in names]
        expected = [row for piece in graphs for row in traffic(piece, phase)]
        found = [row for row in traffic(graph, phase) if row[1] is Axis.TENSOR]
        assert found == expected
    gathers = [size for kind, axis, size in traffic(graph, Phase.FORWARD) if axis is Axis.DATA]
    layer = pieces["layer.dense"].num_parameters
    root = pieces["embedding"].num_parameters + pieces["head"].num_parameters
    assert gathers == pytest.approx([2.0 * root, *[2.0 * layer] * LAYERS], rel=1e-3)  # shards are padded


def test_kept_parameters_are_not_gathered_again(service: TraceService) -> None:
    def gathers(**changes: Any) -> int:
        graph = service.trace_rank_request(replace(rank_request(), **changes))
        return int((graph.collective == Collective.ALL_GATHER).sum())

    assert gathers() == 1 + 2 * LAYERS
    assert gathers(reshard_last_layer=False) == 1 + 2 * LAYERS - 1
    assert gathers(reshard_after_forward=False) == 1 + LAYERS
