"""What each operator of PyTorch is to the graph: its class, sizes, FLOP and bytes.

FLOP are counted for matrix products and attention only, where they decide the time (a multiply-add is 2); every other
kernel is priced by its bytes. Bytes count each distinct element once, as if nothing stayed in the cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from echo_explore.graph import DType, OpClass

DTYPES: dict[torch.dtype, DType] = {
    torch.float32: DType.FP32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
    torch.float64: DType.FP64,
    torch.int64: DType.INT64,
    torch.int32: DType.INT32,
    torch.int8: DType.INT8,
    torch.uint8: DType.INT8,
    torch.bool: DType.BOOL,
    torch.float8_e4m3fn: DType.FP8,
    torch.float8_e5m2: DType.FP8,
}

_NO_KERNEL_ATEN = """
    empty empty_strided empty_like new_empty new_empty_strided detach detach_ alias _unsafe_view lift_fresh set_ resize_
    is_same_size _assert_async record_stream _reshape_alias view t transpose sym_size sym_stride sym_numel
"""
NO_KERNEL = frozenset(f"aten.{name}" for name in _NO_KERNEL_ATEN.split()) | {
    "prim.device",
    "profiler._record_function_enter",
    "profiler._record_function_enter_new",
    "profiler._record_function_exit",
}
"""Operators that launch nothing on a GPU."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What one call of an operator does; bytes of None mean: all of its inputs, all of its outputs.

    Attributes:
        tensor_float: fp32 operands are rounded to TF32.
    """

    op_class: OpClass
    dims: tuple[int, ...]
    flop: float = 0.0
    bytes_read: float | None = None
    bytes_written: float | None = None
    dtype: torch.dtype | None = None
    tensor_float: bool = False


Rule = Callable[[Tensors, Tensors, tuple[Any, ...]], Kernel]
"""From the tensors read, the tensors written and all positional arguments."""


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of a tensor: broadcast dimensions count once."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride == 0:
                count //= size
    return count * tensor.element_size()


def _numel(tensors: Tensors) -> int:
    return max((t.numel() for t in tensors), default=0)


def _gemm(batch: int, m: int, n: int, k: int, dtype: torch.dtype, extra: dict[str, float] | None = None) -> Kernel:
    extra = extra or {}
    return Kernel(
        op_class=OpClass.GEMM,
        dims=(batch, m, n, k),
        flop=2.0 * batch * m * n * k,
        dtype=dtype,
        bytes_read=extra.get("bytes_read"),
        bytes_written=extra.get("bytes_written"),
        tensor_float=dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32,
    )


def _mm(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    a, b = inputs[-2:]
    return _gemm(1, a.shape[0], b.shape[1], a.shape[1], a.dtype)


def _general_gemm(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """fp32 operands are multiplied in TF32 (Transformer Engine 2.x, common/gemm/cublaslt_gemm.cu, 2025)."""
    a, b = inputs[:2]
    m, n = outputs[0].shape
    depth = b.shape[0] if args[2] == "NT" else b.shape[1]
    kernel = _gemm(1, m, n, depth, a.dtype)
    return replace(kernel, tensor_float=True) if a.dtype == b.dtype == torch.float32 else kernel


def _bmm(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    a, b = inputs[-2:]
    read = float(tensor_bytes(a) + tensor_bytes(b))
    return _gemm(a.shape[0], a.shape[1], b.shape[2], a.shape[2], a.dtype, {"bytes_read": read})


def _baddbmm(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """A bias that is broadcast is spread over the result first, which the product then reads and writes.

    A first argument as large as the result is Megatron's buffer with beta = 0, which nobody reads (PyTorch 2.13,
    aten/src/ATen/native/cuda/Blas.cpp, baddbmm_out_cuda_impl).
    """
    kernel = _bmm(inputs, outputs, args)
    bias, result = inputs[0], float(tensor_bytes(outputs[0]))
    if bias.numel() == outputs[0].numel():
        return kernel
    assert kernel.bytes_read is not None
    return replace(kernel, bytes_read=kernel.bytes_read + tensor_bytes(bias) + result, bytes_written=2 * result)


def _wgrad_accumulate(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """main_grad[n, k] += grad[tokens, n]^T input[tokens, k]; the sum, fp32 or of 16 bits, is read and written."""
    activations, grad, main = inputs
    tokens = activations.numel() // activations.shape[-1]
    written = {"bytes_written": float(tensor_bytes(main))}
    return _gemm(1, grad.shape[-1], activations.shape[-1], tokens, activations.dtype, written)


def attended_pairs(seq_q: int, seq_k: int, causal: bool, window: int) -> float:
    """Pairs of query and key that a mask leaves: of a triangle half the square; the last query sees the last key.

    The band of a window W that starts inside leaves q W - max(0, W - (k - q))^2 / 2.
    """
    if not causal:
        return float(seq_q) * seq_k
    if 0 < window < seq_k:
        cut = max(0, window - (seq_k - seq_q))
        return float(seq_q) * window - cut**2 / 2
    return float(seq_q) * (seq_k - seq_q / 2)


def attention_flop(
    batch: int, heads: int, pairs: float, head_dim: int, value_dim: int, *, backward: bool = False
) -> float:
    """Executed FLOP of a fused attention kernel: 2 b h pairs (d + d_v), backward 2 b h pairs (3 d + 2 d_v).

    The forward runs 2 products; the backward 5, one of which recomputes the scores (FlashAttention-2, arXiv 2307.08691,
    section 4.1).
    """
    widths = 3 * head_dim + 2 * value_dim if backward else head_dim + value_dim
    return 2.0 * batch * heads * pairs * widths


def _flash(*, backward: bool) -> Rule:
    def rule(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
        query, key, value = inputs[1:4] if backward else inputs[:3]
        seq_q, batch, heads, head_dim = query.shape
        seq_k, kv_heads, value_dim = key.shape[0], key.shape[2], value.shape[-1]
        causal, window = next(a for a in args if isinstance(a, bool)), int(args[-1])
        pairs = attended_pairs(seq_q, seq_k, causal, window)
        flop = attention_flop(batch, heads, pairs, head_dim, value_dim, backward=backward)
        used = window if window < seq_k else 0
        dims = (batch, heads, kv_heads, seq_q, seq_k, head_dim, int(causal), used, value_dim)
        return Kernel(op_class=OpClass.ATTENTION, dims=dims, flop=flop, dtype=query.dtype)

    return rule


def _rows(op_class: OpClass) -> Rule:
    def rule(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
        largest = max((*inputs, *outputs), key=lambda t: t.numel())
        columns = largest.shape[-1] if largest.dim() else 1
        return Kernel(op_class=op_class, dims=(largest.numel() // max(columns, 1), columns), dtype=largest.dtype)

    return rule


def _norm(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    shape = next(a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], int))
    columns = math.prod(shape)
    return Kernel(op_class=OpClass.NORM, dims=(inputs[0].numel() // columns, columns), dtype=inputs[0].dtype)


def _embedding(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """Reads only the rows that are looked up."""
    columns = outputs[0].shape[-1]
    read = float(tensor_bytes(outputs[0]) + tensor_bytes(inputs[1]))
    rows = outputs[0].numel() // columns
    return Kernel(op_class=OpClass.EMBEDDING, dims=(rows, columns), bytes_read=read, dtype=outputs[0].dtype)


def _embedding_backward(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """Clears the whole gradient, then adds a row per token."""
    columns = outputs[0].shape[-1]
    grad = float(tensor_bytes(inputs[0]))
    rows = inputs[0].numel() // columns
    written = float(tensor_bytes(outputs[0])) + grad
    read = 2 * grad + tensor_bytes(inputs[1])
    dims = (rows, columns)
    return Kernel(op_class=OpClass.EMBEDDING, dims=dims, bytes_read=read, bytes_written=written, dtype=outputs[0].dtype)


def _copy(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    return Kernel(op_class=OpClass.COPY, dims=(_numel(outputs),), dtype=outputs[0].dtype if outputs else None)


def _overwrite(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """copy_(to, from), fill_(to): the destination is not read."""
    read = float(sum(tensor_bytes(t) for t in inputs[1:]))
    return Kernel(op_class=OpClass.COPY, dims=(inputs[0].numel(),), bytes_read=read, dtype=inputs[0].dtype)


def _scatter_zero(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """slice_backward and its like: the result is cleared, then a part of it is copied."""
    part = float(tensor_bytes(inputs[0]))
    written = float(tensor_bytes(outputs[0])) + part
    return Kernel(op_class=OpClass.COPY, dims=(outputs[0].numel(),), bytes_written=written, dtype=outputs[0].dtype)


def _elementwise(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    dtype = outputs[0].dtype if outputs else inputs[0].dtype
    return Kernel(op_class=OpClass.ELEMENTWISE, dims=(max(_numel(inputs), _numel(outputs)),), dtype=dtype)


def _merge_first(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """The first part of a merged attention: what is there before is not read."""
    read = float(sum(tensor_bytes(t) for t in inputs[1:]))
    return Kernel(op_class=OpClass.ELEMENTWISE, dims=(inputs[0].numel(),), bytes_read=read, dtype=inputs[0].dtype)


def _index_put(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """x[mask] = scalar is a masked fill in PyTorch (canDispatchToMaskedFill); other indices scatter."""
    if len(inputs) == 2 and inputs[1].dtype == torch.bool:
        return _elementwise(inputs[:1], outputs, args)
    return _other(inputs, outputs, args)


def _rope(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    return Kernel(op_class=OpClass.ROPE, dims=(outputs[0].numel(),), dtype=outputs[0].dtype)


def _latent_query(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """The rotary part of each head in place."""
    query, cos, sin = inputs
    part = query.numel() // query.shape[-1] * cos.shape[-1]
    size = float(part * query.element_size())
    read = size + tensor_bytes(cos) + tensor_bytes(sin)
    return Kernel(op_class=OpClass.ROPE, dims=(part,), bytes_read=read, bytes_written=size, dtype=query.dtype)


def _latent_keys(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    return Kernel(op_class=OpClass.ROPE, dims=(sum(t.numel() for t in outputs),), dtype=outputs[0].dtype)


def _reduction(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    dims = (sum(t.numel() for t in inputs), sum(t.numel() for t in outputs))
    return Kernel(op_class=OpClass.REDUCTION, dims=dims, dtype=inputs[0].dtype if inputs else None)


def _optimizer(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """Adam reads parameters, gradients and both moments, and writes all but the gradients."""
    parameters, grads, first, second = args[:4]
    written = float(sum(tensor_bytes(t) for t in (*parameters, *first, *second)))
    read = written + sum(tensor_bytes(t) for t in grads)
    dims = (sum(p.numel() for p in parameters),)
    return Kernel(
        op_class=OpClass.OPTIMIZER, dims=dims, bytes_read=read, bytes_written=written, dtype=parameters[0].dtype
    )


def _precision_aware(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """Adam that holds main weights reads weights only to complete the 16 bits of main weights that are kept of them."""
    grads, weights, first, second, main = args[:5]
    own, states = (float(sum(tensor_bytes(t) for t in part)) for part in (weights, (*first, *second, *main)))
    whole = main and main[0].element_size() == 4
    read = states + sum(tensor_bytes(t) for t in grads) + (0.0 if whole else own)
    dims = (sum(t.numel() for t in weights),)
    return Kernel(
        op_class=OpClass.OPTIMIZER, dims=dims, bytes_read=read, bytes_written=states + own, dtype=torch.float32
    )


def _momentum(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """SGD reads parameters, gradients and the momentum, if there is one, and writes all but the gradients."""
    parameters, grads, buffers = args[:3]
    written = float(sum(tensor_bytes(t) for t in (*parameters, *buffers)))
    read = written + sum(tensor_bytes(t) for t in grads)
    dims = (sum(p.numel() for p in parameters),)
    dtype = parameters[0].dtype
    return Kernel(op_class=OpClass.OPTIMIZER, dims=dims, bytes_read=read, bytes_written=written, dtype=dtype)


def _pick(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """nll_loss and gather: one element of each row of the first input."""
    rows = inputs[1].numel()
    read = float(rows * inputs[0].element_size() + tensor_bytes(inputs[1]))
    return Kernel(op_class=OpClass.REDUCTION, dims=(rows, 1), bytes_read=read, dtype=inputs[0].dtype)


def _pick_backward(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """The gradient of all is cleared, then one element of each row is set."""
    out = outputs[0]
    return Kernel(op_class=OpClass.COPY, dims=(out.numel(),), bytes_read=8.0 * inputs[-1].numel(), dtype=out.dtype)


def _shard_copy(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """FSDP2's copies between parameters and flat arrays: what is in the first argument goes into arrays of the last.

    A cast is in it: bytes written are as many elements in the type of what is written.
    """
    sources = [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])
    elements = sum(t.numel() for t in sources)
    target = inputs[-1]
    return Kernel(
        op_class=OpClass.COPY,
        dims=(elements,),
        bytes_read=float(sum(tensor_bytes(t) for t in sources)),
        bytes_written=float(elements * target.element_size()),
        dtype=target.dtype,
    )


def _other(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    dtype = outputs[0].dtype if outputs else None
    return Kernel(op_class=OpClass.OTHER, dims=(max(_numel(inputs), _numel(outputs)),), dtype=dtype)


def _grouped(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    tokens, weight = inputs[:2]
    groups, k, n = weight.shape
    m = tokens.shape[0]
    return Kernel(op_class=OpClass.GROUPED_GEMM, dims=(groups, m, n, k), flop=2.0 * m * n * k, dtype=tokens.dtype)


def _grouped_wgrad(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    """Per group weight[k, n] = tokens[m, k]^T grad[m, n]; in the product's own terms k rows, n columns, m summed."""
    tokens, grad = inputs[:2]
    groups = (inputs[2] if len(inputs) > 2 else outputs[0]).shape[0]
    (m, k), n = tokens.shape, grad.shape[1]
    # dims: groups, total m, n, k; each of the groups sums over its share of the tokens.
    dims = (groups, groups * k, n, m // groups)
    return Kernel(op_class=OpClass.GROUPED_GEMM, dims=dims, flop=2.0 * m * n * k, dtype=tokens.dtype)


def _permutation(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
    largest = max((*inputs, *outputs), key=lambda t: t.numel())
    return Kernel(op_class=OpClass.PERMUTE, dims=(largest.shape[0], largest.shape[-1]), dtype=largest.dtype)


RULES: dict[str, Rule] = {
    "echo.grouped_gemm": _grouped,
    "echo.grouped_wgrad": _grouped_wgrad,
    "echo.grouped_wgrad_accumulate": _grouped_wgrad,
    "echo.expand_tokens": _permutation,
    "echo.reduce_tokens": _permutation,
    "echo.moe_permute_plain": _permutation,
    "echo.moe_permute": _permutation,
    "echo.moe_permute_backward": _permutation,
    "echo.moe_unpermute": _permutation,
    "echo.moe_unpermute_backward": _permutation,
    "echo.moe_sort_chunks": _permutation,
    "echo.moe_pad": _permutation,
    "echo.general_gemm": _general_gemm,
    "aten.mm": _mm,
    "aten.addmm": _mm,
    "aten.bmm": _bmm,
    "aten.baddbmm": _baddbmm,
    "echo.wgrad_gemm_accumulate": _wgrad_accumulate,
    "echo.flash_attention": _flash(backward=False),
    "echo.flash_attention_backward": _flash(backward=True),
    "echo.merge_lse": _elementwise,
    "echo.merge_attention_first": _merge_first,
    "echo.merge_attention": _elementwise,
    "echo.scaled_causal_softmax": _rows(OpClass.SOFTMAX),
    "echo.scaled_causal_softmax_backward": _rows(OpClass.SOFTMAX),
    "aten._softmax": _rows(OpClass.SOFTMAX),
    "aten._softmax_backward_data": _rows(OpClass.SOFTMAX),
    "fsdp.all_gather_copy_in": _shard_copy,
    "fsdp.split_with_sizes_copy": _shard_copy,
    "fsdp.chunk_cat": _shard_copy,
    "aten._log_softmax": _rows(OpClass.SOFTMAX),
    "aten._log_softmax_backward_data": _rows(OpClass.SOFTMAX),
    "aten.nll_loss_forward": _pick,
    "aten.nll_loss_backward": _pick_backward,
    "aten.gather": _pick,
    "aten.native_layer_norm": _norm,
    "aten.native_layer_norm_backward": _norm,
    "aten._fused_rms_norm": _norm,
    "aten._fused_rms_norm_backward": _norm,
    "echo.rope": _rope,
    "echo.rope_backward": _rope,
    "echo.latent_rope_query": _latent_query,
    "echo.latent_rope_keys": _latent_keys,
    "echo.latent_rope_keys_backward": _latent_keys,
    "aten.index_put": _index_put,
    "aten.index_put_": _index_put,
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.slice_backward": _scatter_zero,
    "aten.select_backward": _scatter_zero,
    "aten.copy_": _overwrite,
    "aten.fill_": _overwrite,
    "aten.zero_": _overwrite,
    "aten._fused_adamw_": _optimizer,
    "echo.multi_tensor_adam": _precision_aware,
    "aten._fused_adam_": _optimizer,
    "aten._fused_sgd_": _momentum,
    "echo.multi_tensor_l2norm": _reduction,
    "echo.multi_tensor_scale": _copy,
}
_COPIES = """
    clone _to_copy cat stack zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full constant_pad_nd
    arange repeat roll triu tril index_select _foreach_copy_ scalar_tensor scatter
"""
_REDUCTIONS = (
    "sum mean max amax min amin aminmax all any norm linalg_vector_norm cumsum argmax topk histc _foreach_norm"
)
_POINTWISE = """
    native_dropout native_dropout_backward masked_fill_ _foreach_mul_ _foreach_add_ _foreach_div_ _foreach_addcmul_
    _foreach_addcdiv_ floor_divide _foreach_sqrt _foreach_lerp_ _foreach_mul _foreach_add _foreach_sub_ _foreach_neg
"""
for _names, _rule in ((_COPIES, _copy), (_REDUCTIONS, _reduction), (_POINTWISE, _elementwise)):
    RULES |= {f"aten.{_name}": _rule for _name in _names.split()}


def rule_for(function: Any, name: str) -> Rule:
    """The rule of an operator overload."""
    rule = RULES.get(name)
    if rule is not None:
        return rule
    return _elementwise if torch.Tag.pointwise in function.tags else _other


def shapes_text(inputs: Tensors, outputs: Tensors, *, most: int = 6) -> str:
    """`2048x1x12288,4608x12288->2048x1x4608`; long lists are cut."""

    def side(tensors: Tensors) -> str:
        shown = ["x".join(map(str, t.shape)) or "1" for t in tensors[:most]]
        if len(tensors) > most:
            shown.append(f"+{len(tensors) - most}")
        return ",".join(shown)

    return f"{side(inputs)}->{side(outputs)}"
