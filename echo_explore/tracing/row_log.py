"""The rows so far: what a new row gets from those before it, and in which order streams and memory are told."""

from dataclasses import replace

from echo_explore.graph import Axis, Collective, DType, OpKind, OpRow, Phase
from echo_explore.tracing import fake_device
from echo_explore.tracing.provenance import Context
from echo_explore.tracing.source_lines import source_line
from echo_explore.tracing.storages import StorageMap


class RowLog:
    """Rows in the order in which the host issues them.

    Attributes:
        rows: the rows so far.
        storages: live bytes, who wrote what.
        host_calls: operators that the host has called since the last row.
    """

    def __init__(self) -> None:
        self.rows: list[OpRow] = []
        self.storages = StorageMap()
        self.host_calls = 0
        self._unjoined: list[int] = []

    def new_row(self, name: str, context: Context, kind: OpKind, *, micro_batch: int, chunk: int) -> OpRow:
        """A row that begins now, not yet added; waits that must come before it are."""
        forward_op = context.forward_op
        known = 0 <= forward_op < len(self.rows)
        stream = fake_device.current_stream().number
        # Autograd runs on the stream of the forward, unless a hook chooses one.
        if stream == 0 and context.phase is Phase.BACKWARD and known:
            stream = self.rows[forward_op].stream
        self._part_streams(stream)
        return OpRow(
            kind=kind,
            name=name,
            phase=context.phase,
            module=context.home.path,
            layer=context.home.layer,
            micro_batch=micro_batch,
            chunk=chunk,
            forward_op=forward_op,
            stream=stream,
            source=self.rows[forward_op].source if known else source_line(),
        )

    def append(self, row: OpRow) -> int:
        """Add a row that the host's calls since the last one led to; its number."""
        row.host_calls, self.host_calls = max(self.host_calls, 1), 0
        row.allocated_bytes = self.storages.take_allocated()
        row.freed_bytes += self.storages.take_freed()  # inside a fused region
        self.rows.append(row)
        return len(self.rows) - 1

    def settle(self) -> None:
        """What was freed since the last row is freed after it."""
        freed = self.storages.take_freed()
        if self.rows:
            self.rows[-1].freed_bytes += freed

    def _part_streams(self, stream: int) -> None:
        """Let what comes on another stream run beside the collectives that the compute stream waits for.

        The wait of a collective holds up its own stream only: where another stream goes on behind it, its row becomes
        asynchronous, and its wait comes before the next row of the compute stream.
        """
        if stream != 0:
            for index in range(len(self.rows) - 1, -1, -1):
                row = self.rows[index]
                if row.kind is not OpKind.COLLECTIVE or row.asynchronous or row.stream != 0:
                    break
                row.asynchronous = True
                self._unjoined.insert(0, index)
            return
        joined, self._unjoined = self._unjoined, []
        for index in joined:
            last = self.rows[index]
            wait = replace(
                last, kind=OpKind.WAIT, name="wait", axis=Axis.NONE, collective=Collective.NONE, message_bytes=0.0,
                bytes_read=0.0, bytes_written=0.0, asynchronous=False, awaits=index, deps=(index,), dims=(),
                dtype=DType.NONE, shapes="", host_calls=0, allocated_bytes=0.0, freed_bytes=0.0,
            )  # fmt: skip
            self.rows.append(wait)
