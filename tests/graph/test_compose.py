"""Chunks from pieces: their order, the numbers of their layers, the conservation of work."""

import pytest

from echo_explore.graph import ChunkShape, Trace, backward_graph, chunk_pieces, forward_graph
from echo_explore.specs import load_model
from echo_explore.testing.traces import HandmadeTracer
from echo_explore.tracing.request import TraceRequest
from tests.graph.support import check_references


@pytest.fixture(scope="module")
def trace() -> Trace:
    return HandmadeTracer().trace(
        TraceRequest(
            model=load_model("gpt-22b"),
            tensor_parallel=8,
            sequence_parallel=True,
            micro_batch_size=1,
            sequence_length=2048,
            precision="bf16",
            attention="flash",
            recompute="none",
            fusion="fused",
            gradient_accumulation_fusion=True,
            dropout=False,
        )
    )


def _shape(first: int, count: int, *, embedding: bool = False, head: bool = False) -> ChunkShape:
    return ChunkShape(first_layer=first, num_layers=count, has_embedding=embedding, has_head=head)


def test_pieces_in_order(trace: Trace) -> None:
    kinds = ("dense", "moe", "moe")
    assert _shape(0, 2, embedding=True).piece_names(kinds) == ("embedding", "layer.dense", "layer.moe")
    assert _shape(2, 1, head=True).piece_names(kinds) == ("layer.moe", "head")
    assert _shape(3, 0, head=True).piece_names(kinds) == ("head",)
    assert chunk_pieces(trace, _shape(4, 2)) == (trace.pieces["layer.dense"],) * 2


def test_layers_carry_their_number(trace: Trace) -> None:
    shape = _shape(10, 3, embedding=True, head=True)
    forward, backward = forward_graph(trace, shape), backward_graph(trace, shape)
    assert sorted(set(forward.layer.tolist())) == [-1, 10, 11, 12]
    inner = forward.layer[forward.layer >= 0].tolist()
    assert inner == sorted(inner)
    inner = backward.layer[backward.layer >= 0].tolist()
    assert inner == sorted(inner, reverse=True)
    check_references(forward)
    check_references(backward)


@pytest.mark.parametrize("cuts", [(48,), (12, 24, 48), (1, 2, 47, 48)])
def test_however_it_is_cut_the_work_is_the_same(trace: Trace, cuts: tuple[int, ...]) -> None:
    layer = trace.pieces["layer.dense"]
    ends = trace.pieces["embedding"].forward.flop.sum() + trace.pieces["head"].forward.flop.sum()
    total, first = 0.0, 0
    for cut in cuts:
        total += forward_graph(trace, _shape(first, cut - first, embedding=first == 0, head=cut == 48)).flop.sum()
        first = cut
    assert total == pytest.approx(48 * layer.forward.flop.sum() + ends, rel=1e-12)
