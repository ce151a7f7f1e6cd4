"""Functional collectives (`_c10d_functional`), of DTensor: each returns a tensor that `wait_tensor` waits for."""

from collections.abc import Mapping
from typing import Any

import torch

from echo_explore.core import TraceError
from echo_explore.graph import Axis, Collective
from echo_explore.tracing.collectives import Described, ranks_of
from echo_explore.tracing.op_rules import tensor_bytes

NAMESPACE = "_c10d_functional"
WAIT = "wait_tensor"
# Operator: kind, and whether nccl-tests' S is the result instead of the input.
_KINDS = {
    "all_reduce": (Collective.ALL_REDUCE, False),
    "all_reduce_": (Collective.ALL_REDUCE, False),
    "all_reduce_coalesced": (Collective.ALL_REDUCE, False),
    "all_gather_into_tensor": (Collective.ALL_GATHER, True),
    "all_gather_into_tensor_out": (Collective.ALL_GATHER, True),
    "all_gather_into_tensor_coalesced": (Collective.ALL_GATHER, True),
    "reduce_scatter_tensor": (Collective.REDUCE_SCATTER, False),
    "reduce_scatter_tensor_coalesced": (Collective.REDUCE_SCATTER, False),
    "all_to_all_single": (Collective.ALL_TO_ALL, False),
    "broadcast": (Collective.BROADCAST, False),
    "broadcast_": (Collective.BROADCAST, False),
}


def describe_functional(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, axes: Mapping[str, Axis]
) -> Described:
    """What a call of a functional collective communicated.

    Raises:
        TraceError: an operator that the tracer does not know.
    """
    from torch._C._distributed_c10d import _resolve_process_group

    kind = _KINDS.get(func._opname)
    if kind is None:
        raise TraceError(f"collective = {func._opname}: the tracer does not know it; fix: report this program")
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    group_name = values["group_name"]
    group = _resolve_process_group(group_name)
    reads = _flat(args[0])
    writes = _flat(result)
    sized = writes if kind[1] else reads
    return Described(
        collective=kind[0],
        axis=axes.get(group_name, Axis.NONE),
        num_ranks=group.size(),
        message_bytes=float(sum(tensor_bytes(t) for t in sized)),
        asynchronous=True,
        dtype=sized[0].dtype,
        reads=reads,
        writes=writes,
        result=result,
        ranks=ranks_of(group),
    )


def _flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)
