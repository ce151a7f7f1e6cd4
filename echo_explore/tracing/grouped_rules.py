"""Experts of PyTorch: `aten._grouped_mm`, and the sorting of tokens around it."""

from typing import Any

from echo_explore.graph import OpClass
from echo_explore.tracing.op_rules import Kernel, Rule, Tensors, tensor_bytes


def _grouped_mm(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """Rows of the first operand by the matrix of their group; of two flat operands one product a group."""
    a, b = inputs[:2]
    if b.dim() == 3:  # [m, k] by [groups, k, n]
        groups, k, n = b.shape
        m = a.shape[0]
        dims, flop = (groups, m, n, k), 2.0 * m * n * k
    else:  # [k, m] by [m, n]: the gradient of the matrices, a share of m each
        (k, m), n, groups = a.shape, b.shape[1], outputs[0].shape[0]
        dims, flop = (groups, groups * k, n, max(m // groups, 1)), 2.0 * m * n * k
    return Kernel(op_class=OpClass.GROUPED_GEMM, dims=dims, flop=flop, dtype=a.dtype)


def _take(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """x[index]: reads only what it takes."""
    out = outputs[0]
    read = float(tensor_bytes(out) + sum(tensor_bytes(t) for t in inputs[1:]))
    columns = out.shape[-1] if out.dim() > 1 else 1
    return Kernel(
        op_class=OpClass.PERMUTE, dims=(out.numel() // max(columns, 1), columns), bytes_read=read, dtype=out.dtype
    )


def _sort(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """A radix sort passes over 64-bit keys and their places once a byte that differs; 4 passes taken (2026-12-01)."""
    elements = inputs[0].numel()
    moved = 4.0 * sum(tensor_bytes(t) for t in outputs)
    return Kernel(
        op_class=OpClass.REDUCTION, dims=(elements, elements), bytes_read=moved, bytes_written=moved,
        dtype=inputs[0].dtype,
    )  # fmt: skip


GROUPED_RULES: dict[str, Rule] = {
    "aten._grouped_mm": _grouped_mm,
    "aten.index": _take,
    "aten.sort": _sort,
}
"""Rules by operator."""
