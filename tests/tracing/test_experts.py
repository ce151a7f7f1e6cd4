"""Mixture-of-experts layers with balanced routing."""

import numpy as np
import pytest

from echo_explore.core import TraceError
from echo_explore.graph import Axis, Collective, OpClass, OpKind, Piece
from echo_explore.tracing import TraceService
from tests.tracing.models import MOE, request

pytestmark = pytest.mark.torch

TOKENS, HIDDEN, WIDTH, SHARED, TOP = 2 * 512, 1024, 512, 256, 2


def layer(service: TraceService, **changes: object) -> Piece:
    return service.trace(request(MOE, **changes)).pieces["layer.moe"]


def test_layer_kinds(service: TraceService) -> None:
    trace = service.trace(request(MOE))
    assert list(trace.pieces) == ["embedding", "layer.dense", "layer.moe", "head"]
    assert trace.layer_kinds == ("dense",) + ("moe",) * 7


@pytest.mark.parametrize("expert", [1, 2, 8])
def test_flop(service: TraceService, expert: int) -> None:
    piece = layer(service, expert_parallel=expert)
    routed = 2.0 * TOKENS * TOP * 3 * HIDDEN * WIDTH
    for graph, factor in ((piece.forward, 1), (piece.backward, 2)):
        grouped = graph.op_class == OpClass.GROUPED_GEMM
        assert graph.flop[grouped].sum() == pytest.approx(factor * routed, rel=1e-9)
        groups, m, n, k = (graph.dims[grouped, i] for i in range(4))
        assert (groups == 8 // expert).all()
        assert graph.flop[grouped] == pytest.approx(2.0 * m * n * k)


@pytest.mark.parametrize("expert", [1, 2, 8])
def test_parameters(service: TraceService, expert: int) -> None:
    parameters = layer(service, expert_parallel=expert).parameters
    experts = sum(p.num_elements for p in parameters if p.name.startswith("mlp.experts."))
    assert experts == 8 // expert * 3 * HIDDEN * WIDTH
    assert all(p.expert == (expert > 1) for p in parameters if p.name.startswith("mlp.experts."))
    shared = sum(p.num_elements for p in parameters if "shared_experts" in p.name)
    assert shared == 3 * HIDDEN * SHARED
    assert sum(p.num_elements for p in parameters if "router" in p.name) == 8 * HIDDEN


def test_every_rank_sends_its_routed_tokens(service: TraceService) -> None:
    piece = layer(service, expert_parallel=4)
    for graph in (piece.forward, piece.backward):
        exchanged = graph.is_collective & (graph.collective == Collective.ALL_TO_ALL)
        assert (graph.axis[exchanged] == Axis.EXPERT).all()
        sizes = sorted(graph.message_bytes[exchanged])
        assert sizes[-2:] == [2.0 * TOKENS * TOP * HIDDEN] * 2  # there and back; the third carries probabilities
        assert len(sizes) == 3
        assert not (graph.is_collective & (graph.axis == Axis.NONE)).any()


def test_the_host_waits_for_the_counts(service: TraceService) -> None:
    trace = service.trace(request(MOE, expert_parallel=4))
    graph = trace.pieces["layer.moe"].forward
    assert (graph.kind == OpKind.HOST_SYNC).sum() == 1
    assert trace.oracles


def test_weight_gradients_go_into_the_buffer(service: TraceService) -> None:
    fused, apart = (layer(service, gradient_accumulation_fusion=f).backward for f in (True, False))

    def names(graph: object) -> list[str]:
        return [graph.strings[i] for i in graph.name]  # type: ignore[attr-defined]

    assert names(fused).count("echo.grouped_wgrad_accumulate") == 2
    assert names(apart).count("echo.grouped_wgrad") == 2
    assert fused.flop.sum() == apart.flop.sum()


def test_full_recomputation_keeps_little(service: TraceService) -> None:
    kept = layer(service, recompute="full").saved_bytes
    assert 2.0 * TOKENS * HIDDEN <= kept < 0.1 * layer(service).saved_bytes


def test_wide_formats_are_refused(service: TraceService) -> None:
    with pytest.raises(TraceError, match="precision: fp32 is not traced for experts"):
        service.trace(request(MOE, precision="fp32", attention="unfused"))


@pytest.mark.parametrize(("precision", "width"), [("fp8", 1.0), ("mxfp8", 1 + 1 / 32)])
def test_narrow_experts(service: TraceService, precision: str, width: float) -> None:
    """Each input and gradient of an expert product is quantised once; operands narrow, results stay wide."""
    wide, narrow = layer(service, expert_parallel=2), layer(service, expert_parallel=2, precision=precision)
    for before, after, casts in ((wide.forward, narrow.forward, 2), (wide.backward, narrow.backward, 2)):
        names = [after.strings[i] for i in after.name]
        modules = [after.strings[i] for i in after.module]
        cast = [m for n, m in zip(names, modules, strict=True) if n == "echo.quantise"]
        assert sum(m.endswith(".experts") for m in cast) == casts
        a, b = before.op_class == OpClass.GROUPED_GEMM, after.op_class == OpClass.GROUPED_GEMM
        assert (after.flop[b] == before.flop[a]).all()
        groups, m, n, k = (after.dims[b, i] for i in range(4))
        assert before.bytes_read[a] - after.bytes_read[b] == pytest.approx((2 - width) * (m * k + groups * k * n))
        assert (after.bytes_written[b] == before.bytes_written[a]).all()
    assert narrow.saved_bytes < wide.saved_bytes


def test_dependences_of_an_exchange(service: TraceService) -> None:
    graph = layer(service, expert_parallel=2).forward
    names = np.array([graph.strings[i] for i in graph.name])
    permute = int(np.flatnonzero(names == "echo.moe_permute")[0])
    exchange = int(np.flatnonzero(graph.collective == Collective.ALL_TO_ALL)[0])
    assert permute in graph.dep_index[graph.dep_offsets[exchange] : graph.dep_offsets[exchange + 1]]


def test_experts_in_8_bits_copy_their_tokens_to_full_rows(service: TraceService) -> None:
    """As TEGroupedMLP: tokens and weights are padded, the result is cut; the same in the backward."""
    piece = layer(service, expert_parallel=4, precision="mxfp8", pads_experts=True)
    bare = layer(service, expert_parallel=4, precision="mxfp8")
    for graph, plain in ((piece.forward, bare.forward), (piece.backward, bare.backward)):
        copies = [i for i, name in enumerate(graph.name) if graph.strings[name] == "echo.moe_pad"]
        assert sorted(graph.dims[i, 1] for i in copies) == [1, HIDDEN, HIDDEN]
        assert {graph.op_class[i] for i in copies} == {OpClass.PERMUTE}
        assert graph.num_ops == plain.num_ops + 3
        moved = sum(graph.bytes_read[i] + graph.bytes_written[i] for i in copies if graph.dims[i, 1] == HIDDEN)
        assert moved == 4 * 2.0 * TOKENS * TOP * HIDDEN


def test_a_rank_of_ones_own_choice_has_the_load_of_its_experts(service: TraceService) -> None:
    load = (3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 2.0, 1.0)
    busiest = request(MOE, expert_parallel=4, expert_load=load)
    assert "expert_rank" not in busiest.canonical()
    rows = {}
    for rank in (-1, 0, 2):
        piece = service.trace(request(MOE, expert_parallel=4, expert_load=load, expert_rank=rank)).pieces["layer.moe"]
        grouped = piece.forward.op_class == OpClass.GROUPED_GEMM
        groups, m = (piece.forward.dims[grouped, i] for i in (0, 1))
        rows[rank] = set((groups * m).tolist())
        assert (piece.forward.collective == Collective.ALL_TO_ALL).sum() == 3
    assert rows[-1] == rows[0]
    (most,), (least,) = rows[0], rows[2]
    assert most / least == pytest.approx(5 / 2, rel=0.01)
