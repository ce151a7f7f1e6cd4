"""Experts whose gate and casts are part of their products."""

import pytest

from echo_explore.graph import ExecutionGraph, OpClass, OpRow, Phase, Piece, Trace, build_graph
from echo_explore.simulate.fused_experts import with_fused_experts
from echo_explore.specs import Candidate
from tests.simulate.support import candidate

EXPERTS = "decoder.layers.N.mlp.experts"
PRODUCT, PASS, CAST, COPY = OpClass.GROUPED_GEMM, OpClass.ELEMENTWISE, OpClass.QUANTISE, OpClass.COPY
FORWARD = (
    ("mlp", OpClass.PERMUTE), ("mlp.experts", CAST), ("mlp.experts.linear_fc1", PRODUCT), ("mlp.experts", PASS),
    ("mlp.experts.linear_fc2", CAST), ("mlp.experts.linear_fc2", PRODUCT), ("mlp.experts", PASS), ("mlp", PASS),
)  # fmt: skip
BACKWARD = (
    ("mlp.experts", CAST), ("mlp.experts", PRODUCT), ("mlp.experts", PRODUCT), ("mlp.experts", PASS), ("mlp", PASS),
    ("mlp.experts", COPY), ("mlp.experts", PRODUCT), ("mlp.experts", PRODUCT), ("mlp.experts", PASS),
)  # fmt: skip


def graph(rows: tuple[tuple[str, OpClass], ...], phase: Phase) -> ExecutionGraph:
    """Each row waits for the one before."""
    return build_graph(
        [
            OpRow(op_class=what, phase=phase, module=f"decoder.layers.N.{module}", deps=(i - 1,) if i else ())
            for i, (module, what) in enumerate(rows)
        ]
    )


def trace(phase: Phase = Phase.BACKWARD) -> Trace:
    piece = Piece(
        forward=graph(FORWARD, Phase.FORWARD), backward=graph(BACKWARD, phase), parameters=(), saved_bytes=0.0,
        forward_peak_bytes=0.0, backward_peak_bytes=0.0,
    )  # fmt: skip
    pieces = {"embedding": piece, "layer.moe": piece}
    return Trace(key="", request={}, pieces=pieces, layer_kinds=("moe",), boundary_bytes=0.0, facts={})


def job(precision: str = "mxfp8", stack: str = "megatron-bridge-graphs") -> Candidate:
    return candidate(
        cluster="gb200-nvl72", stack=stack, precision=precision, layout="tp=1,pp=1,dp=8", model="llama3-8b"
    )


def test_passes_between_the_two_products_are_gone() -> None:
    fused = with_fused_experts(job(), trace()).pieces
    assert fused["embedding"].forward.num_ops == len(FORWARD)
    layer = fused["layer.moe"]
    assert layer.forward.op_class.tolist() == [what for i, (_, what) in enumerate(FORWARD) if i not in (3, 4)]
    assert layer.backward.op_class.tolist() == [what for i, (_, what) in enumerate(BACKWARD) if i not in (3, 5)]


def test_readers_wait_for_what_the_passes_waited_for() -> None:
    layer = with_fused_experts(job(), trace()).pieces["layer.moe"]
    for part in (layer.forward, layer.backward):
        deps = [part.dep_index[a:b].tolist() for a, b in zip(part.dep_offsets, part.dep_offsets[1:], strict=False)]
        assert deps == [[], *([i] for i in range(part.num_ops - 1))]


@pytest.mark.parametrize("changed", [{"precision": "bf16"}, {"stack": "megatron-bridge"}])
def test_other_precisions_and_stacks_keep_them(changed: dict[str, str]) -> None:
    plain = trace()
    assert with_fused_experts(job(**changed), plain) is plain


def test_what_runs_again_stays() -> None:
    layer = with_fused_experts(job(), trace(Phase.RECOMPUTE)).pieces["layer.moe"]
    assert layer.backward.num_ops == len(BACKWARD)
