"""Named parts of layers that run again: FLOP and kept bytes in closed form."""

import pytest

from echo_explore.compute.flop import LayerKind, recomputed_flop
from echo_explore.graph import OpClass, Phase, Piece, piece_of
from echo_explore.specs import ModelSpec
from echo_explore.tracing import TraceService
from tests.tracing.models import LLAMA, MOE, request
from tests.tracing.test_latent import LATENT

pytestmark = pytest.mark.torch

TOKENS, HIDDEN, BF16 = 2 * 512, 1024, 2
ROUTER = 2.0 * TOKENS * HIDDEN * 8


def piece(service: TraceService, model: ModelSpec, kind: LayerKind, recompute: str, **changes: object) -> Piece:
    return service.trace(request(model, recompute=recompute, **changes)).pieces[f"layer.{kind}"]


@pytest.mark.parametrize(
    ("model", "kind", "recompute", "router"),
    [
        (LLAMA, "dense", "selective:mlp", 0.0),
        (LATENT, "dense", "selective:mla_up_proj", 0.0),
        (LATENT, "dense", "selective:core_attn,mla_up_proj,mlp", 0.0),
        (MOE, "moe", "selective:moe", ROUTER),
        (MOE, "moe", "selective:shared_experts", 0.0),
        (MOE, "moe", "selective:layernorm,moe_act", 0.0),
        (MOE, "moe", "full", ROUTER),
    ],
)
def test_flop(service: TraceService, model: ModelSpec, kind: LayerKind, recompute: str, router: float) -> None:
    plain, again = piece(service, model, kind, "none"), piece(service, model, kind, recompute)
    expected = router + recomputed_flop(
        model, kind=kind, recompute=recompute, sequence_length=512, num_tokens=TOKENS, attended_fraction=0.5
    )
    rows = again.backward.phase == Phase.RECOMPUTE
    assert again.backward.flop[rows].sum() == pytest.approx(expected, rel=1e-9)
    assert again.backward.flop.sum() == pytest.approx(plain.backward.flop.sum() + expected, rel=1e-9)
    assert again.forward.flop.sum() == plain.forward.flop.sum()


def test_norms_are_given_back(service: TraceService) -> None:
    plain, again = (piece(service, LLAMA, "dense", name) for name in ("none", "selective:layernorm"))
    results, reciprocals = 2 * TOKENS * HIDDEN * BF16, 2 * TOKENS * 4
    assert plain.saved_bytes - again.saved_bytes == results + reciprocals
    graph = again.backward
    rows = graph.phase == Phase.RECOMPUTE
    assert [graph.strings[n] for n in graph.name[rows]] == ["aten._fused_rms_norm", "aten.copy_"] * 2
    copies = rows & (graph.op_class == OpClass.COPY)
    assert graph.bytes_written[copies].tolist() == [TOKENS * HIDDEN * BF16] * 2


def test_latent_projections_are_given_back(service: TraceService) -> None:
    plain, again = (piece(service, LATENT, "dense", name) for name in ("none", "selective:mla_up_proj"))
    heads, widths = 16, 192 + 192 + 96
    assert plain.saved_bytes - again.saved_bytes == TOKENS * heads * widths * BF16
    assert again.backward_peak_bytes > plain.backward_peak_bytes


def test_what_comes_back_is_read_behind_its_copy(service: TraceService) -> None:
    graph = piece(service, LATENT, "dense", "selective:mla_up_proj").backward
    names = [graph.strings[n] for n in graph.name]
    copies = [i for i, name in enumerate(names) if name == "aten.copy_"]
    attention = next(i for i, kind in enumerate(graph.op_class) if kind == OpClass.ATTENTION)
    assert len(copies) == 3
    assert set(copies) <= set(graph.dep_index[graph.dep_offsets[attention] : graph.dep_offsets[attention + 1]].tolist())


def test_activations_of_experts_are_given_back(service: TraceService) -> None:
    plain, again = (piece(service, MOE, "moe", name) for name in ("none", "selective:moe_act"))
    assert plain.saved_bytes - again.saved_bytes >= 2 * TOKENS * 512 * BF16
    assert (again.backward.phase == Phase.RECOMPUTE).sum() == 2  # one fused kernel, one copy


@pytest.mark.parametrize("recompute", ["selective:layernorm", "selective:mlp", "selective:layernorm,moe_act"])
def test_narrow_inputs_that_are_made_anew_are_not_kept(service: TraceService, recompute: str) -> None:
    """8-bit copies save nothing of what is not kept: both precisions then keep the same of it."""
    model = MOE if "moe" in recompute else LLAMA
    kind: LayerKind = "moe" if "moe" in recompute else "dense"
    wide, narrow = (piece(service, model, kind, recompute, precision=p).saved_bytes for p in ("bf16", "fp8"))
    all_wide, all_narrow = (piece(service, model, kind, "none", precision=p).saved_bytes for p in ("bf16", "fp8"))
    assert wide - narrow < all_wide - all_narrow
    assert narrow <= wide + TOKENS * HIDDEN * BF16  # the attention output is kept in both


def test_layers_that_run_again_and_layers_that_are_kept_in_one_trace(service: TraceService) -> None:
    """However many of them: blocks and groups of any size share a trace, whose pieces are those of all and none."""
    some = service.trace(request(LLAMA, recompute="full:block:3"))
    assert some.key == service.trace(request(LLAMA, recompute="full:uniform:4")).key
    for name, recompute in (("layer", "none"), ("again", "full")):
        ours, alone = some.pieces[f"{name}.dense"], piece(service, LLAMA, "dense", recompute)
        assert (ours.saved_bytes, ours.backward_peak_bytes) == (alone.saved_bytes, alone.backward_peak_bytes)
        assert ours.backward.flop.tolist() == alone.backward.flop.tolist()
        assert ours.parameters == alone.parameters


@pytest.mark.parametrize(("model", "kind"), [(LLAMA, "dense"), (MOE, "moe")])
def test_a_group_of_one_peaks_as_a_layer_that_runs_again(
    service: TraceService, model: ModelSpec, kind: LayerKind
) -> None:
    """What a group needs is composed of layers that are kept; for one layer it was measured."""
    some = service.trace(request(model, recompute="full:block:1"))
    composed, measured = piece_of(some, f"lead.{kind}"), some.pieces[f"again.{kind}"]
    assert composed.backward_peak_bytes == pytest.approx(measured.backward_peak_bytes, rel=2e-3)


def test_narrow_copies_are_kept_of_layers_that_are_kept(service: TraceService) -> None:
    some = service.trace(request(LLAMA, recompute="full:block:1", precision="fp8"))
    assert some.pieces["layer.dense"].saved_bytes == piece(service, LLAMA, "dense", "none", precision="fp8").saved_bytes
    assert some.pieces["again.dense"].saved_bytes == some.boundary_bytes
