"""Execution graphs from PyTorch's ExecutionTraceObserver: operators of a run with the storages that they touch.

It knows no streams, events or times, but which bytes of which storage every operator touched: data dependences are
exact to the view.

References:
    pytorch 2.13, torch/csrc/profiler/standalone/execution_trace_observer.cpp (schema 1.1.1-chakra.0.0.4): nodes with
    `ctrl_deps` (the operator that called it), values of tensors as [tensor, storage, offset, elements, element bytes,
    device], attributes `rf_id` (order of starts), `seq_id`, `scope`, `op_schema`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_explore.calibration.kineto import DTYPES, operator_row_or_none
from echo_explore.calibration.observer_nodes import Call, Tensor, read_calls
from echo_explore.calibration.profiler_collectives import axis_of
from echo_explore.core import SpecError
from echo_explore.graph import (
    Axis,
    Collective,
    DType,
    ExecutionGraph,
    OpClass,
    OpKind,
    OpRow,
    Phase,
    RankTrace,
    build_graph,
    groups_of_rows,
)

_KINDS: Mapping[str, tuple[Collective, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    # Operator of c10d: kind, arguments that are read, that are written, whose bytes are nccl-tests' S.
    "allreduce_": (Collective.ALL_REDUCE, (0,), (0,), (0,)),
    "_allgather_base_": (Collective.ALL_GATHER, (1,), (0,), (0,)),
    "allgather_": (Collective.ALL_GATHER, (1,), (0,), (0,)),
    "allgather_into_tensor_coalesced_": (Collective.ALL_GATHER, (1,), (0,), (0,)),
    "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, (1,), (0,), (1,)),
    "reduce_scatter_": (Collective.REDUCE_SCATTER, (1,), (0,), (1,)),
    "reduce_scatter_tensor_coalesced_": (Collective.REDUCE_SCATTER, (1,), (0,), (1,)),
    "alltoall_base_": (Collective.ALL_TO_ALL, (1,), (0,), (1,)),
    "alltoall_": (Collective.ALL_TO_ALL, (1,), (0,), (1,)),
    "broadcast_": (Collective.BROADCAST, (0,), (0,), (0,)),
    "reduce_": (Collective.REDUCE, (0,), (0,), (0,)),
    "send": (Collective.SEND, (0,), (), (0,)),
    "recv_": (Collective.RECV, (), (0,), (0,)),
    "barrier": (Collective.BARRIER, (), (), ()),
}
_COLLECTIVE = "c10d::"
_ITEM = "aten::_local_scalar_dense"
_HELPERS = ("aten::fill_", "aten::zero_", "aten::resize_")
"""What operators call to prepare their results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A file of ExecutionTraceObserver.

    Attributes:
        found: the trace of a rank where the file names the groups of all collectives, else the graph.
        calls: its nodes by id, in the order of their starts.
        call_of_row: (num_ops,) the id of the node of each row; -1 for a WAIT.
    """

    found: ExecutionGraph | RankTrace
    calls: Mapping[int, Call]
    call_of_row: tuple[int, ...]

    @property
    def graph(self) -> ExecutionGraph:
        """The rows."""
        return self.found.graph if isinstance(self.found, RankTrace) else self.found


def read_observer_trace(path: Path) -> ExecutionGraph | RankTrace:
    """What an ExecutionTraceObserver wrote; see `observed`."""
    return observed(path).found


def observed(path: Path) -> Observed:
    """What an ExecutionTraceObserver wrote, with the nodes of its rows.

    Rows are operators of a known class, and others that call none which works; views and allocations have none. A run
    on a GPU has only rows that touch it. An asynchronous collective has a WAIT before the first row that needs it.

    Raises:
        SpecError: the file is no such trace, breaks off, or holds a collective that has no counterpart.
    """
    calls, groups = read_calls(path)
    builder = _Builder(path=path, groups=groups)
    gpu = any(t.device.startswith("cuda") for call in calls.values() for t in (*call.reads(), *call.results))
    for call in _outermost(calls):
        if not gpu or any(t.device.startswith("cuda") for t in (*call.reads(), *call.results)):
            builder.add(call, calls)
    if not builder.rows:
        rule = f"has {len(calls)} nodes, but no operator that does something"
        raise SpecError("file", str(path), rule, "record a step with ExecutionTraceObserver")
    return Observed(found=builder.finish(), calls=calls, call_of_row=tuple(builder.calls))


def _outermost(calls: Mapping[int, Call]) -> list[Call]:
    """Operators of a class, collectives, and operators that call none which works, by their starts."""
    busy: set[int] = set()  # some operator that it calls works
    for call in reversed(list(calls.values())):
        if call.number in busy or (call.is_operator and not call.launches_nothing() and call.name not in _HELPERS):
            busy.add(call.parent)
    found: list[Call] = []
    inside: set[int] = set()
    for call in calls.values():
        if call.parent in inside:
            inside.add(call.number)
        elif call.is_operator and (call.name.startswith(_COLLECTIVE) or _classed(call) or call.number not in busy):
            inside.add(call.number)
            found.append(call)
    return found


def _classed(call: Call) -> OpRow | None:
    return operator_row_or_none({"name": call.name, "args": call.kineto_arguments()})


@dataclass(slots=True)
class _Written:
    start: int
    stop: int
    row: int


class _Builder:
    def __init__(self, *, path: Path, groups: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.rows: list[OpRow] = []
        self.calls: list[int] = []
        self._path = path
        self._groups = groups
        self._ranks: list[tuple[int, ...] | None] = []
        self._writers: dict[int, list[_Written]] = {}
        self._row_of_sequence: dict[int, int] = {}
        self._waited: set[int] = set()

    def add(self, call: Call, calls: Mapping[int, Call]) -> None:
        """The row of an operator, unless it launches nothing."""
        reads, writes = call.reads(), call.writes()
        ranks: tuple[int, ...] | None = None
        if call.name.startswith(_COLLECTIVE):
            row, reads, writes = self._collective(call)
            ranks = self._group(call, row)
        elif call.name == _ITEM:
            row = OpRow(kind=OpKind.HOST_SYNC)
        elif call.launches_nothing():
            return
        else:
            row = _classed(call) or OpRow(
                op_class=OpClass.OTHER, bytes_read=_distinct_bytes(reads), bytes_written=_distinct_bytes(writes),
                dtype=next((DTYPES.get(t.dtype.lower(), DType.NONE) for t in (*writes, *reads)), DType.NONE),
            )  # fmt: skip
        row.name = call.name
        row.phase, sequence = _phase(call, calls)
        deps = self._dependences(reads)
        for dep in sorted(deps):
            if self.rows[dep].asynchronous and dep not in self._waited:
                self._waited.add(dep)
                self._append(OpRow(kind=OpKind.WAIT, name="wait", phase=row.phase, awaits=dep, deps=(dep,)), None, -1)
        row.deps = tuple(sorted(deps))
        if row.phase is Phase.BACKWARD:
            row.forward_op = self._row_of_sequence.get(sequence, -1)
        else:
            self._row_of_sequence.setdefault(sequence, len(self.rows))
        for tensor in writes:
            kept = [w for w in self._writers.get(tensor.storage, ()) if w.start < tensor.start or w.stop > tensor.stop]
            self._writers[tensor.storage] = [*kept, _Written(tensor.start, tensor.stop, len(self.rows))]
        self._append(row, ranks, call.number)

    def _append(self, row: OpRow, ranks: tuple[int, ...] | None, call: int) -> None:
        self.rows.append(row)
        self.calls.append(call)
        self._ranks.append(ranks)

    def _dependences(self, reads: Iterable[Tensor]) -> set[int]:
        return {
            written.row
            for tensor in reads
            for written in self._writers.get(tensor.storage, ())
            if written.start < tensor.stop and written.stop > tensor.start
        }

    def _collective(self, call: Call) -> tuple[OpRow, list[Tensor], list[Tensor]]:
        kind = _KINDS.get(call.name.removeprefix(_COLLECTIVE))
        if kind is None:
            rule = f"node {call.number} ({call.name}) is a collective that has no counterpart here"
            raise SpecError("file", str(self._path), rule, "report this program")
        collective, given, got, sized = kind
        reads = [t for position in given for t in call.argument(position)]
        writes = [t for position in got for t in call.argument(position)]
        size = sum(t.nbytes for position in sized for t in call.argument(position))
        if collective is Collective.ALL_TO_ALL:  # uneven: a rank is done when it has sent and received
            size = max(size, sum(t.nbytes for t in writes))
        row = OpRow(
            kind=OpKind.COLLECTIVE, collective=collective, message_bytes=float(size), asynchronous=call.asynchronous(),
            bytes_read=float(sum(t.nbytes for t in reads)), bytes_written=float(sum(t.nbytes for t in writes)),
            dtype=next((DTYPES.get(t.dtype.lower(), DType.NONE) for t in (*reads, *writes)), DType.NONE),
        )  # fmt: skip
        row.stream = int(row.asynchronous)
        return row, reads, writes

    def _group(self, call: Call, row: OpRow) -> tuple[int, ...] | None:
        """Ranks of the group: the one that the call names, else the only one of the file."""
        name = call.group or (next(iter(self._groups)) if len(self._groups) == 1 else "")
        description, ranks = self._groups.get(name, ("", ()))
        row.axis = axis_of(description) if len(self._groups) > 1 else Axis.DATA
        row.module = description
        return ranks or None

    def finish(self) -> ExecutionGraph | RankTrace:
        """The trace, or the graph where a collective has no known group or is a transfer."""
        graph = build_graph(self.rows)
        collectives = np.flatnonzero(graph.is_collective)
        transfers = np.isin(graph.collective, (Collective.SEND, Collective.RECV))
        if transfers.any() or any(self._ranks[row] is None for row in collectives):
            return graph
        groups, group_of_row = groups_of_rows(self._ranks)
        everyone = [ranks for _, ranks in self._groups.values()]
        common = set(everyone[0]).intersection(*everyone) if everyone else {0}
        return RankTrace(
            graph=graph, rank=min(common, default=0), world_size=1 + max((max(r) for r in everyone if r), default=0),
            groups=groups, group_of_row=group_of_row, peak_memory_bytes=0.0,
        )  # fmt: skip


def _phase(call: Call, calls: Mapping[int, Call]) -> tuple[Phase, int]:
    """Part of the step, and the sequence number that ties forward and backward (-1: none)."""
    phase, sequence, at = Phase.FORWARD, call.sequence, call
    while True:
        if at.name.startswith("Optimizer.step#"):
            return Phase.OPTIMIZER, -1
        if at.in_backward:
            phase = Phase.BACKWARD
            sequence = at.sequence if at.sequence >= 0 else sequence
        elif sequence < 0 and phase is Phase.FORWARD:
            sequence = at.sequence
        above = calls.get(at.parent)
        if above is None or above is at:  # the root names itself
            return phase, sequence
        at = above


def _distinct_bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum({(t.storage, t.start, t.stop): t.nbytes for t in tensors}.values()))
