"""NCCL kernels of a profiler trace as rows of a graph.

References:
    pytorch 2.13, torch/csrc/distributed/c10d/ParamCommsUtils.hpp and torch/csrc/profiler/util.cpp,
    `saveNcclMeta`: arguments of the event `record_param_comms` and of the NCCL kernels that it launches.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from echo_explore.core import SpecError
from echo_explore.graph import DTYPE_BYTES, Axis, Collective, DType, OpKind, OpRow

_KINDS = {
    "allreduce": Collective.ALL_REDUCE, "allgather": Collective.ALL_GATHER, "reducescatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL, "broadcast": Collective.BROADCAST, "reduce": Collective.REDUCE,
    "send": Collective.SEND, "recv": Collective.RECV, "barrier": Collective.BARRIER,
}  # fmt: skip
_SUFFIXES = ("coalesced", "intotensor", "tensor", "base", "single", "oop", "sparse", "v")
"""What PyTorch appends to the kind, without underscores: `_allgather_base`, `all_to_allv`, `broadcast_oop`."""
_DTYPES = {
    "float": DType.FP32, "bfloat16": DType.BF16, "half": DType.FP16, "long": DType.INT64, "int": DType.INT32,
    "char": DType.INT8, "byte": DType.INT8, "bool": DType.BOOL, "double": DType.FP64, "float8_e4m3fn": DType.FP8,
    "float8_e5m2": DType.FP8,
}  # fmt: skip
_AXES = (
    ("EXPERT_DATA", Axis.EXPERT_DATA), ("EXPERT", Axis.EXPERT), ("EMBEDDING", Axis.EMBEDDING),
    ("PIPELINE", Axis.PIPELINE), ("CONTEXT", Axis.CONTEXT), ("TENSOR", Axis.TENSOR),
    ("DATA_PARALLEL", Axis.DATA), ("MODEL_PARALLEL", Axis.MODEL),
    ("MESH_TP", Axis.TENSOR), ("MESH_DP", Axis.DATA), ("MESH_CP", Axis.CONTEXT),
    ("MESH_PP", Axis.PIPELINE), ("MESH_EP", Axis.EXPERT),
)  # fmt: skip
"""Parts of a process group's description, first match: Megatron-core 0.16.1 parallel_state.py, torch's DeviceMesh."""


def is_collective(event: Mapping[str, Any]) -> bool:
    """Whether a GPU event is one of NCCL's kernels."""
    return str(event.get("name", "")).startswith("nccl")


def collective_row(path: Path, event: Mapping[str, Any]) -> OpRow:
    """The row of an NCCL kernel.

    Raises:
        SpecError: it does not say what it moves.
    """
    arguments = event["args"]
    name = str(arguments.get("Collective name", "")).lower().replace("_", "")
    kind = _KINDS.get(name)
    for suffix in _SUFFIXES:
        if kind is None:
            kind = _KINDS.get(name.removesuffix(suffix))
    dtype = _DTYPES.get(str(arguments.get("dtype", "")).lower())
    given, got = arguments.get("In msg nelems"), arguments.get("Out msg nelems")
    if kind is None or dtype is None or not _is_count(given) or not _is_count(got):
        at = f"{event.get('name')} at ts {event.get('ts')}"
        rule = f"the NCCL kernel {at} has no Collective name, dtype, In and Out msg nelems that are known"
        raise SpecError("file", str(path), rule, "record it with PyTorch 2.4 or newer")
    width = DTYPE_BYTES[dtype]
    whole = {Collective.ALL_GATHER: got, Collective.RECV: got}.get(kind, given)
    group = str(arguments.get("Process Group Description") or arguments.get("Process Group Name") or "")
    return OpRow(
        kind=OpKind.COLLECTIVE, name=str(event.get("name")), dtype=dtype, collective=kind, axis=axis_of(group),
        message_bytes=whole * width, bytes_read=given * width, bytes_written=got * width,
        module=f"{group} of {arguments.get('Group size', '?')} ranks",
    )  # fmt: skip


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def axis_of(group: str) -> Axis:
    """The axis of a process group by its description."""
    return next((axis for part, axis in _AXES if part in group.upper()), Axis.NONE)
