"""The rows of fully sharded data parallelism put between the pieces of a chunk.

Order of torch 2.13, distributed/fsdp/_fully_shard (2026-11-30), which is that of FSDP1 with backward prefetch:

    forward of unit i    wait gather i, copy out i, gather i+1, kernels of i
    backward of unit i   wait gather i, copy out i, gather i-1, kernels of i, wait reduction i+1, copy in i, reduce i

A unit is a layer; embedding and head are the root, gathered first and kept until their gradients are reduced last.
Gathers and reductions share one communicator, so they run in issue order. Whole ranks traced under the real
`fully_shard` are the check (tests/tracing/test_native_rank.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from echo_explore.graph import (
    DTYPE_BYTES,
    Axis,
    Collective,
    DType,
    ExecutionGraph,
    OpClass,
    OpKind,
    OpRow,
    Phase,
    TimedGraph,
    concatenate,
)
from echo_explore.simulate.slice_rows import SliceCalls, copies_row, gather_rows, reduce_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingFacts:
    """How units are sharded.

    Attributes:
        num_shards: ranks that hold a part of each parameter.
        num_copies: groups of such ranks, whose gradients are summed after they are reduced (hybrid sharding).
        gather_dtype: of gathered parameters and of gradients before they are reduced.
        reduce_dtype: of gradients as they are reduced.
        flat_parameters: gathered parameters need no copy; gradients are divided before they are reduced (FSDP1).
        reshard: parameters of layers are freed between forward and backward.
        reshard_last: those of the last layer too.
        regathers: a layer is gathered for its recomputation and again for its backward.
        slices: parameters are gathered and reduced one by one, in slices; None: a unit in one collective.
    """

    num_shards: int
    num_copies: int = 1
    gather_dtype: DType
    reduce_dtype: DType
    flat_parameters: bool
    reshard: bool
    reshard_last: bool
    regathers: bool = False
    slices: SliceCalls | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A run of pieces whose parameters are gathered together.

    Attributes:
        elements: parameters on this tensor-parallel rank, over all shards.
        pieces: names of the pieces, in forward order.
        tensors: elements of each of its parameters; counts for sharding in slices only.
    """

    elements: int
    pieces: tuple[str, ...]
    tensors: tuple[int, ...] = ()


class Prices(Protocol):
    """Gives priced graphs; equal ones may be one object."""

    def piece(self, name: str, *, backward: bool) -> TimedGraph:
        """A piece."""

    def rows(self, rows: tuple[OpRow, ...]) -> TimedGraph:
        """Rows of our own."""


class _Sequence:
    """Parts one after the other, with waits that name collectives of earlier parts."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._parts: list[TimedGraph] = []
        self._num_rows = 0
        self._waits: list[tuple[int, int]] = []

    def piece(self, name: str, *, backward: bool) -> None:
        self._add(self._prices.piece(name, backward=backward))

    def rows(self, *rows: OpRow) -> int:
        """Add rows; the number of the last."""
        self._add(self._prices.rows(rows))
        return self._num_rows - 1

    def wait(self, row: int, phase: Phase) -> None:
        self._waits.append((self.rows(OpRow(kind=OpKind.WAIT, phase=phase, name="wait", module="fsdp")), row))

    def _add(self, part: TimedGraph) -> None:
        self._parts.append(part)
        self._num_rows += part.graph.num_ops

    def finish(self) -> TimedGraph:
        graph: ExecutionGraph = concatenate([p.graph for p in self._parts])
        awaits = graph.awaits.copy()
        for row, awaited in self._waits:
            awaits[row] = awaited
        return TimedGraph.joined(self._parts, replace(graph, awaits=awaits))


def sharded_forward(root: Unit, layers: Sequence[Unit], facts: ShardingFacts, prices: Prices) -> TimedGraph:
    """The forward of a whole model for one micro-batch; root.pieces are what comes before and behind the layers."""
    sequence = _Sequence(prices)
    before, behind = root.pieces
    gathered = _gather(sequence, root, facts, Phase.FORWARD)
    _use(sequence, root, facts, gathered, Phase.FORWARD)
    gathered = _gather(sequence, layers[0], facts, Phase.FORWARD)
    sequence.piece(before, backward=False)
    for position, unit in enumerate(layers):
        _use(sequence, unit, facts, gathered, Phase.FORWARD)
        if position + 1 < len(layers):
            gathered = _gather(sequence, layers[position + 1], facts, Phase.FORWARD)
        for name in unit.pieces:
            sequence.piece(name, backward=False)
    sequence.piece(behind, backward=False)
    return sequence.finish()


def sharded_backward(root: Unit, layers: Sequence[Unit], facts: ShardingFacts, prices: Prices) -> TimedGraph:
    """The backward of a whole model for one micro-batch, each unit's gradients reduced behind it."""
    sequence = _Sequence(prices)
    before, behind = root.pieces
    phase = Phase.BACKWARD
    last = len(layers) - 1
    freed = [facts.reshard and (position < last or facts.reshard_last) for position in range(len(layers))]
    gathered = -1
    if freed[last]:
        gathered = _gather(sequence, layers[last], facts, phase)
    sequence.piece(behind, backward=True)
    reduced = -1
    for position in range(last, -1, -1):
        unit = layers[position]
        if freed[position]:
            _use(sequence, unit, facts, gathered, phase)
            if facts.regathers:
                # Approximation: ahead of the recomputation, not between it and the backward (over-estimates).
                gathered = _gather(sequence, unit, facts, phase)
                _use(sequence, unit, facts, gathered, phase)
        if position and freed[position - 1]:
            gathered = _gather(sequence, layers[position - 1], facts, phase)
        for name in reversed(unit.pieces):
            sequence.piece(name, backward=True)
        reduced = _reduce(sequence, unit, facts, reduced)
    sequence.piece(before, backward=True)
    reduced = _reduce(sequence, root, facts, reduced)
    sequence.wait(reduced, phase)
    return sequence.finish()


