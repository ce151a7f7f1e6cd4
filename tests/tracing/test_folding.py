"""A stage composed from pieces equals the whole rank as Megatron runs it, op by op."""

from typing import Any

import numpy as np
import pytest

from echo_explore.graph import Axis, ChunkShape, ExecutionGraph, OpKind, Phase, backward_graph, forward_graph
from echo_explore.specs.recompute import recomputed_groups
from echo_explore.tracing import TraceRequest, TraceService
from echo_explore.tracing.rank_request import RankRequest
from tests.tracing.models import GPT, LLAMA, MOE, request

pytestmark = pytest.mark.torch


def rank_request(trace: TraceRequest, rank: int, **changes: Any) -> RankRequest:
    fields: dict[str, Any] = {
        "trace": trace,
        "rank": rank,
        "pipeline_parallel": 4,
        "virtual_pipeline": 1,
        "data_parallel": 1,
        "num_micro_batches": 4,
        "chunk_layers": (2, 2, 2, 2),
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "overlap_p2p": True,
        "bucket_elements": 40_000_000,
    }
    return RankRequest(**fields | changes)


def rows_of(graph: ExecutionGraph, keep: np.ndarray[Any, Any]) -> list[tuple[Any, ...]]:
    """The kept rows as values that do not depend on where they lie."""
    strings = graph.strings
    return [
        (
            strings[graph.name[i]], strings[graph.module[i]], strings[graph.shapes[i]], int(graph.kind[i]),
            int(graph.op_class[i]), int(graph.phase[i]), int(graph.dtype[i]), int(graph.layer[i]), tuple(graph.dims[i]),
            float(graph.flop[i]), float(graph.bytes_read[i]), float(graph.bytes_written[i]), int(graph.axis[i]),
            int(graph.collective[i]), float(graph.message_bytes[i]), bool(graph.asynchronous[i]),
        )
        for i in np.flatnonzero(keep)
    ]  # fmt: skip


def without_data_parallel(graph: ExecutionGraph) -> np.ndarray[Any, Any]:
    """Not the reductions and gathers, their waits, and the division of a bucket by the number of replicas."""
    awaited = np.where(graph.awaits >= 0, graph.axis[np.maximum(graph.awaits, 0)], Axis.NONE)
    data = (Axis.DATA, Axis.EXPERT_DATA)
    divides = np.array([graph.strings[i] == "aten.mul_" for i in graph.name])
    waits_for_data = (graph.kind == OpKind.WAIT) & np.isin(awaited, data)
    kept: np.ndarray[Any, Any] = ~np.isin(graph.axis, data) & ~waits_for_data & ~divides
    return kept


def check(service: TraceService, whole: RankRequest, stage: int, micro_batches: list[int]) -> None:
    trace, graph = service.trace(whole.trace), service.trace_rank_request(whole)
    offsets = np.concatenate([[0], np.cumsum(whole.chunk_layers)])
    ours = without_data_parallel(graph)
    for chunk in range(whole.virtual_pipeline):
        position = chunk * whole.pipeline_parallel + stage
        shape = ChunkShape(
            first_layer=int(offsets[position]),
            num_layers=whole.chunk_layers[position],
            has_embedding=position == 0,
            has_head=position == len(whole.chunk_layers) - 1,
            recomputed=recomputed_groups(whole.trace.recompute, whole.chunk_layers[position]),
        )
        for micro_batch in micro_batches:
            here = ours & (graph.micro_batch == micro_batch) & (graph.chunk == chunk)
            if trace.request["model"]["moe"] and not shape.has_head:  # scale of the auxiliary loss, behind the layers
                here &= graph.layer >= 0
            for composed, forward in ((forward_graph(trace, shape), True), (backward_graph(trace, shape), False)):
                expected = rows_of(composed, np.ones(composed.num_ops, dtype=bool))
                assert rows_of(graph, here & ((graph.phase == Phase.FORWARD) == forward)) == expected


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_middle_stage_1f1b(service: TraceService, recompute: str) -> None:
    trace = request(tensor_parallel=2, sequence_parallel=True, attention="unfused", dropout=True, recompute=recompute)
    check(service, rank_request(trace, rank=2 * 2), 2, [0, 1, 3])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_middle_stage_interleaved(service: TraceService, recompute: str) -> None:
    trace = request(GPT.model_copy(update={"num_layers": 6}), tensor_parallel=2, recompute=recompute)
    whole = rank_request(
        trace, rank=1 * 4 + 2, pipeline_parallel=3, virtual_pipeline=2, data_parallel=2, num_micro_batches=3,
        chunk_layers=(1,) * 6,
    )  # fmt: skip
    check(service, whole, 1, [0, 2])


@pytest.mark.parametrize("recompute", ["full:block:1", "full:block:3", "full:uniform:3"])
def test_some_layers_run_again(service: TraceService, recompute: str) -> None:
    trace = request(LLAMA.model_copy(update={"num_layers": 9}), tensor_parallel=2, recompute=recompute)
    whole = rank_request(trace, rank=2, pipeline_parallel=3, num_micro_batches=3, chunk_layers=(3, 3, 3))
    check(service, whole, 1, [1, 2])


