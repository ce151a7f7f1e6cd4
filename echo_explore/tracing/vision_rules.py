"""What convolutions, batch norms and pooling are to the graph."""

from typing import Any

import torch

from echo_explore.graph import OpClass
from echo_explore.tracing.op_rules import Kernel, Rule, Tensors, tensor_bytes


def _implicit_product(
    image: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, *, transposed: bool, groups: int
) -> tuple[int, int, int, int]:
    """Groups, pixels of the result over the batch, channels out and input window of a group.

    C[p, o] = sum_w A[p, w] B[w, o]: pixels p of the result, window w of channels and kernel positions (implicit GEMM,
    Chetlur et al., arXiv 1410.0759, section 3). A transposed convolution is the gradient of one by its input: its
    pixels are those of its input.
    """
    out, each = (weight.shape[1], weight.shape[0]) if transposed else (weight.shape[0], weight.shape[1])
    window = each // (groups if transposed else 1)
    for size in weight.shape[2:]:
        window *= size
    side = image if transposed else result
    pixels = side.shape[0]
    for size in side.shape[2:]:
        pixels *= size
    return groups, pixels, out if transposed else out // groups, window


def _tensor_float(dtype: torch.dtype) -> bool:
    """Whether cuDNN takes fp32 as TF32: yes unless told otherwise (torch 2.13, torch.backends.cudnn.allow_tf32)."""
    return dtype is torch.float32 and torch.backends.cudnn.allow_tf32


def _convolution(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    image, weight = inputs[:2]
    dims = _implicit_product(image, weight, outputs[0], transposed=bool(args[6]), groups=int(args[8]))
    groups, m, n, k = dims
    return Kernel(
        op_class=OpClass.CONVOLUTION,
        dims=dims,
        flop=2.0 * groups * m * n * k,
        dtype=image.dtype,
        tensor_float=_tensor_float(image.dtype),
    )


def _convolution_backward(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """One product for the gradient of the input and one for that of the weight, where they are asked for."""
    grad, image, weight = inputs[:3]
    groups, m, n, k = _implicit_product(image, weight, grad, transposed=bool(args[7]), groups=int(args[9]))
    products = sum(bool(asked) for asked in args[10][:2])
    sizes = [float(tensor_bytes(t)) for t in (grad, image, weight)]
    read = products * sizes[0] + (sizes[2] if args[10][0] else 0.0) + (sizes[1] if args[10][1] else 0.0)
    return Kernel(
        op_class=OpClass.CONVOLUTION,
        dims=(products * groups, m, n, k),
        flop=2.0 * products * groups * m * n * k,
        bytes_read=read,
        dtype=image.dtype,
        tensor_float=_tensor_float(image.dtype),
    )


def _batch_norm(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """Reads its input for the statistics and again to normalise it."""
    image = inputs[0]
    dims = (image.numel() // image.shape[1], image.shape[1])
    read = 2.0 * tensor_bytes(image) + sum(tensor_bytes(t) for t in inputs[1:])
    return Kernel(op_class=OpClass.BATCH_NORM, dims=dims, bytes_read=read, dtype=image.dtype)


def _batch_norm_backward(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """Reads gradient and input for the sums and again for the result."""
    grad, image = inputs[:2]
    dims = (image.numel() // image.shape[1], image.shape[1])
    read = 2.0 * (tensor_bytes(grad) + tensor_bytes(image)) + sum(tensor_bytes(t) for t in inputs[2:])
    return Kernel(op_class=OpClass.BATCH_NORM, dims=dims, bytes_read=read, dtype=image.dtype)


def _pooling(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    elements = max(t.numel() for t in (*inputs, *outputs))
    return Kernel(op_class=OpClass.ELEMENTWISE, dims=(elements,), dtype=outputs[0].dtype)


_POOLS = """
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d
    upsample_bilinear2d_backward
"""
_NORMS = "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update"
_NORM_BACKWARDS = "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward"
VISION_RULES: dict[str, Rule] = {
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}
"""Rules by operator."""
for _names, _rule in ((_NORMS, _batch_norm), (_NORM_BACKWARDS, _batch_norm_backward), (_POOLS, _pooling)):
    VISION_RULES |= {f"aten.{_name}": _rule for _name in _names.split()}
