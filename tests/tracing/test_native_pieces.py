"""Pieces of plain PyTorch models: FLOP, parameters, memory, what is refused."""

from typing import Any

import numpy as np
import pytest

from echo_explore.compute.flop import layer_forward_flop
from echo_explore.core import TraceError
from echo_explore.graph import Axis, Collective, OpClass, Phase, Trace
from echo_explore.specs.parameters import count_parameters
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, LLAMA, MOE, request

pytestmark = pytest.mark.torch
TOKENS = 512 * 2


def native(service: TraceService, model: Any = LLAMA, **changes: Any) -> Trace:
    return service.trace(request(model, **{"framework": "fsdp2", "gradient_accumulation_fusion": False} | changes))


def flop(trace: Trace) -> tuple[float, float]:
    layer = trace.pieces["layer.dense"]
    return float(layer.forward.flop.sum()), float(layer.backward.flop.sum())


def layer_flop(model: Any) -> float:
    return layer_forward_flop(model, kind="dense", sequence_length=512, num_tokens=TOKENS, attended_fraction=0.5)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_executed_flop_is_the_closed_form(service: TraceService, model: Any) -> None:
    forward, backward = flop(native(service, model))
    attention = 4.0 * 512 * TOKENS * model.num_attention_heads * model.head_dim / 2
    assert forward == pytest.approx(layer_flop(model), rel=1e-3)
    # A flash backward executes 2.5 of its forward, products 2: arXiv 2307.08691, section 4.1.
    assert backward == pytest.approx(2 * forward + 0.5 * attention, rel=1e-3)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_parameters_are_exact_and_the_vocabulary_is_not_padded(service: TraceService, model: Any) -> None:
    pieces = native(service, model).pieces
    found = pieces["embedding"].num_parameters + 8 * pieces["layer.dense"].num_parameters
    found += pieces["head"].num_parameters - model.vocab_size * model.hidden_size * model.tied_embeddings
    assert found == count_parameters(model).total


def test_checkpoints_run_the_forward_again_or_every_second_product(service: TraceService) -> None:
    traces = {name: native(service, recompute=name) for name in ("none", "selective", "full")}
    forward, plain = flop(traces["none"])
    again = {name: flop(trace)[1] - plain for name, trace in traces.items()}
    assert again["none"] == 0
    # The last product of a layer is not needed again: torch's checkpoint stops early.
    assert 0 < again["selective"] < again["full"] < forward
    saved = {name: trace.pieces["layer.dense"].saved_bytes for name, trace in traces.items()}
    assert saved["full"] == 2.0 * TOKENS * 1024  # the input, bf16
    assert saved["full"] < saved["selective"] < saved["none"]
    backward = traces["selective"].pieces["layer.dense"].backward
    kinds = backward.op_class[backward.phase == Phase.RECOMPUTE]
    assert OpClass.ATTENTION not in kinds


@pytest.mark.parametrize("framework", ["fsdp2", "ddp"])
def test_some_layers_run_again_and_others_are_kept(service: TraceService, framework: str) -> None:
    some = native(service, framework=framework, recompute="full:block:3").pieces
    for name, whole in (("again.dense", "full"), ("layer.dense", "none")):
        alike = native(service, framework=framework, recompute=whole).pieces["layer.dense"]
        assert some[name].backward.flop.sum() == alike.backward.flop.sum()
        assert some[name].saved_bytes == alike.saved_bytes


def test_compiled_functions_are_one_kernel_and_keep_their_inputs_only(service: TraceService) -> None:
    fused, eager = native(service).pieces["layer.dense"], native(service, fusion="eager").pieces["layer.dense"]
    assert fused.forward.num_ops < eager.forward.num_ops
    assert fused.saved_bytes < eager.saved_bytes
    names = [fused.forward.strings[i] for i in fused.forward.name]
    assert (names.count("_rms_norm"), names.count("_rotate"), names.count("_swiglu")) == (2, 2, 1)
    norm = names.index("_rms_norm")
    assert fused.forward.bytes_read[norm] == 2.0 * (TOKENS + 1) * 1024
    assert fused.forward.bytes_written[norm] == 2.0 * TOKENS * 1024


