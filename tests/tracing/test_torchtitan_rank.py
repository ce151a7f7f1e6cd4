"""Whole ranks behind torchtitan's own `parallelize_llama`, FSDP2 included."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_explore.graph import Axis, Collective, ExecutionGraph, OpClass, OpKind, Phase
from echo_explore.tracing import TraceService
from echo_explore.tracing.rank_request import RankRequest
from tests.tracing.models import LLAMA, request
from tests.tracing.test_native_rank import LAYERS, rank_request, traffic

pytestmark = pytest.mark.torch
HIDDEN, VOCABULARY = 1024, 32000


def asked(*, data: int, **changes: Any) -> RankRequest:
    trace = request(LLAMA, **{"framework": "torchtitan", "gradient_accumulation_fusion": False} | changes)
    return replace(rank_request(), trace=trace, data_parallel=data, rank=1)


def shares(graph: ExecutionGraph, axis: Axis, phase: Phase) -> list[tuple[Collective, float]]:
    return [(kind, size) for kind, own, size in traffic(graph, phase) if own is axis]


def test_embedding_layers_and_head_are_units_of_fsdp2(service: TraceService) -> None:
    graph = service.trace_rank_request(asked(data=8))
    pieces = service.trace(asked(data=8).trace).pieces
    layer = pieces["layer.dense"].num_parameters
    ends = (VOCABULARY * HIDDEN, VOCABULARY * HIDDEN + HIDDEN)
    units = [ends[0], *[layer] * LAYERS, ends[1]]
    gathers = [2.0 * unit for unit in units]
    assert shares(graph, Axis.DATA, Phase.FORWARD) == [(Collective.ALL_GATHER, size) for size in gathers]
    scatters = [size for kind, size in shares(graph, Axis.DATA, Phase.BACKWARD) if kind is Collective.REDUCE_SCATTER]
    assert scatters == [4.0 * unit for unit in reversed(units)]
    adam = np.flatnonzero(graph.op_class == OpClass.OPTIMIZER)
    assert graph.dims[adam, 0].sum() == sum(units) / 8
    waits = np.flatnonzero(graph.kind == OpKind.WAIT)
    assert (graph.awaits[waits] < waits).all()


def test_tensor_parallel_traffic_is_that_of_the_pieces_and_of_whole_norms(service: TraceService) -> None:
    fields = {"tensor_parallel": 2, "sequence_parallel": True}
    graph = service.trace_rank_request(asked(data=4, **fields))
    pieces = service.trace(asked(data=4, **fields).trace).pieces
    order = ("embedding", *["layer.dense"] * LAYERS, "head")
    forward = [row for name in order for row in shares(pieces[name].forward, Axis.TENSOR, Phase.FORWARD)]
    assert shares(graph, Axis.TENSOR, Phase.FORWARD) == forward
    backward = [row for name in order[::-1] for row in shares(pieces[name].backward, Axis.TENSOR, Phase.BACKWARD)]
    found = shares(graph, Axis.TENSOR, Phase.BACKWARD)
    sums = [size for kind, size in found if kind is Collective.ALL_REDUCE]
    assert [row for row in found if row[0] is not Collective.ALL_REDUCE] == backward
    # FSDP2 sums the gradients of norms, of which every tensor-parallel rank has a part of the sequence.
    assert sums == [2.0 * HIDDEN] * (2 * LAYERS + 1)


def test_context_ranks_share_parameters_with_replicas(service: TraceService) -> None:
    graph = service.trace_rank_request(asked(data=2, context_parallel=2))
    layer = service.trace(asked(data=2).trace).pieces["layer.dense"].num_parameters
    assert shares(graph, Axis.DATA, Phase.FORWARD)[1] == (Collective.ALL_GATHER, 2.0 * layer)
    assert shares(graph, Axis.CONTEXT, Phase.FORWARD)
    adam = np.flatnonzero(graph.op_class == OpClass.OPTIMIZER)
    elements = LAYERS * layer + 2 * VOCABULARY * HIDDEN + HIDDEN
    assert graph.dims[adam, 0].sum() == elements / 4


def test_every_second_layer_runs_again(service: TraceService) -> None:
    for _ in range(2):  # torchtitan counts layers over all models of a process
        graph = service.trace_rank_request(asked(data=2, recompute="full:every:2"))
        assert set(graph.layer[graph.phase == Phase.RECOMPUTE].tolist()) == set(range(1, LAYERS, 2))
