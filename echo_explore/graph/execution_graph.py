"""The execution graph of one rank (or of a piece of its step): column arrays in issue order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_explore.graph.kinds import NUM_DIMS, Axis, Collective, DType, OpClass, OpKind, Phase

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

COLUMNS: Mapping[str, type[np.generic]] = {
    "kind": np.int8,
    "op_class": np.int8,
    "phase": np.int8,
    "dtype": np.int8,
    "name": np.int32,
    "module": np.int32,
    "shapes": np.int32,
    "layer": np.int16,
    "micro_batch": np.int32,
    "chunk": np.int16,
    "flop": np.float64,
    "bytes_read": np.float64,
    "bytes_written": np.float64,
    "axis": np.int8,
    "collective": np.int8,
    "message_bytes": np.float64,
    "asynchronous": np.bool_,
    "awaits": np.int32,
    "forward_op": np.int32,
    "stream": np.int16,
    "host_calls": np.int32,
    "source": np.int32,
    "allocated_bytes": np.float64,
    "freed_bytes": np.float64,
}
"""One array of shape (num_ops,) each; see `docs/execution_graph.md` for their meaning."""
TEXT_COLUMNS = ("name", "module", "shapes", "source")
"""Columns that hold indices into `strings`."""
_ENUMS: Mapping[str, type[IntEnum]] = {
    "kind": OpKind, "op_class": OpClass, "phase": Phase, "dtype": DType, "axis": Axis, "collective": Collective
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExecutionGraph:
    """Kernels, collectives and waits of one rank in the order in which the host issues them.

    Every array has shape (num_ops,) unless said. Rows of one stream run in this order; dependences between streams are
    the waits and `dep_index`.

    Attributes:
        kind: OpKind.
        op_class: OpClass of a kernel.
        phase: Phase.
        dtype: DType of the arithmetic (of the payload for a collective).
        name: index into `strings`: the operator, e.g. `aten.mm`.
        module: index into `strings`: the module path, e.g. `decoder.layers.N.mlp.linear_fc1`.
        shapes: index into `strings`: input and output shapes, e.g. `2048x1x12288,4608x12288->2048x1x4608`.
        layer: transformer layer counted over the whole model, -1 outside the layers (in pieces: 0).
        micro_batch: -1 where it does not apply (pieces, optimizer).
        chunk: virtual pipeline chunk of this rank.
        dims: (num_ops, NUM_DIMS) sizes by OpClass.
        flop: executed floating-point operations (a multiply-add is 2).
        bytes_read: bytes of the inputs.
        bytes_written: bytes of the outputs.
        axis: Axis of a collective.
        collective: Collective.
        message_bytes: nccl-tests' S of a collective, for a send or receive the bytes sent.
        asynchronous: the collective runs beside the compute stream until a WAIT row names it.
        awaits: row of the collective that a WAIT waits for; of a HOST_SYNC the last row that the host waits for (-1:
            all before it); else -1.
        forward_op: row of the forward op that a backward op belongs to, -1 if unknown or outside this graph.
        stream: 0 is the compute stream; others as the program used them.
        host_calls: operators that the host dispatched from the row before up to this one, views and allocations too; a
            fused region counts as one.
        source: index into `strings`: line of the program that launched the row, e.g.
            `megatron/core/optimizer/optimizer.py:90`; of a backward op the line of its forward op.
        allocated_bytes: of storages made for this row or since the row before, and still alive when it ran.
        freed_bytes: of storages made while recording that were given back after this row, before the next.
        dep_offsets: (num_ops + 1,) CSR offsets into dep_index.
        dep_index: rows whose results this row reads.
        strings: the pool of names, module paths and shapes.
    """

    kind: npt.NDArray[np.int8]
    op_class: npt.NDArray[np.int8]
    phase: npt.NDArray[np.int8]
    dtype: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    module: npt.NDArray[np.int32]
    shapes: npt.NDArray[np.int32]
    layer: npt.NDArray[np.int16]
    micro_batch: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int16]
    dims: Ints
    flop: Floats
    bytes_read: Floats
    bytes_written: Floats
    axis: npt.NDArray[np.int8]
    collective: npt.NDArray[np.int8]
    message_bytes: Floats
    asynchronous: npt.NDArray[np.bool_]
    awaits: npt.NDArray[np.int32]
    forward_op: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int16]
    host_calls: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    allocated_bytes: Floats
    freed_bytes: Floats
    dep_offsets: Ints
    dep_index: npt.NDArray[np.int32]
    strings: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check shapes and lock the arrays."""
        n = self.kind.shape[0]
        for column in COLUMNS:
            if getattr(self, column).shape != (n,):
                raise ValueError(f"column {column} has shape {getattr(self, column).shape}, not ({n},)")
        if self.dims.shape != (n, NUM_DIMS):
            raise ValueError(f"dims has shape {self.dims.shape}, not ({n}, {NUM_DIMS})")
        if self.dep_offsets.shape != (n + 1,) or int(self.dep_offsets[-1]) != self.dep_index.shape[0]:
            raise ValueError("dep_offsets and dep_index do not fit together")
        for item in fields(self):
            array = getattr(self, item.name)
            if isinstance(array, np.ndarray):
                array.setflags(write=False)

    @property
    def num_ops(self) -> int:
        """Number of rows."""
        return int(self.kind.shape[0])

    @property
    def is_compute(self) -> npt.NDArray[np.bool_]:
        """(num_ops,) mask of kernels."""
        mask: npt.NDArray[np.bool_] = self.kind == OpKind.COMPUTE
        return mask

    @property
    def is_collective(self) -> npt.NDArray[np.bool_]:
        """(num_ops,) mask of communications."""
        mask: npt.NDArray[np.bool_] = self.kind == OpKind.COLLECTIVE
        return mask

    @property
    def live_bytes(self) -> Floats:
        """(num_ops,) bytes alive while each row runs, of what was made since recording began."""
        freed_before = np.cumsum(self.freed_bytes) - self.freed_bytes
        live: Floats = np.cumsum(self.allocated_bytes) - freed_before
        return live

    def text(self, row: int) -> str:
        """One row for people."""
        phase = Phase(int(self.phase[row])).name.lower()
        what = self.strings[self.name[row]]
        if self.kind[row] == OpKind.COLLECTIVE:
            kind = Collective(int(self.collective[row])).name.lower()
            size = f"{self.message_bytes[row]:.0f} B over {Axis(int(self.axis[row])).name.lower()}"
            return f"{phase} {kind} {size} {self.strings[self.module[row]]}"
        shapes = self.strings[self.shapes[row]]
        klass = OpClass(int(self.op_class[row])).name.lower()
        dtype = DType(int(self.dtype[row])).name.lower()
        return f"{phase} {what} [{klass}] {shapes} {dtype} {self.strings[self.module[row]]}"


