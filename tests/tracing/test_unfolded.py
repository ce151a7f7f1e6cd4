"""Layers composed from one are layers run: ops, order, FLOP, bytes and dependences, of three and of 96."""

from typing import Any

import numpy as np
import pytest

from echo_explore.graph import ChunkShape, ExecutionGraph, Phase, backward_graph, forward_graph
from echo_explore.specs import ModelSpec
from echo_explore.specs.recompute import recomputed_groups
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, LLAMA, MOE, request
from tests.tracing.test_folding import rank_request, rows_of, without_data_parallel
from tests.tracing.test_latent import LATENT

pytestmark = pytest.mark.torch
SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))  # 9 minutes on two cores with a load of 15
PREDICTING = {"multi_token_prediction_layers": 1}
ALL = MOE.model_copy(update=PREDICTING | {"mla": LATENT.mla, "head_dim": LATENT.head_dim})
"""Multi-latent attention, experts and multi-token prediction."""


def layer_dependences(graph: ExecutionGraph, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """(reader, read) among the rows of one layer, by their places among `rows`."""
    place = np.full(graph.num_ops, -1)
    place[rows] = np.arange(rows.shape[0])
    reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.dep_offsets))
    read = graph.dep_index
    inside = (graph.layer[reader] == graph.layer[read]) & (graph.layer[reader] >= 0)
    inside &= (place[reader] >= 0) & (place[read] >= 0)
    return sorted(zip(place[reader[inside]].tolist(), place[read[inside]].tolist(), strict=True))


def outside_scalars(graph: ExecutionGraph, *, forward: bool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """All rows but those that scale the loss, of one number each: that is the optimizer's, which pieces have not."""
    return (graph.layer >= 0) | (forward & (graph.bytes_written > 16))


@pytest.mark.parametrize(
    ("model", "num_layers", "changes"),
    [
        (LLAMA, 3, {"recompute": "full:block:2", "precision": "fp8"}),
        (MOE, 3, {"expert_parallel": 2, "recompute": "selective:layernorm,moe_act"}),
        (ALL, 3, {"expert_parallel": 2, "precision": "mxfp8", "recompute": "selective:mla_up_proj"}),
        pytest.param(GPT, 96, {}, marks=SLOW),
        pytest.param(ALL, 96, {"expert_parallel": 2, "precision": "fp8", "recompute": "selective:mla_up_proj"},
                     marks=SLOW),
    ],
)  # fmt: skip
def test_layers_folded_are_layers_unfolded(
    service: TraceService, model: ModelSpec, num_layers: int, changes: dict[str, Any]
) -> None:
    trace = request(
        model.model_copy(update={"num_layers": num_layers}), tensor_parallel=2, sequence_parallel=True,
        micro_batch_size=1, sequence_length=256, **changes,
    )  # fmt: skip
    whole = service.trace_rank_request(
        rank_request(trace, rank=0, pipeline_parallel=1, num_micro_batches=2, chunk_layers=(num_layers,))
    )
    pieces = service.trace(trace)
    shape = ChunkShape(
        first_layer=0, num_layers=num_layers, has_embedding=True, has_head=True,
        recomputed=recomputed_groups(trace.recompute, num_layers),
    )  # fmt: skip
    here = without_data_parallel(whole) & (whole.micro_batch == 1)
    for composed, forward in ((forward_graph(pieces, shape), True), (backward_graph(pieces, shape), False)):
        in_layers = outside_scalars(composed, forward=forward)
        mask = here & ((whole.phase == Phase.FORWARD) == forward) & outside_scalars(whole, forward=forward)
        assert rows_of(whole, mask) == rows_of(composed, in_layers)
        ours = layer_dependences(composed, np.flatnonzero(in_layers))
        theirs = layer_dependences(whole, np.flatnonzero(mask))
        assert len(ours) > num_layers * 10
        assert ours == theirs
