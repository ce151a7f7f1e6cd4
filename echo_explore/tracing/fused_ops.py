"""Operators that stand for kernels whose libraries need a GPU; each is one row of the graph.

Flash attention, Megatron's softmax and weight-gradient extensions, Transformer Engine's rotary embedding, apex's
multi-tensor kernels.
"""

from collections.abc import Callable
from typing import Any

import torch

from echo_explore.tracing import expert_ops, fused_dispatch, latent_attention, router_ops

Tensor = torch.Tensor
_SCHEMAS = (
    "flash_attention(Tensor query, Tensor key, Tensor value, float dropout, bool causal, float scale, int window)"
    " -> (Tensor, Tensor, Tensor)",
    "flash_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor rng,"
    " float dropout, bool causal, float scale, int window) -> (Tensor, Tensor, Tensor)",
    "merge_lse(Tensor(a!) total, Tensor part) -> ()",
    "merge_attention_first(Tensor(a!) out, Tensor part, Tensor total, Tensor part_lse) -> ()",
    "merge_attention(Tensor(a!) out, Tensor part, Tensor total, Tensor part_lse) -> ()",
    "scaled_causal_softmax(Tensor scores, float scale) -> Tensor",
    "scaled_causal_softmax_backward(Tensor(a!) grad, Tensor probabilities, float scale) -> ()",
    "wgrad_gemm_accumulate(Tensor input, Tensor grad, Tensor(a!) main_grad) -> ()",
    "rope(Tensor input, Tensor angles) -> Tensor",
    "rope_backward(Tensor grad, Tensor angles) -> Tensor",
    "multi_tensor_l2norm(Tensor[] tensors) -> Tensor",
    "multi_tensor_scale(Tensor[] sources, Tensor(a!)[] targets, float scale) -> ()",
    "multi_tensor_adam(Tensor[] grads, Tensor(a!)[] weights, Tensor(b!)[] first, Tensor(c!)[] second,"
    " Tensor(d!)[] main) -> ()",
)


def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    seq_q, batch, heads = query.shape[:3]
    lse = query.new_empty((batch, heads, seq_q), dtype=torch.float32)
    out = query.new_empty((*query.shape[:3], value.shape[-1]))
    return out, lse, query.new_empty((2,), dtype=torch.int64)


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _like_first(tensor: Tensor, *_: Any) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _nothing(*_: Any, **__: Any) -> None:
    return None


_IMPLEMENTATIONS: dict[str, Any] = {
    "flash_attention": _flash,
    "flash_attention_backward": _flash_backward,
    "merge_lse": _nothing,
    "merge_attention_first": _nothing,
    "merge_attention": _nothing,
    "scaled_causal_softmax": _like_first,
    "scaled_causal_softmax_backward": _nothing,
    "wgrad_gemm_accumulate": _nothing,
    "rope": _like_first,
    "rope_backward": _like_first,
    "multi_tensor_l2norm": lambda tensors: tensors[0].new_empty((1,), dtype=torch.float32),
    "multi_tensor_scale": _nothing,
    "multi_tensor_adam": _nothing,
}
_libraries: list[Any] = []


def register() -> None:
    """Make the operators known to torch; once in a process."""
    if _libraries:
        return
    make: Any = torch.library.Library
    library = make("echo", "DEF")
    modules = (expert_ops, router_ops, fused_dispatch, latent_attention)
    for schema in (*_SCHEMAS, *(schema for module in modules for schema in module.SCHEMAS)):
        library.define(schema)
    for implementations in (_IMPLEMENTATIONS, *(module.IMPLEMENTATIONS for module in modules)):
        for name, implementation in implementations.items():
            library.impl(name, implementation, "Meta")
    # rms_norm has a fused CUDA kernel and a composite form; a CPU build of torch knows only the composite one.
    aten = make("aten", "IMPL")
    aten.impl("_fused_rms_norm", _fused_rms_norm, "CUDA")
    # torch 2.13 gives the fused SGD no shape function.
    for overload in ("_fused_sgd_", "_fused_sgd_.tensor_lr"):
        aten.impl(overload, _nothing, "Meta")
    _libraries.extend((library, aten))


def _fused_rms_norm(tensor: Tensor, shape: Any, weight: Any, eps: Any) -> tuple[Tensor, Tensor]:
    statistics = (*tensor.shape[: -len(shape)], *([1] * len(shape)))
    return torch.empty_like(tensor), tensor.new_empty(statistics, dtype=torch.float32)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and random state of one fused attention kernel.

    Args:
        query: [seq_q, batch, heads, head_dim].
        key: [seq_k, batch, kv_heads, head_dim].
        value: [seq_k, batch, kv_heads, value_dim].
        dropout: probability.
        causal: the last query sees all keys, each one before it a key less.
        scale: of the scores.
        window: a query looks back so many tokens; 0: over all of them.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.echo.flash_attention(
        query, key, value, dropout, causal, scale, window
    )
    return result


def attention_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value: of output gradient, the inputs and results of the forward, its settings."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.echo.flash_attention_backward(*arguments)
    return result


def sink_gradient(sinks: Tensor | None) -> Callable[[], Tensor | None]:
    """Makes the gradient of the sinks, one number a head, which the backward kernel writes beside the others."""
    shape = None if sinks is None else (sinks.shape, sinks.dtype, sinks.device)
    return lambda: None if shape is None else torch.empty(shape[0], dtype=shape[1], device=shape[2])


class FlashAttention(torch.autograd.Function):
    """Attention of [seq, batch, heads, head_dim]; saves q, k, v, out and log-sum-exp, as FlashAttention-2 does."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float,
        window: int = 0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out, lse, rng = attention_forward(query, key, value, dropout, causal, scale, window)
        ctx.save_for_backward(query, key, value, out, lse, rng)
        ctx.settings = (dropout, causal, scale, window)
        ctx.sinks = sink_gradient(sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: D102
        grads = attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
        return (*grads, None, None, None, None, ctx.sinks())


class Rope(torch.autograd.Function):
    """Rotary embedding of [seq, batch, heads, head_dim] by the angles [seq, 1, 1, head_dim] in one kernel."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, angles: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(angles)
        return torch.ops.echo.rope(tensor, angles)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: D102
        return torch.ops.echo.rope_backward(grad, *ctx.saved_tensors), None
