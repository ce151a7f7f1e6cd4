"""Pieces of torchtitan's own Llama 3: FLOP, parameters, what tensor parallelism, checkpoints, casts and context add."""

from typing import Any

import numpy as np
import pytest

from echo_explore.compute.flop import layer_forward_flop
from echo_explore.core import TraceError
from echo_explore.graph import Axis, Collective, DType, ExecutionGraph, OpClass, OpKind, Phase, Trace
from echo_explore.specs.parameters import count_parameters
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, LLAMA, MOE, request

pytestmark = pytest.mark.torch
TOKENS, HIDDEN = 512 * 2, 1024


def titan(service: TraceService, model: Any = LLAMA, **changes: Any) -> Trace:
    tensor = changes.get("tensor_parallel", 1)
    fields = {"framework": "torchtitan", "gradient_accumulation_fusion": False, "sequence_parallel": tensor > 1}
    return service.trace(request(model, **fields | changes))


def names(graph: ExecutionGraph, phase: Phase | None = None) -> list[str]:
    rows = range(graph.num_ops) if phase is None else np.flatnonzero(graph.phase == phase).tolist()
    return [graph.strings[graph.name[row]] for row in rows]


def exchanges(graph: ExecutionGraph) -> list[tuple[Collective, Axis, float]]:
    rows = np.flatnonzero(graph.is_collective)
    return [
        (Collective(int(graph.collective[r])), Axis(int(graph.axis[r])), float(graph.message_bytes[r])) for r in rows
    ]


def test_executed_flop_and_parameters_are_the_closed_forms(service: TraceService) -> None:
    pieces = titan(service).pieces
    layer = pieces["layer.dense"]
    forward = float(layer.forward.flop.sum())
    attention = 4.0 * 512 * TOKENS * LLAMA.num_attention_heads * LLAMA.head_dim / 2
    closed = layer_forward_flop(LLAMA, kind="dense", sequence_length=512, num_tokens=TOKENS, attended_fraction=0.5)
    assert forward == pytest.approx(closed, rel=1e-3)
    assert layer.backward.flop.sum() == pytest.approx(2 * forward + 0.5 * attention, rel=1e-3)
    found = sum(p.num_parameters * (8 if name == "layer.dense" else 1) for name, p in pieces.items())
    assert found == count_parameters(LLAMA).total


def test_a_compiler_leaves_one_kernel_of_each_chain(service: TraceService) -> None:
    fused = names(titan(service).pieces["layer.dense"].forward)
    assert fused.count("rotate") == 2
    assert fused.count("_swiglu") == 1
    eager = names(titan(service, fusion="eager").pieces["layer.dense"].forward)
    assert "_swiglu" not in eager
    assert eager.count("aten.silu") == 1
    assert len(eager) > len(fused)


