"""Chunks from pieces: their order, the numbers of their layers, the conservation of work."""

from dataclasses import replace

import pytest

from echo_explore.graph import (
    ChunkShape,
    OpRow,
    Phase,
    Trace,
    backward_graph,
    build_graph,
    chunk_pieces,
    forward_graph,
    piece_of,
    reordered,
)
from echo_explore.specs import load_model
from echo_explore.testing.traces import HandmadeTracer
from echo_explore.tracing.request import TraceRequest
from tests.graph.support import check_references

REQUEST = TraceRequest(
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


@pytest.fixture(scope="module")
def trace() -> Trace:
    return HandmadeTracer().trace(REQUEST)


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


def test_names_of_layers_that_run_again() -> None:
    kinds = ("dense", "moe", "moe", "dense")

    def names(*recomputed: int) -> tuple[str, ...]:
        return replace(_shape(0, 4), recomputed=recomputed).piece_names(kinds)

    assert names(1, 1, 0, 0) == ("again.dense", "again.moe", "layer.moe", "layer.dense")
    assert names(2, 2, 2, 2) == ("tail.dense", "lead.dense+moe", "tail.moe", "lead.moe+dense")
    assert names(3, 3, 3, 0) == ("tail.dense", "tail.moe", "lead.dense+moe+moe", "layer.dense")


def test_a_group_runs_forward_again_before_its_first_backward() -> None:
    traced = HandmadeTracer().trace(replace(REQUEST, recompute="full:uniform:3"))
    shape = replace(_shape(6, 6), recomputed=(3,) * 6)
    backward = backward_graph(traced, shape)
    again = backward.phase == Phase.RECOMPUTE
    order = [(bool(a), int(n)) for a, n in zip(again, backward.layer, strict=True)]
    assert list(dict.fromkeys(order)) == [
        (True, 9), (True, 10), (True, 11), (False, 11), (False, 10), (False, 9),
        (True, 6), (True, 7), (True, 8), (False, 8), (False, 7), (False, 6),
    ]  # fmt: skip
    check_references(backward)
    alone = replace(_shape(6, 6), recomputed=(1,) * 6)
    assert backward.flop.sum() == backward_graph(traced, alone).flop.sum()
    assert forward_graph(traced, shape).flop.sum() == forward_graph(traced, alone).flop.sum()


def test_memory_of_a_group_is_that_of_its_layers_kept() -> None:
    traced = HandmadeTracer().trace(replace(REQUEST, recompute="full:uniform:3"))
    kept, again = traced.pieces["layer.dense"], traced.pieces["again.dense"]
    tail, lead = (piece_of(traced, name) for name in ("tail.dense", "lead.dense+dense+dense"))
    assert tail.saved_bytes == again.saved_bytes - traced.boundary_bytes == 0
    assert lead.saved_bytes == again.saved_bytes
    assert lead.backward_peak_bytes == 3 * kept.saved_bytes + kept.backward_peak_bytes


def test_rows_in_another_order_keep_what_they_refer_to(trace: Trace) -> None:
    graph = trace.pieces["layer.dense"].backward
    chain = build_graph([OpRow(name=str(i), deps=(i - 1,) if i % 2 else (), awaits=i - 1) for i in range(6)])
    moved = reordered(chain, [2, 3, 0, 1, 4, 5])
    assert [moved.strings[n] for n in moved.name] == ["2", "3", "0", "1", "4", "5"]
    assert moved.dep_index.tolist() == [0, 2, 4]
    assert moved.awaits.tolist() == [3, 0, -1, 2, 1, 4]
    same = reordered(graph, range(graph.num_ops))
    assert same.flop.tolist() == graph.flop.tolist()
    with pytest.raises(ValueError, match="every row once"):
        reordered(chain, [0, 0, 1, 2, 3, 4])
