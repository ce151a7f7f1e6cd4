"""Gathers and scatters of activations decomposed together with the products beside them, so that both overlap.

A product that reads an all-gather takes the gathered rows part by part as they arrive; a reduce-scatter sends the parts
of the product ahead of it as they are done. What such programs run is in Transformer Engine's
`comm_gemm_overlap.cpp` (2.x, 2025: `split_overlap_ag`, `split_overlap_rs`) and in PyTorch's `_symmetric_memory` (2.13:
`_pipelined_multi_all_gather_and_consume`, `_pipelined_produce_and_all2all`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from echo_explore.graph.execution_graph import ExecutionGraph, Ints, OpRow, build_graph, op_rows
from echo_explore.graph.kinds import DTYPE_BYTES, Axis, Collective, DType, OpClass, OpKind, Phase

OverlapMethod = Literal["userbuffers", "async-tp"]
"""Both make an all-gather one copy a peer. A reduce-scatter: `userbuffers` (Transformer Engine) runs the product in
`NUM_SPLITS` parts of its columns, each followed by a reduce-scatter on SMs that the parts leave to it; `async-tp`
(PyTorch) in one part of its rows a rank, each copied to its owner, which adds them up at the end."""
NUM_SPLITS = 4
"""Parts of a pipelined reduce-scatter (Transformer Engine 2.x, pytorch/module/base.py, initialize_ub, 2025)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Where a new row comes from, see `Decomposed`."""

    whole: int = -1
    num_parts: int = 1
    is_last: bool = False
    is_confined: bool = False
    is_aside: bool = False


_WHOLE = _Part()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decomposed:
    """A graph with products in parts.

    Attributes:
        graph: the new rows.
        whole: (num_ops,) row of the old graph that the row is a part of, -1: of none.
        num_parts: (num_ops,) parts of that row; 1: of none.
        is_last: (num_ops,) the last part, behind which no other fills the SMs that it leaves idle.
        is_confined: (num_ops,) parts that leave SMs to the reduce-scatters beside them all the time.
        is_aside: (num_ops,) transfers that take no SM from the parts: by a copy engine, or on SMs left to them.
    """

    graph: ExecutionGraph
    whole: Ints
    num_parts: Ints
    is_last: npt.NDArray[np.bool_]
    is_confined: npt.NDArray[np.bool_]
    is_aside: npt.NDArray[np.bool_]


def decompose(graph: ExecutionGraph, *, num_ranks: int, method: OverlapMethod) -> Decomposed:
    """The graph with every synchronous gather and scatter over tensor ranks decomposed that a product goes with.

    All-gather: the first part of the product reads what the rank has, part i waits for copy i; copies queue up.
    Products and casts of the gathered rows whose other inputs are there are parts of it; what else reads them (a weight
    gradient) comes behind. Reduce-scatter: only where it reads one product alone, which runs right ahead of it. A
    collective that runs beside another product already (asynchronous) stays as it is.

    So do, under `userbuffers`, scatters of gradients (Megatron's tp_comm_overlap_rs_dgrad is off by default;
    megatron-core 0.16.1 (2026), model_parallel_config.py) and gathers that an adapter reads beside its layer
    (tp_comm_overlap_disable_qkv, set in MLPerf's runs with adapters; mlcommons/training_results_v4.0 (2024), NVIDIA
    llama2_70b_lora, conf/megatron_gpt_peft_tuning_config.yaml).

    # Approximation: the host launches all parts in the time of one row (under-estimates).

    Args:
        graph: rows of a piece.
        num_ranks: of the tensor group, 2 or more.
        method: how scatters are decomposed.
    """
    return _Decomposer(op_rows(graph), num_ranks, method).run()


class _Decomposer:
    def __init__(self, rows: list[OpRow], num_ranks: int, method: OverlapMethod) -> None:
        self._rows = rows
        self._num_ranks = num_ranks
        self._method = method
        self._readers: list[list[int]] = [[] for _ in rows]
        for index, row in enumerate(rows):
            for dep in row.deps:
                self._readers[dep].append(index)
        self._out: list[OpRow] = []
        self._parts: list[_Part] = []
        self._places: dict[int, list[int]] = {}

    def run(self) -> Decomposed:
        gathers = {i: members for i in range(len(self._rows)) if (members := self._ring_members(i))}
        in_ring = {row for members in gathers.values() for row in members}
        scatters = {i for i in range(len(self._rows)) if self._is_scatter(i) and i - 1 not in in_ring}
        ring_at = {min(self._readers[gather]): gather for gather in gathers}
        for index, row in enumerate(self._rows):
            if index in ring_at:
                self._ring(ring_at[index], gathers[ring_at[index]])
            if index in gathers or index in in_ring or index + 1 in scatters:
                continue
            if index in scatters:
                self._scatter(index - 1, index)
            else:
                self._places[index] = [self._emit(replace(row, deps=self._moved(row.deps)))]
        return self._result()

    # -- what can be decomposed ----------------------------------------------------------------------------------------

    def _over_tensor(self, index: int, kind: Collective) -> bool:
        row = self._rows[index]
        is_sync = row.kind is OpKind.COLLECTIVE and not row.asynchronous
        return is_sync and row.axis is Axis.TENSOR and row.collective is kind and row.stream == 0

    def _ring_members(self, gather: int) -> tuple[int, ...]:
        """Rows that run in parts as the gathered rows arrive; none where no product is among them."""
        if not self._over_tensor(gather, Collective.ALL_GATHER) or not self._readers[gather]:
            return ()
        if self._method == "userbuffers" and any(_ADAPTER in self._rows[i].module for i in self._readers[gather]):
            return ()
        tokens, width = _matrix(self._rows[gather].shapes.rpartition("->")[2])
        if tokens % self._num_ranks:
            return ()
        first = min(self._readers[gather])
        members: list[int] = []
        for index in range(first, len(self._rows)):
            row = self._rows[index]
            if row.kind is not OpKind.COMPUTE or row.stream != 0:
                break
            others = [dep for dep in row.deps if dep != gather and dep not in members]
            is_ready = all(dep < first and not self._over_tensor(dep, Collective.ALL_GATHER) for dep in others)
            reads = gather in row.deps or len(others) < len(row.deps)
            if reads and is_ready and self._takes_rows(index, tokens, width):
                members.append(index)
        return tuple(members) if any(self._rows[i].op_class is OpClass.GEMM for i in members) else ()

    def _takes_rows(self, index: int, tokens: int, width: int) -> bool:
        """Whether it works on each gathered row for itself; a product over all of them (a weight gradient) does not."""
        row = self._rows[index]
        if row.op_class in (OpClass.COPY, OpClass.QUANTISE):
            return math.prod(size for size in row.dims if size) == tokens * width
        is_product = row.op_class is OpClass.GEMM and row.dims[:2] == (1, tokens) and row.dims[3] == width
        is_weight_gradient = "wgrad" in row.name or (row.phase is Phase.BACKWARD and not self._readers[index])
        return is_product and not is_weight_gradient

    def _is_scatter(self, index: int) -> bool:
        if not self._over_tensor(index, Collective.REDUCE_SCATTER) or self._rows[index].deps != (index - 1,):
            return False
        if self._method == "userbuffers" and self._rows[index].phase is Phase.BACKWARD:
            return False
        product = self._rows[index - 1]
        tokens, width = _matrix(self._rows[index].shapes.partition("->")[0])
        fits = product.op_class is OpClass.GEMM and product.dims[:3] == (1, tokens, width) and product.stream == 0
        splits = width % NUM_SPLITS if self._method == "userbuffers" else tokens % self._num_ranks
        return fits and splits == 0

    # -- new rows ------------------------------------------------------------------------------------------------------

    def _ring(self, gather: int, members: tuple[int, ...]) -> None:
        row, n = self._rows[gather], self._num_ranks
        ready = self._moved(row.deps)
        if self._method == "async-tp":
            ready = (self._emit(_own_part(row, n, ready)),)
        copies: list[int] = []
        for i in range(1, n):
            copies.append(self._copy(row, n, deps=tuple(copies[-1:]) or ready, first=i == 1))
        self._places[gather] = copies
        self._places |= {member: [] for member in members}
        for i in range(n):
            came = ready if i == 0 else (copies[i - 1],)
            if i > 0:
                self._emit(_wait(row, copies[i - 1]))
            latest: dict[int, int] = {}
            for member in members:
                own = self._rows[member]
                others = tuple(dep for dep in own.deps if dep != gather and dep not in latest)
                inside = tuple(latest[dep] for dep in own.deps if dep in latest)
                latest[member] = self._part(member, _part(own, n, i, deps=(*self._moved(others), *came, *inside)), n, i)
                self._places[member].append(latest[member])

    def _scatter(self, product: int, scatter: int) -> None:
        row, own = self._rows[scatter], self._rows[product]
        by_columns = self._method == "userbuffers"
        n = NUM_SPLITS if by_columns else self._num_ranks
        deps = self._moved(own.deps)
        self._places[product] = []
        sent: list[int] = []
        for i in range(n):
            part_row = _part(own, n, i, deps=deps, by_columns=by_columns)
            part = self._part(product, part_row, n, i, is_confined=by_columns)
            self._places[product].append(part)
            if by_columns:
                share = replace(row, message_bytes=row.message_bytes / n, asynchronous=True, deps=(part,))
                sent.append(self._emit(_later(share) if i else share, _Part(is_aside=True)))
            elif i < n - 1:
                sent.append(self._copy(row, n, deps=(part,), first=i == 0))
        self._emit(_wait(row, sent[-1]))
        if not by_columns:
            sent = [self._emit(_sum_of_parts(row, n, deps=(*sent, part)))]
        self._places[scatter] = sent

    def _copy(self, row: OpRow, num_parts: int, *, deps: tuple[int, ...], first: bool) -> int:
        copy = replace(
            row, name="copy", collective=Collective.SEND, message_bytes=row.message_bytes / num_parts,
            asynchronous=True, deps=deps,
        )  # fmt: skip
        return self._emit(copy if first else _later(copy), _Part(is_aside=True))

    def _part(self, whole: int, row: OpRow, num_parts: int, number: int, *, is_confined: bool = False) -> int:
        if row.op_class is not OpClass.GEMM:
            return self._emit(row)
        is_last = number == num_parts - 1
        return self._emit(row, _Part(whole=whole, num_parts=num_parts, is_last=is_last, is_confined=is_confined))

    def _emit(self, row: OpRow, part: _Part = _WHOLE) -> int:
        self._out.append(row)
        self._parts.append(part)
        return len(self._out) - 1

    def _moved(self, deps: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(place for dep in deps for place in self._places[dep]))

    def _result(self) -> Decomposed:
        old = set(range(len(self._rows)))
        rows = []
        for row in self._out:
            is_new_wait = row.kind is OpKind.WAIT and row.awaits < 0 and row.name == _WAIT
            awaits = row.deps[0] if is_new_wait else self._last(row.awaits, old)
            rows.append(replace(row, awaits=awaits, forward_op=self._last(row.forward_op, old)))
        return Decomposed(
            graph=build_graph(rows),
            whole=np.array([part.whole for part in self._parts], dtype=np.int64),
            num_parts=np.array([part.num_parts for part in self._parts], dtype=np.int64),
            is_last=np.array([part.is_last for part in self._parts], dtype=np.bool_),
            is_confined=np.array([part.is_confined for part in self._parts], dtype=np.bool_),
            is_aside=np.array([part.is_aside for part in self._parts], dtype=np.bool_),
        )

    def _last(self, index: int, old: set[int]) -> int:
        return self._places[index][-1] if index in old else -1


_WAIT = "wait for part"
_ADAPTER = ".lora."


def _matrix(shape: str) -> tuple[int, int]:
    """Rows and columns of an array written as `2048x1x12288`; (1, 1) where there is none."""
    sizes = [int(size) for size in shape.split("x") if size.isdigit()] or [1]
    return math.prod(sizes[:-1]), sizes[-1]


def _later(row: OpRow) -> OpRow:
    """A further row of several that stand for one: the host and the allocator did their work for the first."""
    return replace(row, host_calls=0, allocated_bytes=0.0, freed_bytes=0.0)


def _wait(like: OpRow, awaited: int) -> OpRow:
    return _later(
        replace(
            like, kind=OpKind.WAIT, name=_WAIT, op_class=OpClass.NONE, dtype=DType.NONE, shapes="", dims=(),
            axis=Axis.NONE, collective=Collective.NONE, message_bytes=0.0, asynchronous=False, awaits=-1,
            deps=(awaited,), forward_op=-1,
        )
    )  # fmt: skip


def _part(row: OpRow, num_parts: int, number: int, *, deps: tuple[int, ...], by_columns: bool = False) -> OpRow:
    """One of `num_parts` equal parts of the rows, or of the columns, of what a product or a cast makes."""
    dims = list(row.dims)
    read = row.bytes_read / num_parts
    if row.op_class is OpClass.GEMM:
        _, m, n, k = row.dims[:4]
        a_part, b_part = (1, num_parts) if by_columns else (num_parts, 1)
        read = row.bytes_read * (m * k / a_part + k * n / b_part) / (m * k + k * n)
        dims[2 if by_columns else 1] //= num_parts
    else:
        dims[0] //= num_parts
    part = replace(
        row, dims=tuple(dims), flop=row.flop / num_parts, bytes_read=read, bytes_written=row.bytes_written / num_parts,
        deps=tuple(dict.fromkeys(deps)),
    )  # fmt: skip
    return part if number == 0 else _later(part)


def _kernel(like: OpRow, *, name: str, op_class: OpClass, dims: tuple[int, ...], deps: tuple[int, ...]) -> OpRow:
    """A kernel beside a collective: `dims` are elements read, or read and written."""
    size = DTYPE_BYTES[like.dtype]
    kernel = replace(
        like, kind=OpKind.COMPUTE, name=name, op_class=op_class, dims=dims, axis=Axis.NONE, collective=Collective.NONE,
        message_bytes=0.0, asynchronous=False, bytes_read=dims[0] * size, bytes_written=dims[-1] * size, deps=deps,
    )  # fmt: skip
    return _later(kernel)


def _own_part(gather: OpRow, num_ranks: int, deps: tuple[int, ...]) -> OpRow:
    """The copy of a rank's own rows to where its peers can read them."""
    tokens, width = _matrix(gather.shapes.rpartition("->")[2])
    return _kernel(gather, name="own part", op_class=OpClass.COPY, dims=(tokens // num_ranks * width,), deps=deps)


def _sum_of_parts(scatter: OpRow, num_ranks: int, deps: tuple[int, ...]) -> OpRow:
    """The sum of what all ranks made for the rows of this one."""
    tokens, width = _matrix(scatter.shapes.partition("->")[0])
    dims = (tokens * width, tokens // num_ranks * width)
    return _kernel(scatter, name="sum of parts", op_class=OpClass.REDUCTION, dims=dims, deps=deps)
