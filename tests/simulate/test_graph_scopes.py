"""CUDA graphs of parts of layers: host calls of captured modules, and of nothing else."""

from dataclasses import replace
from typing import Any

import pytest

from echo_explore.graph import OpRow, Phase, Piece, Trace, build_graph
from echo_explore.simulate.graph_scopes import with_graph_scopes
from echo_explore.specs import load_stack

STACK = load_stack("megatron-core")
MODULES = (
    "input_layernorm", "self_attention.linear_qkv", "self_attention", "", "pre_mlp_layernorm", "mlp.router", "mlp",
    "mlp.experts", "",
)  # fmt: skip


def _graph(modules: tuple[str, ...], phase: Phase) -> Any:
    return build_graph(
        [OpRow(name="op", phase=phase, host_calls=3, module=f"decoder.layers.N.{m}".rstrip(".")) for m in modules]
    )


def _trace(kind: str) -> Trace:
    piece = Piece(
        forward=_graph(MODULES, Phase.FORWARD), backward=_graph(MODULES[::-1], Phase.BACKWARD), parameters=(),
        saved_bytes=0.0, forward_peak_bytes=0.0, backward_peak_bytes=0.0,
    )  # fmt: skip
    pieces = {"embedding": piece, f"layer.{kind}": piece}
    return Trace(key="", request={}, pieces=pieces, layer_kinds=(kind,), boundary_bytes=0.0, facts={})


@pytest.mark.parametrize(
    ("kind", "scopes", "calls"),
    [
        ("moe", ("attn",), [1, 0, 0, 0, 3, 3, 3, 3, 3]),
        ("moe", ("moe_router",), [3, 3, 3, 3, 1, 0, 3, 3, 3]),
        ("moe-window", ("attn", "moe_router", "moe_preprocess"), [1, 0, 0, 0, 0, 0, 3, 3, 3]),
        ("moe", ("moe",), [3, 3, 3, 3, 1, 0, 0, 0, 0]),
        ("moe", ("mlp",), [3] * 9),
        ("dense", ("mlp",), [3, 3, 3, 3, 1, 0, 0, 0, 0]),
        ("dense", ("moe_router",), [3] * 9),
    ],
)
def test_calls_of_captured_modules(kind: str, scopes: tuple[Any, ...], calls: list[int]) -> None:
    """A run of captured rows costs one call; the residual behind a part goes with it, forward and backward."""
    plain = _trace(kind)
    captured = with_graph_scopes(STACK.model_copy(update={"graph_scopes": scopes}), plain)
    layer = captured.pieces[f"layer.{kind}"]
    assert layer.forward.host_calls.tolist() == calls
    starts = [int(a == 0 or a == 1) for a in calls]
    backward = [3 - 3 * s for s in starts[::-1]]
    first = [i for i, s in enumerate(starts[::-1]) if s and (i == 0 or not starts[::-1][i - 1])]
    for i in first:
        backward[i] = 1
    assert layer.backward.host_calls.tolist() == backward
    assert layer.forward.flop.tolist() == plain.pieces[f"layer.{kind}"].forward.flop.tolist()
    assert captured.pieces["embedding"] is plain.pieces["embedding"]


def test_nothing_to_do() -> None:
    plain = _trace("moe")
    assert with_graph_scopes(STACK, plain) is plain
    whole = STACK.model_copy(update={"graph_scopes": ("attn",), "cuda_graphs": True})
    assert with_graph_scopes(whole, plain) is plain
    assert replace(plain).layer_kinds == ("moe",)
