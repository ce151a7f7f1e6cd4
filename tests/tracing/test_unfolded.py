"""96 layers composed from one are 96 layers run: ops, order, FLOP, bytes and dependences."""

import numpy as np
import pytest

from echo_explore.graph import ChunkShape, ExecutionGraph, Phase, backward_graph, forward_graph
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, request
from tests.tracing.test_folding import rank_request, rows_of, without_data_parallel

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]  # 9 minutes on two cores with a load of 15
NUM_LAYERS = 96


def layer_dependences(graph: ExecutionGraph, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """(reader, read) among the rows of one layer, by their places among `rows`."""
    place = np.full(graph.num_ops, -1)
    place[rows] = np.arange(rows.shape[0])
    reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.dep_offsets))
    read = graph.dep_index
    inside = (graph.layer[reader] == graph.layer[read]) & (graph.layer[reader] >= 0)
    inside &= (place[reader] >= 0) & (place[read] >= 0)
    return sorted(zip(place[reader[inside]].tolist(), place[read[inside]].tolist(), strict=True))


def test_96_layers_folded_are_96_layers_unfolded(service: TraceService) -> None:
    trace = request(
        GPT.model_copy(update={"num_layers": NUM_LAYERS}), tensor_parallel=2, sequence_parallel=True,
        micro_batch_size=1, sequence_length=256,
    )  # fmt: skip
    whole = service.trace_rank_request(
        rank_request(trace, rank=0, pipeline_parallel=1, num_micro_batches=2, chunk_layers=(NUM_LAYERS,))
    )
    pieces = service.trace(trace)
    shape = ChunkShape(first_layer=0, num_layers=NUM_LAYERS, has_embedding=True, has_head=True)
    here = without_data_parallel(whole) & (whole.micro_batch == 1)
    for composed, forward in ((forward_graph(pieces, shape), True), (backward_graph(pieces, shape), False)):
        in_layers = (
            composed.layer >= 0
        ) | forward  # ahead of the backward the loss is scaled: scalars of the optimizer
        mask = here & ((whole.phase == Phase.FORWARD) == forward) & ((whole.layer >= 0) | forward)
        assert rows_of(whole, mask) == rows_of(composed, in_layers)
        ours = layer_dependences(composed, np.flatnonzero(in_layers))
        theirs = layer_dependences(whole, np.flatnonzero(mask))
        assert len(ours) > NUM_LAYERS * 10
        assert ours == theirs