@dataclass(slots=True, kw_only=True)
class OpRow:
    """One row while a graph is built; field meanings as in ExecutionGraph."""

    kind: OpKind = OpKind.COMPUTE
    op_class: OpClass = OpClass.NONE
    phase: Phase = Phase.FORWARD
    dtype: DType = DType.NONE
    name: str = ""
    module: str = ""
    shapes: str = ""
    layer: int = -1
    micro_batch: int = -1
    chunk: int = 0
    dims: tuple[int, ...] = ()
    flop: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    axis: Axis = Axis.NONE
    collective: Collective = Collective.NONE
    message_bytes: float = 0.0
    asynchronous: bool = False
    awaits: int = -1
    forward_op: int = -1
    stream: int = 0
    host_calls: int = 1
    source: str = ""
    allocated_bytes: float = 0.0
    freed_bytes: float = 0.0
    deps: tuple[int, ...] = ()


def build_graph(rows: Sequence[OpRow]) -> ExecutionGraph:
    """The graph of `rows`, in their order."""
    pool: dict[str, int] = {}

    def pooled(text: str) -> int:
        return pool.setdefault(text, len(pool))

    columns: dict[str, Any] = {}
    for column, dtype in COLUMNS.items():
        values: Iterable[Any] = (getattr(row, column) for row in rows)
        if column in TEXT_COLUMNS:
            values = (pooled(v) for v in values)
        columns[column] = np.array(list(values), dtype=dtype).reshape(len(rows))
    dims = np.zeros((len(rows), NUM_DIMS), dtype=np.int64)
    for i, row in enumerate(rows):
        dims[i, : len(row.dims)] = row.dims
    counts = np.array([0, *(len(row.deps) for row in rows)], dtype=np.int64)
    return ExecutionGraph(
        **columns,
        dims=dims,
        dep_offsets=np.cumsum(counts),
        dep_index=np.array([d for row in rows for d in row.deps], dtype=np.int32),
        strings=tuple(pool),
    )


def op_rows(graph: ExecutionGraph) -> list[OpRow]:
    """The rows of a graph, so that `build_graph(op_rows(graph))` is an equal graph."""
    values: dict[str, list[Any]] = {name: getattr(graph, name).tolist() for name in COLUMNS}
    for name in TEXT_COLUMNS:
        values[name] = [graph.strings[index] for index in values[name]]
    for name, enum in _ENUMS.items():
        values[name] = [enum(code) for code in values[name]]
    dims, deps, first = graph.dims.tolist(), graph.dep_index.tolist(), graph.dep_offsets.tolist()
    return [
        OpRow(
            **{name: column[row] for name, column in values.items()},
            dims=tuple(dims[row]),
            deps=tuple(deps[first[row] : first[row + 1]]),
        )
        for row in range(graph.num_ops)
    ]


def concatenate(graphs: Sequence[ExecutionGraph], *, layers: Sequence[int] | None = None) -> ExecutionGraph:
    """The graphs one after the other as one graph; row references are shifted, string pools merged.

    Args:
        graphs: in order; none give an empty graph.
        layers: for each graph the number of its layer 0; rows whose layer is -1 keep it. None keeps all.
    """
    if not graphs:
        return build_graph([])
    pool: dict[str, int] = {}
    parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in (*COLUMNS, "dims", "dep_index", "counts")}
    start = 0
    for position, graph in enumerate(graphs):
        remap = np.array([pool.setdefault(text, len(pool)) for text in graph.strings] or [0], dtype=np.int32)
        for column in COLUMNS:
            array = getattr(graph, column)
            if column in TEXT_COLUMNS:
                array = remap[array]
            elif column in ("awaits", "forward_op"):
                array = np.where(array >= 0, array + start, -1).astype(np.int32)
            elif column == "layer" and layers is not None:
                array = np.where(array >= 0, array + layers[position], -1).astype(np.int16)
            parts[column].append(array)
        parts["dims"].append(graph.dims)
        parts["dep_index"].append((graph.dep_index + start).astype(np.int32))
        parts["counts"].append(np.diff(graph.dep_offsets))
        start += graph.num_ops
    joined: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    counts = joined.pop("counts")
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
    return ExecutionGraph(**joined, dep_offsets=offsets, strings=tuple(pool))
