"""Gathers and scatters of DTensor as PyTorch's AsyncTP pairs them with products: synchronous, without copies between.

torch 2.13, _inductor/fx_passes/micro_pipeline_tp.py: an all-gather along any dimension, with the views and copies that
put it in order, is fused with the products that read it; a product with the reduce-scatter of its result. Both then
work on arrays whose first dimension is the one that is split, so nothing is copied. A weight gradient adds up over rows
in the order of its other input, though, so what it reads of a gather is still put in order. An all-gather whose result
is cast first (scales by row) is not fused (PyTorch issue 149990, 2025).
"""

import math
from dataclasses import replace

from echo_explore.graph.execution_graph import ExecutionGraph, OpRow, build_graph, op_rows
from echo_explore.graph.kinds import Axis, Collective, OpClass, OpKind

_ORDERS = "aten.cat"
"""DTensor's copy before a scatter and behind a gather along another dimension than the first (torch 2.13)."""


def paired_with_products(graph: ExecutionGraph) -> ExecutionGraph:
    """The graph with every tensor-parallel gather and scatter synchronous that a fused product takes in.

    A collective stays as it is where nothing pairs with it.
    """
    rows = op_rows(graph)
    readers: list[list[int]] = [[] for _ in rows]
    for index, row in enumerate(rows):
        for dep in row.deps:
            readers[dep].append(index)
    dropped: dict[int, int] = {}  # row, and the row that stands for it
    for index, row in enumerate(rows):
        waited = row.asynchronous and index + 1 < len(rows) and rows[index + 1].awaits == index
        if row.kind is not OpKind.COLLECTIVE or row.axis is not Axis.TENSOR or not waited:
            continue
        copies = _copies(rows, readers, index)
        if copies is not None:
            rows[index] = replace(row, asynchronous=False)
            kept = {copy for copy in copies if any(_sums_rows(rows[r], row) for r in readers[copy])}
            for reader in (r for copy in kept for r in readers[copy] if not _sums_rows(rows[r], row)):
                deps = tuple(dict.fromkeys(index if dep in kept else dep for dep in rows[reader].deps))
                rows[reader] = replace(rows[reader], deps=deps)
            dropped |= {index + 1: index} | {copy: whose for copy, whose in copies.items() if copy not in kept}
    return build_graph(_without(rows, dropped))


def _copies(rows: list[OpRow], readers: list[list[int]], index: int) -> dict[int, int] | None:
    """Copies that fusion saves, each with the row that stands for it; None where the collective is not fused."""
    row = rows[index]
    if row.collective is Collective.REDUCE_SCATTER:
        before = [dep for dep in row.deps if rows[dep].kind is OpKind.COMPUTE]
        if len(before) != 1:
            return None
        copy = before[0] if rows[before[0]].name == _ORDERS else -1
        products = rows[copy].deps if copy >= 0 else tuple(before)
        if len(products) != 1 or rows[products[0]].op_class is not OpClass.GEMM:
            return None
        if copy >= 0 and readers[copy] != [index]:
            return None
        return {} if copy < 0 else {copy: products[0]}
    if row.collective is not Collective.ALL_GATHER:
        return None
    behind = [reader for reader in readers[index] if reader != index + 1]
    copies = {reader: index for reader in behind if rows[reader].name == _ORDERS and rows[reader].deps == (index,)}
    users = [rows[r] for copy in (index, *copies) for r in readers[copy] if r not in copies and r != index + 1]
    casts = [user for user in users if user.name == "echo.quantise" and user.phase is row.phase]
    wide = any(cast.bytes_written < cast.bytes_read for cast in casts)
    return copies if any(user.op_class is OpClass.GEMM for user in users) and not wide else None


def _sums_rows(row: OpRow, gather: OpRow) -> bool:
    """Whether a product adds up over the gathered rows: a weight gradient."""
    if gather.collective is not Collective.ALL_GATHER or row.op_class is not OpClass.GEMM:
        return False
    sizes = [int(size) for size in gather.shapes.rpartition("->")[2].split("x") if size.isdigit()]
    tokens = math.prod(sizes[:-1])
    return row.dims[3] == tokens and row.dims[1] != tokens


def _without(rows: list[OpRow], dropped: dict[int, int]) -> list[OpRow]:
    """The rows that are left, with references to dropped ones turned to what stands for them."""
    places: dict[int, int] = {-1: -1}
    left = [index for index in range(len(rows)) if index not in dropped]
    places |= {index: place for place, index in enumerate(left)}

    def moved(index: int) -> int:
        while index in dropped:
            index = dropped[index]
        return places[index]

    return [
        replace(
            rows[index],
            deps=tuple(dict.fromkeys(moved(dep) for dep in rows[index].deps)),
            awaits=moved(rows[index].awaits),
            forward_op=moved(rows[index].forward_op),
        )
        for index in left
    ]
