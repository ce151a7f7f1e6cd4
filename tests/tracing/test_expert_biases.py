"""Experts with biases and a clamped gate: Megatron's own TEGroupedMLP on a stand-in for GroupedLinear."""

from collections import Counter

import pytest

from echo_explore.core import TraceError
from echo_explore.graph import DType, ExecutionGraph, OpClass, Piece, weight_matrices
from echo_explore.specs.parameters import attention_parameters, feed_forward_parameters
from echo_explore.tracing import TraceService
from tests.tracing.models import MOE, OSS, request

pytestmark = pytest.mark.torch
TOKENS, HIDDEN, WIDTH, TOP, EXPERTS = 2 * 512, 1024, 512, 2, 8
ROWS = TOKENS * TOP


def layer(service: TraceService, **changes: object) -> Piece:
    return service.trace(request(OSS, **changes)).pieces["layer.moe"]


def in_experts(graph: ExecutionGraph) -> Counter[str]:
    """How often each operator runs in the experts themselves, their two linear layers left out."""
    modules = [graph.strings[i] for i in graph.module]
    names = [graph.strings[i] for i in graph.name]
    return Counter(name for name, module in zip(names, modules, strict=True) if module.endswith(".experts"))


@pytest.mark.parametrize("expert", [1, 4])
def test_parameters_equal_the_closed_form(service: TraceService, expert: int) -> None:
    parameters = layer(service, expert_parallel=expert).parameters
    experts = [p for p in parameters if ".experts." in p.name]
    assert sum(p.num_elements for p in experts) == EXPERTS // expert * feed_forward_parameters(OSS, WIDTH)
    assert all(p.expert == (expert > 1) for p in experts)
    rest = sum(p.num_elements for p in parameters) - sum(p.num_elements for p in experts)
    assert rest == attention_parameters(OSS) + 2 * HIDDEN + EXPERTS * (HIDDEN + 1)  # two norms, router with bias


@pytest.mark.parametrize("fusion", ["fused", "eager"])
def test_flop_equals_the_closed_form(service: TraceService, fusion: str) -> None:
    piece = layer(service, expert_parallel=4, fusion=fusion)
    attention = 2.0 * TOKENS * HIDDEN * (HIDDEN + 2 * 4 * 64) + 2.0 * TOKENS * HIDDEN**2
    core = 2.0 * TOKENS * 512 * HIDDEN
    routed = 2.0 * ROWS * 3 * HIDDEN * WIDTH + 2.0 * TOKENS * HIDDEN * EXPERTS
    assert piece.forward.flop.sum() == pytest.approx(attention + core + routed, rel=1e-3)
    assert piece.backward.flop.sum() == pytest.approx(2 * (attention + routed) + 2.5 * core, rel=1e-3)


def test_each_expert_adds_its_bias_by_itself(service: TraceService) -> None:
    """As `TEGroupedMLP._apply_bias`: bias times weight, sum, one array again; backward the gradients of both."""
    for local in (2, 4):
        piece = layer(service, expert_parallel=EXPERTS // local)
        forward, backward = in_experts(piece.forward), in_experts(piece.backward)
        assert (forward["aten.mul"], forward["aten.add"], forward["aten.cat"]) == (local, local, 2)
        assert backward["aten.sum"] == 2 * local  # of each expert's bias and of its weights
    graph = piece.forward
    added = [i for i, name in enumerate(graph.name) if graph.strings[name] == "aten.add"]
    moved = sum(
        graph.bytes_read[i] + graph.bytes_written[i] for i in added if "experts" in graph.strings[graph.module[i]]
    )
    assert moved == pytest.approx(3 * 2 * ROWS * HIDDEN)  # reads both, writes one, in bf16


def test_wide_weights_of_the_router_make_wide_sums(service: TraceService) -> None:
    """The fused exchanges carry weights in fp32: the sum with the bias is in fp32, and is cast back."""
    graph = layer(service, expert_parallel=4, expert_dispatcher="hybridep").forward
    wide = [i for i, n in enumerate(graph.name) if graph.strings[n] == "aten.mul" and graph.dtype[i] == DType.FP32]
    assert len(wide) == 2
    assert in_experts(graph)["aten._to_copy"] == 2  # the offset to the GPU; the sum back to bf16


def test_the_gate_is_one_kernel_and_its_clamp_is_not(service: TraceService) -> None:
    fused, eager = in_experts(layer(service).forward), in_experts(layer(service, fusion="eager").forward)
    assert fused["weighted_quick_geglu"] == 1
    assert fused["aten.clamp"] == eager["aten.clamp"] == 2
    assert "weighted_quick_geglu" not in eager
    plain = OSS.model_copy(update={"activation_func_clamp_value": 0.0})
    assert "aten.clamp" not in in_experts(service.trace(request(plain)).pieces["layer.moe"].forward)


def test_biases_save_what_they_need(service: TraceService) -> None:
    """The clamped copy of the first product is kept beside the product; recomputing the activation frees it."""
    plain = OSS.model_copy(update={"activation_func_clamp_value": 0.0})
    clamped, free = layer(service).saved_bytes, service.trace(request(plain)).pieces["layer.moe"].saved_bytes
    assert clamped - free == pytest.approx(2 * 2 * ROWS * WIDTH, rel=0.01)
    again = layer(service, recompute="selective:moe_act").saved_bytes
    # Then neither the clamped copy nor the result of the activation is kept.
    assert clamped - again == pytest.approx(2 * 2 * ROWS * WIDTH + 2 * ROWS * WIDTH, rel=0.01)


def test_narrow_experts_keep_their_biases_wide(service: TraceService) -> None:
    wide, narrow = layer(service).forward, layer(service, precision="mxfp8").forward
    assert in_experts(wide) == in_experts(narrow)
    products = narrow.op_class == OpClass.GROUPED_GEMM
    assert (narrow.dtype[products] == DType.MXFP8).all()


def test_swiglu_with_biases(service: TraceService) -> None:
    model = OSS.model_copy(
        update={"activation": "swiglu", "activation_func_clamp_value": 0.0, "glu_linear_offset": 0.0}
    )
    found = in_experts(service.trace(request(model)).pieces["layer.moe"].forward)
    assert (found["weighted_swiglu"], found["aten.cat"]) == (1, 1)


def test_a_load_gives_experts_their_tokens(service: TraceService) -> None:
    load = (3.0, 1.0) * 4
    graph = layer(service, expert_parallel=4, expert_load=load).forward
    modules = [graph.strings[i] for i in graph.module]
    sums = [
        graph.dims[i, 0]
        for i, name in enumerate(graph.name)
        if graph.strings[name] == "aten.add" and modules[i].endswith(".experts")
    ]
    assert sums == [ROWS * HIDDEN * 3 // 4, ROWS * HIDDEN // 4]


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (MOE.model_copy(update={"linear_bias": True}), {}, "shared experts take no biases"),
        (OSS, {"expert_tensor_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}, "layout.etp"),
    ],
)
def test_refused(service: TraceService, model: object, changes: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        service.trace(request(model, **changes))  # type: ignore[arg-type]


def test_muon_sees_a_matrix_an_expert(service: TraceService) -> None:
    trace = service.trace(request(OSS))
    experts = [p for p in weight_matrices(trace.pieces["layer.moe"].parameters) if "experts" in p.name]
    assert OSS.moe is not None
    f = OSS.moe.ffn_hidden_size
    assert [(p.shape, p.num_matrices, p.partition_dim) for p in experts] == [
        ((HIDDEN, 2 * f), EXPERTS, 1),
        ((f, HIDDEN), EXPERTS, 0),
    ]