@pytest.mark.parametrize("recompute", ["full:block:1", "full:uniform:2"])
def test_some_layers_of_each_chunk_run_again(service: TraceService, recompute: str) -> None:
    trace = request(GPT.model_copy(update={"num_layers": 12}), recompute=recompute)
    whole = rank_request(
        trace, rank=1, pipeline_parallel=3, virtual_pipeline=2, num_micro_batches=3, chunk_layers=(2,) * 6
    )
    check(service, whole, 1, [0, 2])


def test_mixed_layers_run_again_together(service: TraceService) -> None:
    """A dense layer and a mixture in one group."""
    moe = MOE.moe.model_copy(update={"layer_frequency": 2}) if MOE.moe else None
    model = MOE.model_copy(update={"num_layers": 6, "moe": moe})
    assert model.layer_kinds[2:4] == ("dense", "moe")
    trace = request(model, expert_parallel=2, recompute="full:uniform:2")
    whole = rank_request(
        trace, rank=2, pipeline_parallel=3, data_parallel=2, num_micro_batches=3, chunk_layers=(2, 2, 2)
    )
    graph = service.trace_rank_request(whole)
    shape = ChunkShape(first_layer=2, num_layers=2, has_embedding=False, has_head=False, recomputed=(2, 2))
    composed = backward_graph(service.trace(trace), shape)
    here = without_data_parallel(graph) & (graph.micro_batch == 1) & (graph.layer >= 0)
    rows = rows_of(graph, here & (graph.phase != Phase.FORWARD))
    # Autograd copies the gradient of the group's input where something still refers to it, here a fake tensor's cycle.
    assert rows[-1][0] == "aten.copy_"
    assert rows[:-1] == rows_of(composed, np.ones(composed.num_ops, dtype=bool))


def test_first_stage_with_replicas(service: TraceService) -> None:
    whole = rank_request(
        request(), rank=0, pipeline_parallel=2, data_parallel=4, num_micro_batches=2, chunk_layers=(3, 5),
        bucket_elements=1_000_000,
    )  # fmt: skip
    check(service, whole, 0, [0, 1])


def test_llama_middle_stage(service: TraceService) -> None:
    whole = rank_request(request(LLAMA, tensor_parallel=2, sequence_parallel=True), rank=1 * 2)
    check(service, whole, 1, [1, 2])  # rotary angles are made once, in the first forward


def test_context_parallel_middle_stage(service: TraceService) -> None:
    trace = request(LLAMA, tensor_parallel=2, sequence_parallel=True, context_parallel=4)
    whole = rank_request(trace, rank=1 * 2 * 4 * 2, data_parallel=2)
    check(service, whole, 1, [1, 2])
    # Gradients are summed over data and context ranks together.
    graph = service.trace_rank_request(whole)
    reduced = graph.message_bytes[(graph.axis == Axis.DATA) & (graph.collective == 3)].sum()
    elements = 2 * service.trace(trace).pieces["layer.dense"].num_parameters
    assert reduced == pytest.approx(4 * elements, rel=1e-3)


def test_experts_middle_stage(service: TraceService) -> None:
    trace = request(MOE, tensor_parallel=2, sequence_parallel=True, expert_parallel=4)
    whole = rank_request(trace, rank=1 * 4, data_parallel=2)
    check(service, whole, 1, [1, 2])


def test_gradient_buckets_and_optimizer_of_a_rank(service: TraceService) -> None:
    whole = rank_request(
        request(), rank=0, pipeline_parallel=2, data_parallel=4, num_micro_batches=2, chunk_layers=(4, 4),
        bucket_elements=10_000_000,
    )  # fmt: skip
    graph = service.trace_rank_request(whole)
    assert not (graph.is_collective & (graph.axis == Axis.NONE)).any()
    on_data = graph.axis == Axis.DATA
    names = np.array([graph.strings[i] for i in graph.name])
    last = graph.micro_batch == 1
    reduced = on_data & (graph.collective == 3)
    gathered = on_data & (graph.collective == 2)
    assert reduced.sum() > 2
    assert (last & (graph.phase == Phase.BACKWARD))[reduced].sum() >= reduced.sum() - 1  # overlap the last backward
    assert (graph.micro_batch[gathered] == 0).all()  # overlap the first forward
    elements = sum(p.num_elements for n in ("embedding",) for p in service.trace(request()).pieces[n].parameters)
    elements += 4 * service.trace(request()).pieces["layer.dense"].num_parameters
    assert graph.message_bytes[reduced].sum() == pytest.approx(4 * elements, rel=1e-3)
    adam = names == "aten._fused_adamw_"
    assert graph.dims[adam, 0].sum() == pytest.approx(elements / 4, rel=1e-3)
    assert (graph.phase[adam] == Phase.OPTIMIZER).all()
    assert (graph.kind == OpKind.HOST_SYNC).sum() >= 1  # the gradient norm
    assert GPT.tied_embeddings
    assert (graph.axis == Axis.EMBEDDING).sum() == 1