def _gather(sequence: _Sequence, unit: Unit, facts: ShardingFacts, phase: Phase) -> int:
    """Cast this rank's shard and start the gather; its row."""
    if facts.slices is not None:
        return _gather_slices(sequence, unit, facts, facts.slices, phase)
    shard = -(-unit.elements // facts.num_shards)
    size = DTYPE_BYTES[facts.gather_dtype]
    cast = OpRow(
        op_class=OpClass.COPY,
        phase=phase,
        dtype=facts.gather_dtype,
        name="fsdp.all_gather_copy_in",
        module="fsdp",
        dims=(shard,),
        bytes_read=4.0 * shard,
        bytes_written=size * shard,
    )
    return sequence.rows(
        cast,
        OpRow(
            kind=OpKind.COLLECTIVE,
            phase=phase,
            dtype=facts.gather_dtype,
            name="c10d._allgather_base_",
            module="fsdp",
            axis=Axis.DATA,
            collective=Collective.ALL_GATHER,
            message_bytes=size * shard * facts.num_shards,
            asynchronous=True,
        ),
    )


def _gather_slices(sequence: _Sequence, unit: Unit, facts: ShardingFacts, slices: SliceCalls, phase: Phase) -> int:
    """Gather parameter by parameter, each when the GPU has done all before it; the row of the last."""
    gathered = -1
    tensors = slices.gathered(unit.tensors)
    for position, tensor in enumerate(tensors):
        if position:
            sequence.wait(gathered, phase)
            sequence.rows(copies_row(tensors[position - 1], slices, phase))
        gathered = sequence.rows(*gather_rows(tensor, slices, phase))
    return gathered


def _use(sequence: _Sequence, unit: Unit, facts: ShardingFacts, gathered: int, phase: Phase) -> None:
    """Wait for the gather and lay the parameters out."""
    sequence.wait(gathered, phase)
    if facts.slices is not None:
        sequence.rows(copies_row(facts.slices.gathered(unit.tensors)[-1], facts.slices, phase))
    elif not facts.flat_parameters:
        size = DTYPE_BYTES[facts.gather_dtype] * unit.elements
        sequence.rows(_copy("fsdp.split_with_sizes_copy", unit.elements, facts.gather_dtype, phase, size, size))


def _reduce(sequence: _Sequence, unit: Unit, facts: ShardingFacts, before: int) -> int:
    """Wait for the reduction before, lay the gradients out and start theirs; its row."""
    if before >= 0:
        sequence.wait(before, Phase.BACKWARD)
    if facts.slices is not None:
        return [sequence.rows(*reduce_rows(tensor, facts.slices)) for tensor in reversed(unit.tensors)][-1]
    read, size = DTYPE_BYTES[facts.gather_dtype] * unit.elements, DTYPE_BYTES[facts.reduce_dtype]
    written = size * unit.elements
    rows = [_copy("fsdp.chunk_cat", unit.elements, facts.reduce_dtype, Phase.BACKWARD, read, written)]
    if facts.flat_parameters:
        rows.append(_copy("fsdp.divide", unit.elements, facts.reduce_dtype, Phase.BACKWARD, written, written))
    shard = -(-unit.elements // facts.num_shards)
    rows.append(
        OpRow(
            kind=OpKind.COLLECTIVE,
            phase=Phase.BACKWARD,
            dtype=facts.reduce_dtype,
            name="c10d._reduce_scatter_base_",
            module="fsdp",
            axis=Axis.DATA,
            collective=Collective.REDUCE_SCATTER,
            message_bytes=size * shard * facts.num_shards,
            asynchronous=True,
        )
    )
    if facts.num_copies > 1:
        # Approximation: queues with gathers and reductions, though it has a communicator of its own (over-estimates).
        rows.append(
            OpRow(
                kind=OpKind.COLLECTIVE,
                phase=Phase.BACKWARD,
                dtype=facts.reduce_dtype,
                name="c10d.allreduce_",
                module="fsdp",
                axis=Axis.DATA,
                collective=Collective.ALL_REDUCE,
                message_bytes=size * shard,
                asynchronous=True,
            )
        )
    return sequence.rows(*rows)


def _copy(name: str, elements: int, dtype: DType, phase: Phase, read: float, written: float) -> OpRow:
    return OpRow(
        op_class=OpClass.COPY,
        phase=phase,
        dtype=dtype,
        name=name,
        module="fsdp",
        dims=(elements,),
        bytes_read=read,
        bytes_written=written,
    )
