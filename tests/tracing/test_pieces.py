"""What a layer of a real trace does, sends and keeps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_explore.core import TraceError
from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, Phase, Piece, input_rows, save_trace
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, LLAMA, request

pytestmark = pytest.mark.torch
HIDDEN_BYTES = 2.0 * 512 * 2 * 1024  # bf16, sequence, batch, hidden


def layer(service: TraceService, **changes: Any) -> Piece:
    return service.trace(request(**changes)).pieces["layer.dense"]


def collectives(piece: Piece) -> list[tuple[str, float, bool]]:
    found = []
    for graph in (piece.forward, piece.backward):
        for row in np.flatnonzero(graph.is_collective):
            assert graph.axis[row] == Axis.TENSOR
            kind = Collective(int(graph.collective[row])).name
            found.append((kind, float(graph.message_bytes[row]), bool(graph.asynchronous[row])))
    return found


def test_tensor_parallel_layer_reduces_twice_each_way(service: TraceService) -> None:
    expected = [("ALL_REDUCE", HIDDEN_BYTES, False)] * 2 + [("ALL_REDUCE", HIDDEN_BYTES, True)] * 2
    assert collectives(layer(service, tensor_parallel=4)) == expected


def test_sequence_parallel_layer_gathers_and_scatters_whole_arrays(service: TraceService) -> None:
    found = collectives(layer(service, tensor_parallel=4, sequence_parallel=True))
    assert {size for _, size, _ in found} == {HIDDEN_BYTES}
    names = [name for name, _, _ in found]
    # Forward 2 and 2; backward gathers gradient and saved input again (arXiv 2205.05198, section 4.2).
    assert (names.count("ALL_GATHER"), names.count("REDUCE_SCATTER")) == (2 + 4, 2 + 2)


def test_one_rank_does_not_communicate(service: TraceService) -> None:
    assert collectives(layer(service)) == []


def test_gradients_add_up_in_the_type_that_the_stack_keeps(service: TraceService) -> None:
    """Apart from the product: main gradient read, gradient read, main gradient written."""
    wide, narrow = (layer(service, gradient_accumulation_fusion=False, narrow_gradients=n) for n in (False, True))
    moved = [float((p.backward.bytes_read + p.backward.bytes_written).sum()) for p in (wide, narrow)]
    assert moved[0] - moved[1] == (4 + 2 + 4 - 3 * 2) * wide.num_parameters


def test_waits_name_asynchronous_collectives_before_them(service: TraceService) -> None:
    graph = layer(service, tensor_parallel=4, sequence_parallel=True).backward
    waits = np.flatnonzero(graph.kind == OpKind.WAIT)
    assert sorted(graph.awaits[waits]) == list(np.flatnonzero(graph.is_collective & graph.asynchronous))
    assert (graph.awaits[waits] < waits).all()
    assert (graph.awaits[graph.kind != OpKind.WAIT] == -1).all()


def test_a_trace_is_the_same_every_time(service: TraceService, tmp_path: Path) -> None:
    contents = set()
    for number in range(3):
        trace = service.trace(request(tensor_parallel=2, attention="unfused", dropout=True))
        path = tmp_path / f"{number}.npz"
        save_trace(path, replace(trace, facts={}))
        contents.add(path.read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activation_memory(service: TraceService, recompute: str) -> None:
    """Bytes a layer keeps, Korthikanti et al. (arXiv 2205.05198), equations 2 to 6, with sequence parallelism."""
    piece = layer(
        service, tensor_parallel=4, sequence_parallel=True, attention="unfused", dropout=True, recompute=recompute
    )
    s, b, h, a, t = 512, 2, 1024, 16, 4
    expected = {
        "none": s * b * h * (34 + 5 * a * s / h) / t,
        "selective": 34 * s * b * h / t,
        "full": 2 * s * b * h / t,
    }
    # Statistics of the norms are left out of the formula.
    assert piece.saved_bytes == pytest.approx(expected[recompute], rel=2e-3)


def test_peaks_cover_what_stays(service: TraceService) -> None:
    trace = service.trace(request(LLAMA, tensor_parallel=2, sequence_parallel=True))
    for piece in trace.pieces.values():
        assert piece.forward_peak_bytes >= piece.saved_bytes > 0
        assert piece.backward_peak_bytes > 0


def test_boundary(service: TraceService) -> None:
    assert service.trace(request(tensor_parallel=4)).boundary_bytes == HIDDEN_BYTES
    assert service.trace(request(tensor_parallel=4, sequence_parallel=True)).boundary_bytes == HIDDEN_BYTES / 4


def test_full_recomputation_runs_the_forward_again(service: TraceService) -> None:
    piece = layer(service, tensor_parallel=2, recompute="full")
    again = piece.backward.phase == Phase.RECOMPUTE

    def names(graph: object, rows: object) -> list[str]:
        return [graph.strings[i] for i in graph.name[rows]]  # type: ignore[attr-defined]

    assert names(piece.backward, again) == names(piece.forward, slice(None))


def test_fusion_leaves_the_products_alone(service: TraceService) -> None:
    fused, eager = layer(service, dropout=True), layer(service, dropout=True, fusion="eager")
    for graph in ("forward", "backward"):
        first, second = getattr(fused, graph), getattr(eager, graph)
        products = [g.dims[(g.op_class == OpClass.GEMM)].tolist() for g in (first, second)]
        assert products[0] == products[1]
        assert first.num_ops < second.num_ops
        assert first.bytes_read.sum() < second.bytes_read.sum()


def test_bytes_of_fused_kernels(service: TraceService) -> None:
    graph = layer(service, dropout=True).forward
    names = [graph.strings[i] for i in graph.name]
    gelu, add = names.index("bias_gelu"), names.index("bias_dropout_add_fused_train")
    wide = 4 * HIDDEN_BYTES
    assert graph.bytes_read[gelu] == wide + 2 * 4096
    assert graph.bytes_written[gelu] == wide
    assert graph.bytes_read[add] == 2 * HIDDEN_BYTES + 2 * 1024
    assert graph.bytes_written[add] == HIDDEN_BYTES * 1.5  # result and mask of one byte an element


def test_unfused_weight_gradient_is_added_apart(service: TraceService) -> None:
    fused, apart = layer(service), layer(service, gradient_accumulation_fusion=False)
    weights = sum(p.num_elements for p in fused.parameters if p.name.endswith("weight") and "linear" in p.name)
    names = [apart.backward.strings[i] for i in apart.backward.name]
    added = sum(
        int(apart.backward.dims[i, 0])
        for i, name in enumerate(names)
        if name == "aten.add_" and apart.backward.dtype[i] == 1
    )
    assert added == sum(p.num_elements for p in fused.parameters) > weights > 0
    assert fused.backward.flop.sum() == apart.backward.flop.sum()


def test_dependences_point_back(service: TraceService) -> None:
    graph = layer(service, tensor_parallel=2, attention="unfused").forward
    rows = np.repeat(np.arange(graph.num_ops), np.diff(graph.dep_offsets))
    assert (graph.dep_index < rows).all()
    assert graph.dep_index.size >= graph.num_ops - 3


@pytest.mark.parametrize(
    ("precision", "dtype", "element_bytes"),
    [("fp8", DType.FP8, 1.0), ("mxfp8", DType.MXFP8, 33 / 32), ("nvfp4", DType.NVFP4, 9 / 16)],
)
def test_narrow_linear_layers(service: TraceService, precision: str, dtype: DType, element_bytes: float) -> None:
    changes: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
    wide, narrow = layer(service, **changes), layer(service, **changes, precision=precision)
    for which, num_casts in (("forward", 4), ("backward", 4)):
        first, second = getattr(wide, which), getattr(narrow, which)
        casts = np.array([second.strings[i] == "echo.quantise" for i in second.name])
        assert casts.sum() == num_casts
        assert (second.dtype[second.op_class == OpClass.GEMM] == dtype).all()
        assert (second.dtype[second.op_class == OpClass.ATTENTION] == DType.BF16).all()
        assert second.flop[~casts].tolist() == first.flop.tolist()
        ratio = second.message_bytes[~casts] / np.maximum(first.message_bytes, 1.0)
        gathers = first.collective == Collective.ALL_GATHER
        assert ratio[gathers] == pytest.approx(element_bytes / 2)
        assert (ratio[first.collective == Collective.REDUCE_SCATTER] == 1.0).all()
    assert narrow.saved_bytes < wide.saved_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_parallel": 2}, "megatron-core refuses the configuration: num_moe_experts"),
        ({"precision": "fp32"}, "attention: flash attention kernels"),
        ({"tensor_parallel": 3}, "megatron-core refuses the configuration: .*multiple of tensor_model_parallel_size"),
    ],
)
def test_refusals_are_one_line(service: TraceService, changes: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        service.trace(request(GPT, **changes))
    assert "\n" not in str(caught.value)


def test_the_host_dispatches_more_than_it_launches_and_a_fused_region_is_one_call(service: TraceService) -> None:
    eager, fused = layer(service, fusion="eager").forward, layer(service, fusion="fused").forward
    assert (eager.host_calls >= 1).all()
    assert eager.host_calls.sum() > eager.num_ops  # views
    assert fused.host_calls.sum() < eager.host_calls.sum()


def test_norm_fusion_keeps_the_norm_one_kernel_and_nothing_else(service: TraceService) -> None:
    eager = layer(service, model=LLAMA, fusion="eager").forward
    norm = layer(service, model=LLAMA, fusion="norm").forward
    fused = layer(service, model=LLAMA, fusion="fused").forward

    def of_norms(graph: Any) -> int:
        return sum("layernorm" in graph.strings[graph.module[row]] for row in range(graph.num_ops))

    assert of_norms(norm) == of_norms(fused) == 2
    assert of_norms(eager) == 2 * 8  # to fp32, square, mean, plus epsilon, rsqrt, product, back, product
    assert fused.num_ops - 1 < norm.num_ops < eager.num_ops  # Transformer Engine copies values


def test_kept_inputs_are_gathered_once_and_are_whole(service: TraceService) -> None:
    parallel: dict[str, Any] = {"tensor_parallel": 4, "sequence_parallel": True}
    again = layer(service, **parallel)
    once = layer(service, keeps_gathered_inputs=True, **parallel)
    names = [name for name, _, _ in collectives(once)]
    assert (names.count("ALL_GATHER"), names.count("REDUCE_SCATTER")) == (2 + 2, 2 + 2)
    # Two products keep [tokens, hidden] instead of a quarter of it.
    assert once.saved_bytes - again.saved_bytes == pytest.approx(2 * HIDDEN_BYTES * 3 / 4)
    assert once.forward.flop.sum() == again.forward.flop.sum()


def test_split_backward_parts_products_in_half(service: TraceService) -> None:
    """Every linear layer has one product for its input and one for its weights; attention has none of the latter."""
    for changes in ({}, {"tensor_parallel": 4, "sequence_parallel": True}, {"recompute": "full"}):
        piece = layer(service, **changes)
        graph = piece.backward
        leads = input_rows(graph)
        is_weight = np.array(["linear" in graph.strings[module] for module in graph.module])
        linear = is_weight & (graph.op_class == OpClass.GEMM) & (graph.phase == Phase.BACKWARD)
        assert graph.flop[linear & leads].sum() == graph.flop[linear & ~leads].sum() > 0
        assert leads[(graph.op_class == OpClass.GEMM) & ~linear].all()
        assert leads[graph.phase == Phase.RECOMPUTE].all()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_joint_array_of_queries_keys_and_values_is_not_kept(service: TraceService, *, qk_norm: bool) -> None:
    """Rotary positions make new queries and keys, Transformer Engine copies values: 2 bytes an element of each stay."""
    model = LLAMA.model_copy(update={"qk_norm": qk_norm})
    piece = layer(service, model=model)
    saved = dict(piece.saved_tensors)
    keys = LLAMA.num_key_value_heads * LLAMA.head_dim
    each = 2.0 * 2 * 512  # bytes of a column of all tokens
    assert "self_attention.linear_qkv aten.mm" not in saved
    assert saved["self_attention echo.rope"] == each * (LLAMA.hidden_size + keys)
    assert saved["self_attention.core_attention aten.clone"] == each * keys
    norms = ("self_attention aten.clone", "self_attention.k_layernorm aten.clone")  # what they read
    assert [saved.get(name, 0.0) for name in norms] == [each * LLAMA.hidden_size * qk_norm, each * keys * qk_norm]


def test_queries_keys_and_values_that_no_positions_turn_stay_in_one_array(service: TraceService) -> None:
    saved = dict(layer(service, model=GPT).saved_tensors)
    assert saved["self_attention.linear_qkv aten.add"] == 2.0 * 2 * 512 * 3 * GPT.hidden_size
    assert "self_attention.core_attention aten.clone" not in saved
