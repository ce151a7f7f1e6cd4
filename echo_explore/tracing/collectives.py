"""Collectives as the program calls them, without links or ranks: axis, kind and nccl-tests' S."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from echo_explore.core import TraceError
from echo_explore.graph import Axis, Collective, DType, OpRow
from echo_explore.tracing.op_rules import DTYPES, shapes_text, tensor_bytes

_Names = tuple[str, ...]
# Operator: kind, arguments that are read, arguments that are written, arguments whose bytes are nccl-tests' S.
_KINDS: dict[str, tuple[Collective, _Names, _Names, _Names]] = {
    "allreduce_": (Collective.ALL_REDUCE, ("tensors",), ("tensors",), ("tensors",)),
    "allreduce_coalesced_": (Collective.ALL_REDUCE, ("tensors",), ("tensors",), ("tensors",)),
    "_allgather_base_": (Collective.ALL_GATHER, ("input_tensor",), ("output_tensor",), ("output_tensor",)),
    "allgather_into_tensor_coalesced_": (Collective.ALL_GATHER, ("inputs",), ("outputs",), ("outputs",)),
    "allgather_": (Collective.ALL_GATHER, ("input_tensors",), ("output_tensors",), ("output_tensors",)),
    "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, ("input_tensor",), ("output_tensor",), ("input_tensor",)),
    "reduce_scatter_tensor_coalesced_": (Collective.REDUCE_SCATTER, ("inputs",), ("outputs",), ("inputs",)),
    "reduce_scatter_": (Collective.REDUCE_SCATTER, ("input_tensors",), ("output_tensors",), ("input_tensors",)),
    "alltoall_base_": (Collective.ALL_TO_ALL, ("input",), ("output",), ("input",)),
    "alltoall_": (Collective.ALL_TO_ALL, ("input_tensors",), ("output_tensors",), ("input_tensors",)),
    "broadcast_": (Collective.BROADCAST, ("tensors",), ("tensors",), ("tensors",)),
    "reduce_": (Collective.REDUCE, ("tensors",), ("tensors",), ("tensors",)),
    "send": (Collective.SEND, ("tensors",), (), ("tensors",)),
    "recv_": (Collective.RECV, (), ("tensors",), ("tensors",)),
    "barrier": (Collective.BARRIER, (), (), ()),
}
_RESULTS = ("tensors", "output_tensors", "output_tensor", "outputs", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One call of a collective.

    Attributes:
        result: what the operator returns beside its Work; None if only the Work.
        ranks: global ranks of the group; of a transfer the sender and the receiver.
    """

    collective: Collective
    axis: Axis
    num_ranks: int
    message_bytes: float
    asynchronous: bool
    dtype: torch.dtype
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    result: Any
    ranks: tuple[int, ...] = ()

    def fill(self, row: OpRow) -> None:
        """Say in the row what is communicated; dependences are not known here."""
        row.axis, row.collective, row.asynchronous = self.axis, self.collective, self.asynchronous
        row.message_bytes = self.message_bytes
        row.dtype = DTYPES.get(self.dtype, DType.NONE)
        row.shapes = shapes_text(self.reads, self.writes)
        row.bytes_read = float(sum(tensor_bytes(t) for t in self.reads))
        row.bytes_written = float(sum(tensor_bytes(t) for t in self.writes))


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, in its order."""
    return tuple(dist.get_process_group_ranks(group))


def _pair(collective: Collective, group: Any, peer: int) -> tuple[int, ...]:
    """Global ranks of the sender and the receiver of a transfer with rank `peer` of the group."""
    other, own = dist.get_global_rank(group, peer), dist.get_rank()
    return (own, other) if collective is Collective.SEND else (other, own)


class FakeWork(Work):
    """A handle that calls back when the program waits; it holds no tensor, so that memory is freed as in a real run."""

    def __init__(self, on_wait: Callable[[], None] | None, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._on_wait = on_wait
        self._tensors = [weakref.ref(t) for t in tensors]

    def wait(self, timeout: Any = None) -> bool:
        """The compute stream waits from here."""
        if self._on_wait is not None:
            self._on_wait()
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def block_current_stream(self) -> None:
        """As wait."""
        self.wait()

    def get_future(self) -> Any:
        """A future that holds the tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([reference() for reference in self._tensors])
        return future


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Mapping[str, Axis]) -> Described:
    """What a `c10d` operator call communicates.

    Raises:
        TraceError: an operator or a process group that the tracer does not know.
    """
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    kind = _KINDS.get(func._opname)
    if kind is None:
        raise TraceError(f"collective = {func._opname}: the tracer does not know it; fix: report this layout")
    collective, reads, writes, sized = kind
    group = values["process_group"]
    group = group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)
    if collective in (Collective.SEND, Collective.RECV) and axes.get(group.group_name) is not Axis.CONTEXT:
        axis = Axis.PIPELINE  # with two stages Megatron sends over the world group
    elif group.size() > 1:
        axis = axes.get(group.group_name, Axis.NONE)
    else:
        axis = Axis.NONE
    tensors = {name: _flat(values.get(name)) for name in {*reads, *writes, *sized}}
    sized_tensors = [t for name in sized for t in tensors[name]]
    result = next((values[n] for n in _RESULTS if n in values), None) if len(func._schema.returns) > 1 else None
    message_bytes = float(sum(tensor_bytes(t) for t in sized_tensors))
    if collective is Collective.ALL_TO_ALL:  # uneven: a rank is done when it has sent and received
        message_bytes = max(message_bytes, float(sum(tensor_bytes(t) for name in writes for t in tensors[name])))
    return Described(
        collective=collective,
        axis=axis,
        num_ranks=group.size(),
        message_bytes=message_bytes,
        asynchronous=bool(values.get("async_op", True)) if collective is not Collective.BARRIER else False,
        dtype=sized_tensors[0].dtype if sized_tensors else torch.uint8,
        reads=[t for name in reads for t in tensors[name]],
        writes=[t for name in writes for t in tensors[name]],
        result=result,
        ranks=_pair(collective, group, int(values["dst" if collective is Collective.SEND else "src"]))
        if collective in (Collective.SEND, Collective.RECV)
        else ranks_of(group),
    )
