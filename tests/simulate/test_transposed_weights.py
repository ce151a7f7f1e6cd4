"""Frozen 8-bit weights without a kept transpose."""

import pytest

from echo_explore.graph import DType, ExecutionGraph, OpClass, OpRow, Phase, Piece, Trace, build_graph, op_rows
from echo_explore.simulate.transposed_weights import with_transposed_weights
from echo_explore.specs import Candidate
from tests.simulate.support import candidate

M, N, K = 8192, 4096, 1024
LORA = {"recipe.lora_rank": "16", "stack.keeps_transposed_weights": "false"}


def product(dtype: DType, phase: Phase, *deps: int) -> OpRow:
    return OpRow(op_class=OpClass.GEMM, dtype=dtype, phase=phase, dims=(1, M, N, K), deps=deps)


def graph() -> ExecutionGraph:
    """A product that runs again, one of a gradient and a frozen weight, two of an adapter."""
    return build_graph(
        [
            product(DType.FP8, Phase.RECOMPUTE),
            product(DType.FP8, Phase.BACKWARD, 0),
            product(DType.BF16, Phase.BACKWARD, 1),
            product(DType.BF16, Phase.BACKWARD, 2),
        ]
    )


def trace() -> Trace:
    piece = Piece(
        forward=graph(), backward=graph(), parameters=(), saved_bytes=0.0, forward_peak_bytes=0.0,
        backward_peak_bytes=0.0,
    )  # fmt: skip
    pieces = {"layer.dense": piece}
    return Trace(key="", request={}, pieces=pieces, layer_kinds=("dense",), boundary_bytes=0.0, facts={})


def job(cluster: str = "h100-ndr", precision: str = "fp8", **changes: str) -> Candidate:
    return candidate(
        cluster=cluster, stack="nemo-megatron", precision=precision, layout="tp=1,pp=1,dp=8", model="llama3-8b",
        overrides=tuple(f"{name}={value}" for name, value in (LORA | changes).items()),
    )  # fmt: skip


def test_backward_transposes_the_frozen_weight_first() -> None:
    rows = op_rows(with_transposed_weights(job(), trace()).pieces["layer.dense"].backward)
    assert [row.op_class for row in rows] == [OpClass.GEMM, OpClass.COPY, *[OpClass.GEMM] * 3]
    assert [row.deps for row in rows] == [(), (), (0, 1), (2,), (3,)]
    assert rows[1].bytes_read == rows[1].bytes_written == N * K


@pytest.mark.parametrize(
    "changed",
    [
        {"cluster": "b200-ndr"},
        {"precision": "bf16"},
        {"recipe.lora_rank": "0"},
        {"stack.keeps_transposed_weights": "true"},
    ],
)
def test_others_have_none(changed: dict[str, str]) -> None:
    plain = trace()
    assert with_transposed_weights(job(**changed), plain) is plain
