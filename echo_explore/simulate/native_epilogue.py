"""The end of a step in plain PyTorch: gradient norm, clipping, fused AdamW on fp32 parameters.

Follows torch 2.13 (nn/utils/clip_grad.py, optim/adamw.py with fused=True; 2026-11-30). Parameters are fp32, so there is
no master copy; gradients are freed, not cleared, before the next step.
"""

from collections.abc import Sequence

from echo_explore.graph import Axis, Collective, DType, ExecutionGraph, OpClass, OpKind, OpRow, Phase, build_graph

_FP32 = 4.0


def native_epilogue(
    *,
    num_elements: int,
    data_ranks: int,
    tensor_ranks: int,
    bucket_elements: int,
    loss_scaling: bool,
    kept: Sequence[OpRow] = (),
) -> ExecutionGraph:
    """Rows from the end of the last backward to the end of the step.

    Args:
        num_elements: parameters that this rank updates.
        data_ranks: ranks over which parameters are sharded; their norms are summed.
        tensor_ranks: tensor-parallel ranks, whose norms are summed too.
        bucket_elements: gradients that DDP copies into its buckets, divided, and back.
        loss_scaling: gradients are unscaled and checked for overflow first (FP16).
        kept: rows behind the optimizer that gather parameters that stay whole (`slice_rows.kept_rows`).
    """
    size = num_elements * _FP32
    rows: list[OpRow] = []
    if bucket_elements:
        # Approximation: copied bucket by bucket beside the backward in a real run; here at its end (over-estimates).
        moved = bucket_elements * _FP32
        rows.append(_pass(OpClass.ELEMENTWISE, "ddp.copy_to_bucket", bucket_elements, moved, moved))
        rows.append(_pass(OpClass.COPY, "ddp.copy_from_bucket", bucket_elements, moved, moved))
    if loss_scaling:
        rows.append(_pass(OpClass.ELEMENTWISE, "unscale_and_check", num_elements, size, size))
        rows.append(OpRow(kind=OpKind.HOST_SYNC, phase=Phase.OPTIMIZER, name="item", module="found_inf"))
    rows.append(_pass(OpClass.REDUCTION, "foreach_norm", num_elements, size, _FP32))
    rows += [_sum(axis) for axis, ranks in ((Axis.DATA, data_ranks), (Axis.TENSOR, tensor_ranks)) if ranks > 1]
    rows.append(_pass(OpClass.ELEMENTWISE, "foreach_mul", num_elements, size, size))
    states = 3 * size  # parameter and both moments of Adam
    rows.append(_pass(OpClass.OPTIMIZER, "fused_adamw", num_elements, size + states, states))
    return build_graph([*rows, *kept])


def _pass(op_class: OpClass, name: str, elements: int, read: float, written: float) -> OpRow:
    return OpRow(
        op_class=op_class,
        phase=Phase.OPTIMIZER,
        dtype=DType.FP32,
        name=name,
        module="optimizer",
        dims=(elements, 1) if op_class == OpClass.REDUCTION else (elements,),
        bytes_read=read,
        bytes_written=written,
    )


def _sum(axis: Axis) -> OpRow:
    return OpRow(
        kind=OpKind.COLLECTIVE,
        phase=Phase.OPTIMIZER,
        dtype=DType.FP32,
        name="c10d.allreduce_",
        module="gradient norm",
        axis=axis,
        collective=Collective.ALL_REDUCE,
        message_bytes=_FP32,
    )
