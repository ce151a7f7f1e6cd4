"""Fused regions: ops that a compiler runs as one kernel, whose bytes are those of the region's inputs and results."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from echo_explore.core import TraceError
from echo_explore.graph import DType, OpClass, OpRow
from echo_explore.tracing.op_rules import DTYPES, tensor_bytes
from echo_explore.tracing.row_log import RowLog
from echo_explore.tracing.storages import Access, StorageMap

_CROSS_ENTROPY = ("logits", "cross_entropy", "calculate_gradients")
"""Parts of the names of Megatron's fused cross-entropy functions (megatron-core 0.16.1, fused_cross_entropy.py)."""


@dataclass(slots=True, kw_only=True)
class Region:
    """The ops of one region while it runs.

    Attributes:
        number: of the region; the backward of its ops knows it.
        row: the row that it becomes.
        created: keys of storages made inside; those that are gone at the end were temporaries.
        deps: rows outside whose results it reads.
        num_kernels: ops so far.
    """

    number: int
    name: str
    row: OpRow
    created: set[int] = field(default_factory=set)
    deps: set[int] = field(default_factory=set)
    num_kernels: int = 0
    _reads: dict[int, float] = field(default_factory=dict)
    _writes: dict[int, float] = field(default_factory=dict)
    _seen: set[tuple[int, int, int]] = field(default_factory=set)
    _largest: torch.Size = field(default_factory=lambda: torch.Size([]))

    def add(
        self,
        inputs: Sequence[torch.Tensor],
        reads: Sequence[Access],
        written: Sequence[torch.Tensor],
        writes: Sequence[Access],
    ) -> None:
        """Take in one op: its tensors and where they lie."""
        self.num_kernels += 1
        for tensor, access in zip(inputs, reads, strict=True):
            place = (access.key, access.start, access.stop)
            if access.key not in self.created and place not in self._seen:
                self._seen.add(place)
                # Capped here: once the storage is freed, another one may get its key.
                read = self._reads.get(access.key, 0.0) + tensor_bytes(tensor)
                self._reads[access.key] = min(read, float(access.storage_bytes))
        for tensor, access in zip(written, writes, strict=True):
            if access.new:
                self.created.add(access.key)
            elif access.key not in self.created:
                self._writes[access.key] = max(self._writes.get(access.key, 0.0), float(tensor_bytes(tensor)))
        for tensor in (*inputs, *written):
            if tensor.numel() >= self._largest.numel():
                self._largest = tensor.shape
                self.row.dtype = DTYPES.get(tensor.dtype, DType.NONE)

    def finish(self, storages: StorageMap) -> OpRow:
        """The row of the region; call it while the results are alive and the temporaries are gone."""
        row = self.row
        row.bytes_read = sum(self._reads.values())
        row.bytes_written = sum(storages.nbytes(key) for key in self.created) + sum(self._writes.values())
        row.deps = tuple(sorted(self.deps))
        row.shapes = "x".join(map(str, self._largest))
        count = self._largest.numel()
        if any(part in self.name for part in _CROSS_ENTROPY):
            row.op_class, row.dims = OpClass.CROSS_ENTROPY, (count // max(self._largest[-1], 1), self._largest[-1])
        else:
            row.op_class, row.dims = OpClass.ELEMENTWISE, (count,)
        return row


class FusedRegions:
    """The fused region that is open, asked for by the program or entered by its backward.

    Attributes:
        current: the open region.
        depth: of regions that the program asked for.
        names: of all regions so far, by number.
    """

    def __init__(self, log: RowLog) -> None:
        self.current: Region | None = None
        self.depth = 0
        self.names: list[str] = []
        self._log = log

    @property
    def explicit(self) -> int:
        """Number of the region that the program asked for, -1 outside one."""
        return self.current.number if self.current is not None and self.depth else -1

    def holds(self, number: int) -> bool:
        """Whether an op of region `number` (-1: of none) may run without ending the open one."""
        return self.depth > 0 or (self.current is not None and self.current.number == number)

    def open(self, row: OpRow) -> None:
        """Begin a region that the program asks for; `row` is what it becomes."""
        self.begin(len(self.names), row)
        self.names.append(row.name)

    def begin(self, number: int, row: OpRow) -> None:
        """Begin region `number`, or its backward."""
        self.current = Region(number=number, name=row.name, row=row)
        self._log.storages.hold_peak = True

    def flush(self) -> None:
        """End the backward of a region, op by op.

        Raises:
            TraceError: the program asked for the region, and it has not ended.
        """
        region = self.current
        if region is None:
            return
        if self.depth:
            raise TraceError(
                f"fused region = {region.name}: holds a communication or a host sync; this is a bug of the tracer"
            )
        storages = self._log.storages
        self.current = None
        storages.hold_peak = False
        storages.note(len(self._log.rows), storages.live_bytes)
        if region.num_kernels:
            self._log.append(region.finish(storages))

    def abandon(self) -> None:
        """Forget the open region: the program raised."""
        self.depth = 0
        self.current = None
        self._log.storages.hold_peak = False