def test_sequence_parallelism_gathers_twice_and_puts_batches_in_order(service: TraceService) -> None:
    layer = titan(service, tensor_parallel=4).pieces["layer.dense"]
    size = 2.0 * TOKENS * HIDDEN
    gather, scatter = ((kind, Axis.TENSOR, size) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
    assert exchanges(layer.forward) == [gather, scatter] * 2
    assert exchanges(layer.backward) == [gather, scatter] * 2
    # The sequence is the second dimension: what is gathered or scattered is copied once (DTensor, torch 2.13).
    assert names(layer.forward).count("aten.cat") == names(layer.backward).count("aten.cat") == 4


def test_the_loss_stays_split_over_the_vocabulary(service: TraceService) -> None:
    head = titan(service, tensor_parallel=4).pieces["head"].forward
    sums = [size for kind, _, size in exchanges(head) if kind is Collective.ALL_REDUCE]
    assert sums == [4.0 * TOKENS] * 3


def test_checkpoints_are_torchtitans(service: TraceService) -> None:
    layers = {
        mode: titan(service, recompute=mode, tensor_parallel=2).pieces["layer.dense"]
        for mode in ("none", "selective", "full")
    }
    again = {mode: names(layer.backward, Phase.RECOMPUTE) for mode, layer in layers.items()}
    assert again["none"] == []
    products = {mode: rows.count("aten.mm") for mode, rows in again.items()}
    assert products == {"none": 0, "selective": 3, "full": 6}  # of seven; the last is not needed again
    assert "aten._scaled_dot_product_flash_attention" not in again["selective"]
    assert "_c10d_functional.reduce_scatter_tensor" not in again["selective"]
    saved = {mode: layer.saved_bytes for mode, layer in layers.items()}
    assert saved["full"] == 2.0 * TOKENS * HIDDEN / 2
    assert saved["full"] < saved["selective"] < saved["none"]


def test_every_nth_layer_runs_again_beside_kept_ones(service: TraceService) -> None:
    mixed = titan(service, recompute="full:every:3", tensor_parallel=2).pieces
    for name, mode in (("layer.dense", "none"), ("again.dense", "full")):
        alone = titan(service, recompute=mode, tensor_parallel=2).pieces["layer.dense"]
        assert names(mixed[name].forward) == names(alone.forward)
        assert names(mixed[name].backward) == names(alone.backward)
        assert mixed[name].saved_bytes == alone.saved_bytes


@pytest.mark.parametrize(("scales", "narrow"), [("tensor", True), ("row", False)])
def test_fp8_gathers_are_narrow_with_one_scale_a_tensor(service: TraceService, scales: str, narrow: bool) -> None:
    layer = titan(service, tensor_parallel=4, precision="fp8", fp8_scales=scales).pieces["layer.dense"]
    for graph in (layer.forward, layer.backward):
        gathers = [size for kind, _, size in exchanges(graph) if kind is Collective.ALL_GATHER]
        assert gathers == [(1.0 if narrow else 2.0) * TOKENS * HIDDEN] * 2
        products = graph.op_class == OpClass.GEMM
        assert set(graph.dtype[products].tolist()) == {int(DType.FP8)}


def test_casts_by_row_read_whole_arrays_and_scale_results(service: TraceService) -> None:
    def cast_bytes(scales: str) -> float:
        layer = titan(service, tensor_parallel=4, precision="fp8", fp8_scales=scales).pieces["layer.dense"]
        found = 0.0
        for graph in (layer.forward, layer.backward):
            rows = [r for r, name in enumerate(names(graph)) if name == "echo.quantise"]
            assert (graph.kind[rows] == OpKind.COMPUTE).all()
            assert (graph.bytes_read[rows] > 0).all()
            found += float((graph.bytes_read + graph.bytes_written)[rows].sum())
        return found

    assert cast_bytes("row") > 2 * cast_bytes("tensor") > 0


def test_context_parallelism_exchanges_keys_and_values(service: TraceService) -> None:
    whole = titan(service).pieces["layer.dense"]
    layer = titan(service, context_parallel=4, context_exchange="all_gather").pieces["layer.dense"]
    found = exchanges(layer.forward)
    # Keys and values of all ranks are gathered once (torch 2.13, rotation `allgather`): 2 arrays of 4 heads of 64.
    assert found == [(Collective.ALL_GATHER, Axis.CONTEXT, 2.0 * 2 * TOKENS * 4 * 64)]
    assert (layer.forward.op_class == OpClass.ATTENTION).sum() == 4
    assert any(kind is Collective.ALL_TO_ALL for kind, _, _ in exchanges(layer.backward))
    products = whole.forward.flop[whole.forward.op_class == OpClass.GEMM].sum()
    assert layer.forward.flop[layer.forward.op_class == OpClass.GEMM].sum() == pytest.approx(products / 4)


def test_keys_and_values_may_go_round_instead(service: TraceService) -> None:
    layer = titan(service, context_parallel=4, context_exchange="p2p").pieces["layer.dense"]
    shift = (Collective.ALL_TO_ALL, Axis.CONTEXT, 2.0 * 2 * TOKENS * 4 * 64 / 4)
    assert exchanges(layer.forward) == [shift] * 3
    assert (layer.forward.op_class == OpClass.ATTENTION).sum() == 4


@pytest.mark.parametrize(
    ("model", "changes", "match"),
    [
        (GPT, {}, "model.normalization"),
        (MOE, {}, "model.moe"),
        (LLAMA.model_copy(update={"qk_norm": True}), {}, "model.qk_norm"),
        (LLAMA, {"attention": "unfused"}, "attention"),
        (LLAMA, {"precision": "mxfp8"}, "precision = mxfp8"),
        (LLAMA, {"context_parallel": 2, "context_exchange": "a2a"}, "context_exchange = a2a"),
    ],
)
def test_what_llama_3_is_not_is_refused_by_name(service: TraceService, model: Any, changes: Any, match: str) -> None:
    with pytest.raises(TraceError, match=match):
        titan(service, model, **changes)


def test_what_a_collective_made_is_read_through_its_wait(service: TraceService) -> None:
    """`wait_tensor` gives back its own array: what reads it depends on the collective, and nothing is stored twice."""
    forward = titan(service, tensor_parallel=4).pieces["layer.dense"].forward
    deps = np.split(forward.dep_index, forward.dep_offsets[1:-1])
    for gather in np.flatnonzero(forward.is_collective & (forward.collective == Collective.ALL_GATHER)):
        (copy,) = (row for row in range(forward.num_ops) if gather in deps[row] and forward.kind[row] != OpKind.WAIT)
        assert forward.strings[forward.name[copy]] == "aten.cat"
