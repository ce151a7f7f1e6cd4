"""Operators that stand for Transformer Engine's fused router kernels (Megatron's moe_router_fusion): one row each.

Choice of experts with its scores, scores for the auxiliary loss, the auxiliary loss itself (Transformer Engine 2.7,
fused_router, 2025), and the product of a router in fp32 (general_gemm, where that library is).
"""

from typing import Any

import torch

Tensor = torch.Tensor
SCHEMAS = (
    "router_topk(Tensor logits, Tensor? bias, int topk) -> (Tensor, Tensor, Tensor)",
    "router_topk_backward(Tensor grad, Tensor map, Tensor scores) -> Tensor",
    "router_scores(Tensor logits, int topk) -> (Tensor, Tensor)",
    "router_scores_backward(Tensor grad, Tensor scores) -> Tensor",
    "router_loss(Tensor scores, Tensor counts) -> Tensor",
    "router_loss_backward(Tensor grad, Tensor counts, int rows) -> Tensor",
    "general_gemm(Tensor a, Tensor b, str layout, ScalarType dtype) -> Tensor",
)


def _wide(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


IMPLEMENTATIONS: dict[str, Any] = {
    "router_topk": lambda logits, bias, topk: (
        logits.new_empty(logits.shape), logits.new_empty(logits.shape, dtype=torch.bool), _wide(logits),
    ),
    "router_topk_backward": lambda grad, routing, scores: grad.new_empty(grad.shape),
    "router_scores": lambda logits, topk: (logits.new_empty(logits.shape, dtype=torch.bool), _wide(logits)),
    "router_scores_backward": lambda grad, scores: grad.new_empty(grad.shape),
    "router_loss": lambda scores, counts: scores.new_empty(()),
    "router_loss_backward": lambda grad, counts, rows: grad.new_empty((rows, counts.shape[0])),
    "general_gemm": lambda a, b, layout, dtype: b.new_empty(_product_shape(a, b, layout), dtype=dtype),
}  # fmt: skip


def _product_shape(a: Tensor, b: Tensor, layout: str) -> tuple[int, int]:
    """Of Transformer Engine's column-major products: TN is b a^T, NN is b a, NT is b^T a."""
    if layout == "TN":
        return b.shape[0], a.shape[0]
    return (b.shape[0] if layout == "NN" else b.shape[1]), a.shape[1]


def general_gemm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, layout: str, **_: Any) -> list[Tensor]:
    """As Transformer Engine's: one product, which adds the bias if there is one."""
    return [torch.ops.echo.general_gemm(a, b, layout, out_dtype)]


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, topk: int) -> Any:
        weights, routing, scores = torch.ops.echo.router_topk(logits, bias, topk)
        ctx.save_for_backward(routing, scores)
        ctx.mark_non_differentiable(routing)
        return weights, routing

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return torch.ops.echo.router_topk_backward(grad, *ctx.saved_tensors), None, None


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, topk: int) -> Any:
        routing, scores = torch.ops.echo.router_scores(logits, topk)
        ctx.save_for_backward(scores)
        ctx.mark_non_differentiable(routing)
        ctx.dtype = logits.dtype
        return routing, scores

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> Any:
        return torch.ops.echo.router_scores_backward(grad, ctx.saved_tensors[0]).to(ctx.dtype), None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: Tensor) -> Any:
        ctx.save_for_backward(counts)
        ctx.rows = scores.shape[0]
        return torch.ops.echo.router_loss(scores, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.ops.echo.router_loss_backward(grad, ctx.saved_tensors[0], ctx.rows), None


def topk_with_score_function(*, logits: Tensor, topk: int, expert_bias: Tensor | None = None, **_: Any) -> Any:
    """As Transformer Engine's fused_topk_with_score_function."""
    apply: Any = _TopK.apply
    return apply(logits, expert_bias, topk)


def compute_score_for_moe_aux_loss(*, logits: Tensor, topk: int, score_function: str) -> Any:
    """As Transformer Engine's fused_compute_score_for_moe_aux_loss."""
    apply: Any = _Scores.apply
    return apply(logits, topk)


def moe_aux_loss(*, probs: Tensor, tokens_per_expert: Tensor, **_: Any) -> Any:
    """As Transformer Engine's fused_moe_aux_loss."""
    apply: Any = _Loss.apply
    return apply(probs, tokens_per_expert)