@pytest.mark.parametrize("fusion", ["fused", "eager"])
def test_a_layer_saves_what_its_backward_reads_and_nothing_else(service: TraceService, fusion: str) -> None:
    """In units of one result of the layer; rotary embedding is linear, so that its input is not kept.

    Compiled: inputs and results of two norms, queries, keys, values, attention, gate, up, their product. Eager norms
    keep their input in fp32 and the normed array before the weight too, eager activations the activated gate.
    """
    layer = native(service, fusion=fusion).pieces["layer.dense"]
    unit = 2.0 * TOKENS * LLAMA.hidden_size
    width = LLAMA.num_key_value_heads * LLAMA.head_dim / LLAMA.hidden_size
    inner = LLAMA.ffn_hidden_size / LLAMA.hidden_size
    units = {"fused": 2 * 2 + 2 + 2 * width + 3 * inner, "eager": 2 * (2 + 2) + 2 + 2 * width + 4 * inner}[fusion]
    assert layer.saved_bytes == pytest.approx(units * unit, rel=0.02)
    assert sum(size for _, size in layer.saved_tensors) == pytest.approx(layer.saved_bytes, rel=0.1)


def test_a_fused_loss_is_one_kernel_of_an_eager_program(service: TraceService) -> None:
    head = native(service, fusion="eager", fused_loss=True).pieces["head"]
    assert (head.forward.op_class == OpClass.CROSS_ENTROPY).sum() == 1
    assert (head.backward.op_class == OpClass.CROSS_ENTROPY).sum() == 1
    plain = native(service, fusion="eager").pieces["head"]
    assert not (plain.forward.op_class == OpClass.CROSS_ENTROPY).any()
    assert head.saved_bytes < plain.saved_bytes


def test_tensor_parallel_plans_gather_and_scatter_between_modules(service: TraceService) -> None:
    layer = native(service, tensor_parallel=4, sequence_parallel=True).pieces["layer.dense"]
    for graph in (layer.forward, layer.backward):
        rows = np.flatnonzero(graph.is_collective)
        kinds = [Collective(int(graph.collective[r])) for r in rows]
        assert (kinds.count(Collective.ALL_GATHER), kinds.count(Collective.REDUCE_SCATTER)) == (2, 2)
        assert set(graph.message_bytes[rows]) == {2.0 * TOKENS * 1024}
        assert set(graph.axis[rows]) == {Axis.TENSOR}


def test_ddp_computes_in_bf16_and_keeps_fp32(service: TraceService) -> None:
    pieces = native(service, GPT, framework="ddp", fusion="eager").pieces
    products = pieces["layer.dense"].forward.op_class == OpClass.GEMM
    assert {pieces["layer.dense"].forward.dtype[i] for i in np.flatnonzero(products)} == {2}
    assert flop(native(service, GPT, framework="ddp", fusion="eager")) == flop(native(service, GPT))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (MOE, {}, "model.moe: mixtures of experts"),
        (LLAMA, {"context_parallel": 2}, "layout.cp: context parallelism"),
        (LLAMA, {"tensor_parallel": 2}, "layout.sp: tensor parallelism"),
        (GPT, {"tensor_parallel": 2, "sequence_parallel": True}, "layout.tp: learned positions"),
        (LLAMA, {"framework": "ddp", "recompute": "selective"}, "recompute: selective is traced for fsdp2 only"),
    ],
)
def test_what_is_not_traced_is_refused_by_name(
    service: TraceService, model: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        native(service, model, **changes)


def test_a_cast_that_finds_its_scales_reads_its_array_more_than_once(service: TraceService) -> None:
    found = {}
    for scales in ("known", "tensor", "row"):
        forward = native(service, precision="fp8", fp8_scales=scales).pieces["layer.dense"].forward
        casts = np.array([forward.strings[name] == "echo.quantise" for name in forward.name])
        found[scales] = (float(forward.bytes_read[casts].sum()), float(forward.bytes_written[casts].sum()))
    assert found["tensor"][0] == 2 * found["known"][0] > 0
    assert found["row"][0] == 3 * found["known"][0]
    assert len({written for _, written in found.values()}) == 1
