"""Experts whose biases, gate, weights and casts are part of the products around them."""

from collections.abc import Sequence
from dataclasses import replace

from echo_explore.graph import ExecutionGraph, OpClass, OpKind, Phase, Trace, build_graph, is_layer, op_rows
from echo_explore.graph.execution_graph import OpRow
from echo_explore.specs import Candidate

_EXPERTS = "decoder.layers.N.mlp.experts"
_SPARED = (OpClass.ELEMENTWISE, OpClass.COPY, OpClass.REDUCTION, OpClass.QUANTISE)


def with_fused_experts(candidate: Candidate, trace: Trace) -> Trace:
    """The trace without the kernels between the two products of experts, where the stack's products do their work.

    The first product writes what its gate makes of its result, cast for the second, beside the result; the gradient of
    the second's input is turned into that of the first's result the same way. What a recomputation runs stays.

    # Approximation: products take no longer for it (under-estimates); the bias of the second product stays apart
    # (over-estimates).
    """
    if candidate.recipe.precision not in candidate.stack.fused_experts:
        return trace
    pieces = dict(trace.pieces)
    for name, piece in trace.pieces.items():
        if is_layer(name):
            pieces[name] = replace(piece, forward=_fused(piece.forward), backward=_fused(piece.backward))
    return replace(trace, pieces=pieces)


def _fused(graph: ExecutionGraph) -> ExecutionGraph:
    """The graph without passes over the experts' inner arrays; their readers wait for what they waited for."""
    rows = op_rows(graph)
    spared = set(_between_products(rows))
    if not spared:
        return graph
    places: dict[int, tuple[int, ...]] = {}
    kept: list[OpRow] = []
    for index, row in enumerate(rows):
        deps = tuple(dict.fromkeys(place for dep in row.deps for place in places[dep]))
        if index in spared:
            places[index] = deps
            continue
        places[index] = (len(kept),)
        kept.append(
            replace(row, deps=deps, awaits=_moved(row.awaits, places), forward_op=_moved(row.forward_op, places))
        )
    return build_graph(kept)


def _moved(index: int, places: dict[int, tuple[int, ...]]) -> int:
    return places[index][-1] if places.get(index) else -1


def _between_products(rows: Sequence[OpRow]) -> list[int]:
    """Rows of experts between their first and second half of products: around the gate, in a backward too."""
    products = [i for i, row in enumerate(rows) if _is_inside(row) and row.op_class is OpClass.GROUPED_GEMM]
    if not products:
        return []
    half = len(products) // 2
    first, last = products[half - 1], products[half]
    return [i for i in range(first + 1, last) if _is_inside(rows[i]) and rows[i].op_class in _SPARED]


def _is_inside(row: OpRow) -> bool:
    is_kernel = row.kind is OpKind.COMPUTE and row.phase is not Phase.RECOMPUTE
    return is_kernel and (row.module == _EXPERTS or row.module.startswith(f"{_EXPERTS}."))
