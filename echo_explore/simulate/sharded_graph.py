"""The rows of fully sharded data parallelism put between the pieces of a chunk.

Order of torch 2.13, distributed/fsdp/_fully_shard (2026-11-30), which is that of FSDP1 with backward prefetch:

    forward of unit i    wait gather i, copy out i, gather i+1, kernels of i
    backward of unit i   wait gather i, copy out i, gather i-1, kernels of i, wait reduction i+1, copy in i, reduce i

A unit is a layer; embedding and head are the root, gathered first and kept until their gradients are reduced last.
Gathers and reductions share one communicator, so they run in issue order. Whole ranks traced under the real
`fully_shard` are the check (tests/tracing/test_native_rank.py).

Megatron-FSDP (megatron-core 0.16.1, distributed/fsdp, 2026-12-01; tests/tracing/test_megatron_fsdp.py) keeps the root
whole and gathers it once a step, behind the optimizer; casts shards there and nowhere else; gathers several layers
ahead; in the backward begins with that behind the head; and at the last norm, which is of the root, gathers the first
layers once more. Products write gradients into the buffer that is reduced, and the reduced shard is added up.
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
        ahead: layers that are gathered ahead of the one that runs.
        megatron: what of Megatron-FSDP's order differs from PyTorch's.
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
    ahead: int = 1
    megatron: bool = False

    def gathered_again(self, num_layers: int) -> range:
        """Layers that Megatron-FSDP gathers at the last norm."""
        return range(min(self.ahead, num_layers) if self.megatron and self.reshard else 0)

    def kept_of_them(self, num_layers: int) -> frozenset[int]:
        """Those that the backward finds among the layers that it begins with; it frees the others unused."""
        return frozenset(n for n in self.gathered_again(num_layers) if n >= num_layers - 1 - self.ahead)


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
    if not facts.megatron:
        _use(sequence, root, facts, _gather(sequence, root, facts, Phase.FORWARD), Phase.FORWARD)
    gathered = [_gather(sequence, unit, facts, Phase.FORWARD) for unit in layers[: facts.ahead]]
    sequence.piece(before, backward=False)
    for position, unit in enumerate(layers):
        _use(sequence, unit, facts, gathered[position], Phase.FORWARD)
        if position + facts.ahead < len(layers):
            gathered.append(_gather(sequence, layers[position + facts.ahead], facts, Phase.FORWARD))
        for name in unit.pieces:
            sequence.piece(name, backward=False)
    for position in facts.gathered_again(len(layers)):
        _gather(sequence, layers[position], facts, Phase.FORWARD)
    sequence.piece(behind, backward=False)
    return sequence.finish()


def sharded_backward(root: Unit, layers: Sequence[Unit], facts: ShardingFacts, prices: Prices) -> TimedGraph:
    """The backward of a whole model for one micro-batch, each unit's gradients reduced behind it."""
    sequence = _Sequence(prices)
    before, behind = root.pieces
    phase = Phase.BACKWARD
    last = len(layers) - 1
    freed = [facts.reshard and (position < last or facts.reshard_last) for position in range(len(layers))]
    for position in facts.kept_of_them(len(layers)):
        freed[position] = False
    gathered = [-1] * len(layers)
    if facts.megatron:
        sequence.piece(behind, backward=True)
    for position in range(last, max(last - facts.ahead, -1), -1):
        if freed[position]:
            gathered[position] = _gather(sequence, layers[position], facts, phase)
    if not facts.megatron:
        sequence.piece(behind, backward=True)
    reduced = -1
    for position in range(last, -1, -1):
        unit = layers[position]
        if freed[position]:
            _use(sequence, unit, facts, gathered[position], phase)
            if facts.regathers:
                # Approximation: ahead of the recomputation, not between it and the backward (over-estimates).
                _use(sequence, unit, facts, _gather(sequence, unit, facts, phase), phase)
        ahead = position - facts.ahead
        if ahead >= 0 and freed[ahead]:
            gathered[ahead] = _gather(sequence, layers[ahead], facts, phase)
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
    casts = () if facts.megatron else (_cast(unit.elements, facts, phase),)
    return sequence.rows(*casts, _all_gather(unit.elements, facts, phase))


def _cast(elements: int, facts: ShardingFacts, phase: Phase) -> OpRow:
    """Of this rank's shard to the type in which it is gathered."""
    shard = -(-elements // facts.num_shards)
    written = DTYPE_BYTES[facts.gather_dtype] * shard
    return _copy("fsdp.all_gather_copy_in", shard, facts.gather_dtype, phase, 4.0 * shard, written)


def _all_gather(elements: int, facts: ShardingFacts, phase: Phase) -> OpRow:
    shard = -(-elements // facts.num_shards)
    return OpRow(
        kind=OpKind.COLLECTIVE,
        phase=phase,
        dtype=facts.gather_dtype,
        name="c10d._allgather_base_",
        module="fsdp",
        axis=Axis.DATA,
        collective=Collective.ALL_GATHER,
        message_bytes=DTYPE_BYTES[facts.gather_dtype] * shard * facts.num_shards,
        asynchronous=True,
    )


def behind_optimizer(root: Unit, layers: Sequence[Unit], facts: ShardingFacts) -> tuple[OpRow, ...]:
    """What Megatron-FSDP does once a step: casts all shards and gathers the root, for which the embedding waits."""
    if not facts.megatron:
        return ()
    cast = _cast(root.elements + sum(unit.elements for unit in layers), facts, Phase.OPTIMIZER)
    return cast, replace(_all_gather(root.elements, facts, Phase.OPTIMIZER), asynchronous=False)


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
    rows = []
    if not facts.megatron or facts.gather_dtype != facts.reduce_dtype:
        rows.append(_copy("fsdp.chunk_cat", unit.elements, facts.reduce_dtype, Phase.BACKWARD, read, written))
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
    row = sequence.rows(*rows)
    if not facts.megatron:
        return row
    # Approximation: the reduced shard is added up beside its reduction, not behind it; megatron-core's own stream does
    # so (neither direction).
    added = _copy("fsdp.add_shard", shard, facts.reduce_dtype, Phase.BACKWARD, 2 * size * shard, size * shard)
    sequence.rows(added)
    return row


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
