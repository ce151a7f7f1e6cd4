"""Rows of collectives over a list of one slice a rank, as DeepSpeed's ZeRO-3 of 2021 gathers and reduces parameters.

Order of DeepSpeed 0.3 (2021), runtime/zero/partition_parameters.py, `_allgather_param` and
`_reduce_scatter_gradient`:

    gather of a parameter    wait for the GPU, a view of each rank's slice, all-gather, a copy of each slice
    reduction of a gradient  a view of each rank's slice, a copy of each slice, reduce-scatter

PyTorch gathers into one array and copies every slice out of it, and into one before it reduces (torch 1.8, 2021,
ProcessGroupNCCL.cpp). What the host needs for that grows with ranks times parameters, and while it makes the views of a
gather the GPU has nothing to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from echo_explore.graph import DTYPE_BYTES, Axis, Collective, DType, OpClass, OpKind, OpRow, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCalls:
    """What slices cost the host.

    Attributes:
        num_ranks: ranks, which is slices of a parameter.
        kept_elements: parameters of fewer elements stay whole.
        dtype: of parameters and gradients.
        view_s, copy_s: host time of a slice's view and of its copy.
        call_s, backward_call_s: host time of one of `OpRow.host_calls`, in which the rows say theirs.
    """

    num_ranks: int
    kept_elements: int
    dtype: DType
    view_s: float
    copy_s: float
    call_s: float
    backward_call_s: float

    def calls(self, seconds: float, phase: Phase) -> int:
        """Host calls that take as long as `seconds` for every slice."""
        each_s = self.backward_call_s if phase == Phase.BACKWARD else self.call_s
        return 1 + (round(self.num_ranks * seconds / each_s) if each_s > 0 else 0)

    def gathered(self, tensors: Sequence[int]) -> list[int]:
        """Elements of the parameters that are gathered where they are used: those not kept; the largest if none."""
        return [n for n in tensors if n >= self.kept_elements] or [max(tensors)]

    def kept(self, tensors: Sequence[int]) -> list[int]:
        """Elements of the parameters that stay whole."""
        return [n for n in tensors if n < self.kept_elements]

    def padded_bytes(self, tensor: int) -> float:
        """Bytes of all slices of a parameter."""
        return float(DTYPE_BYTES[self.dtype] * -(-tensor // self.num_ranks) * self.num_ranks)


def gather_rows(tensor: int, slices: SliceCalls, phase: Phase) -> tuple[OpRow, ...]:
    """Wait for the GPU, make the views while it is idle, start the gather of one parameter (the last row)."""
    size = slices.padded_bytes(tensor) / slices.num_ranks
    return (
        _idle(phase),
        _copy("zero.views", tensor // slices.num_ranks, size, slices, phase, slices.calls(slices.view_s, phase)),
        _idle(phase),
        _collective(Collective.ALL_GATHER, slices.padded_bytes(tensor), slices, phase),
    )


def copies_row(tensor: int, slices: SliceCalls, phase: Phase) -> OpRow:
    """Copy every slice of a gathered parameter to its place."""
    size = slices.padded_bytes(tensor)
    return _copy("zero.copy_slices", tensor, size, slices, phase, slices.calls(slices.copy_s, phase))


def reduce_rows(tensor: int, slices: SliceCalls) -> tuple[OpRow, ...]:
    """Copy every slice of one gradient into one array and start its reduction (the last row)."""
    phase, size = Phase.BACKWARD, slices.padded_bytes(tensor)
    return (
        _copy("zero.divide", tensor, size, slices, phase, 1),
        _copy("zero.flatten", tensor, size, slices, phase, slices.calls(slices.view_s + slices.copy_s, phase)),
        _collective(Collective.REDUCE_SCATTER, size, slices, phase),
    )


def kept_rows(tensors: Sequence[int], slices: SliceCalls) -> tuple[OpRow, ...]:
    """Gather all parameters that stay whole in one list after the optimizer, then copy each to its place.

    DeepSpeed 0.3 (2021), runtime/zero/stage3.py, end of `step`: `persistent_parameters[0].all_gather(...)`. What the
    host needs for it is `kept_host_s`.
    """
    size = sum(slices.padded_bytes(n) for n in slices.kept(tensors))
    if not size:
        return ()
    phase = Phase.OPTIMIZER
    gather = _collective(Collective.ALL_GATHER, size, slices, phase, asynchronous=False)
    return (gather, _copy("zero.copy_slices", sum(slices.kept(tensors)), size, slices, phase, 1))


def kept_host_s(tensors: Sequence[int], slices: SliceCalls) -> float:
    """Host seconds of `kept_rows`: views of the list, then two views and a copy of each parameter's every slice."""
    count = len(slices.kept(tensors))
    if not count:
        return 0.0
    return slices.num_ranks * (slices.view_s + count * (2 * slices.view_s + slices.copy_s))


def _idle(phase: Phase) -> OpRow:
    """The host waits until the GPU has nothing left to do."""
    return OpRow(kind=OpKind.HOST_SYNC, phase=phase, name="synchronize", module="zero")


def _copy(name: str, elements: int, size: float, slices: SliceCalls, phase: Phase, host_calls: int) -> OpRow:
    return OpRow(
        op_class=OpClass.COPY,
        phase=phase,
        dtype=slices.dtype,
        name=name,
        module="zero",
        dims=(max(elements, 1),),
        bytes_read=size,
        bytes_written=size,
        host_calls=host_calls,
    )


def _collective(kind: Collective, size: float, slices: SliceCalls, phase: Phase, *, asynchronous: bool = True) -> OpRow:
    return OpRow(
        kind=OpKind.COLLECTIVE,
        phase=phase,
        dtype=slices.dtype,
        name="c10d.allgather_" if kind == Collective.ALL_GATHER else "c10d.reduce_scatter_",
        module="zero",
        axis=Axis.DATA,
        collective=kind,
        message_bytes=size,
        asynchronous=asynchronous,
    )
