"""Frozen weights in 8 bits that are transposed anew for every backward."""

from dataclasses import replace
from itertools import accumulate

from echo_explore.graph import DType, ExecutionGraph, OpClass, Phase, Trace, build_graph, is_layer, op_rows
from echo_explore.graph.execution_graph import OpRow
from echo_explore.specs import Candidate


def with_transposed_weights(candidate: Candidate, trace: Trace) -> Trace:
    """The trace whose products of gradients and frozen fp8 weights each have a transpose of the weights ahead of them.

    Tensor cores up to Hopper multiply 8-bit operands only if both have the summed dimension last: a backward needs the
    transpose of what the forward reads. Blackwell's take either (Transformer Engine 2.x (2025),
    pytorch/tensor/float8_tensor.py, is_non_tn_fp8_gemm_supported). Where the stack keeps no transposed copies
    (disable_parameter_transpose_cache) they are made for each micro-batch: n k bytes are read and written.
    """
    stack, recipe = candidate.stack, candidate.recipe
    takes_one = candidate.cluster.device.architecture in ("ada", "hopper")
    if not (recipe.lora_rank and recipe.precision == "fp8" and takes_one) or stack.keeps_transposed_weights:
        return trace
    pieces = dict(trace.pieces)
    for name, piece in trace.pieces.items():
        if is_layer(name):
            pieces[name] = replace(piece, backward=_with_transposes(piece.backward))
    return replace(trace, pieces=pieces)


def _with_transposes(graph: ExecutionGraph) -> ExecutionGraph:
    old = op_rows(graph)
    turned = [_reads_frozen(row) for row in old]
    place = list(accumulate(1 + turns for turns in turned))  # of an old row in the new list, plus 1
    rows: list[OpRow] = []
    for row, turns in zip(old, turned, strict=True):
        own = (len(rows),) if turns else ()
        rows += [_transpose(row)] * turns
        awaits, ahead = (place[number] - 1 if number >= 0 else -1 for number in (row.awaits, row.forward_op))
        deps = (*(place[dep] - 1 for dep in row.deps), *own)
        rows.append(replace(row, awaits=awaits, forward_op=ahead, deps=deps))
    return build_graph(rows)


def _reads_frozen(row: OpRow) -> bool:
    return row.op_class is OpClass.GEMM and row.dtype is DType.FP8 and row.phase is Phase.BACKWARD


def _transpose(product: OpRow) -> OpRow:
    """The kernel that turns the weights of a product, [n, k] in 8 bits."""
    _, _, n, k = product.dims[:4]
    return OpRow(
        op_class=OpClass.COPY, phase=Phase.BACKWARD, dtype=DType.FP8, name="echo.transpose", module=product.module,
        layer=product.layer, micro_batch=product.micro_batch, chunk=product.chunk, stream=product.stream, dims=(n * k,),
        bytes_read=float(n * k), bytes_written=float(n * k),
    )  # fmt: skip
