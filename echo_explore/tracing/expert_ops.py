"""Operators that stand for the fused kernels of a mixture of experts, and the balanced routing that traces assume.

Token permutation as in Transformer Engine, matrix products over groups as in the package grouped_gemm. Which expert a
token visits is known to the GPU only, so every expert gets the same number of tokens.
"""

from typing import Any

import torch

from echo_explore.core import TraceError

Tensor = torch.Tensor
SCHEMAS = (
    "moe_permute(Tensor tokens, Tensor probabilities, Tensor map, int count) -> (Tensor, Tensor, Tensor)",
    "moe_permute_backward(Tensor grad, Tensor grad_probabilities, Tensor rows, int num_tokens) -> (Tensor, Tensor)",
    "moe_unpermute(Tensor tokens, Tensor rows, int num_tokens) -> Tensor",
    "moe_unpermute_backward(Tensor grad, Tensor rows, int count) -> Tensor",
    "moe_sort_chunks(Tensor tokens, Tensor? probabilities) -> (Tensor, Tensor)",
    "grouped_gemm(Tensor tokens, Tensor weight) -> Tensor",
    "grouped_wgrad(Tensor tokens, Tensor grad, int groups) -> Tensor",
    "grouped_wgrad_accumulate(Tensor tokens, Tensor grad, Tensor(a!) main_grad) -> ()",
)


def _permute(tokens: Tensor, probabilities: Tensor, routing: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = routing.new_empty(routing.shape, dtype=torch.int32)
    return tokens.new_empty((count, tokens.shape[1])), probabilities.new_empty((count,)), rows


def _permute_backward(grad: Tensor, grad_probabilities: Tensor, rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    return grad.new_empty((num_tokens, grad.shape[1])), grad_probabilities.new_empty(rows.shape)


def _sort_chunks(tokens: Tensor, probabilities: Tensor | None) -> tuple[Tensor, Tensor]:
    sorted_probabilities = (
        tokens.new_empty((0,)) if probabilities is None else probabilities.new_empty(probabilities.shape)
    )
    return tokens.new_empty(tokens.shape), sorted_probabilities


IMPLEMENTATIONS: dict[str, Any] = {
    "moe_permute": _permute,
    "moe_permute_backward": _permute_backward,
    "moe_unpermute": lambda tokens, rows, num_tokens: tokens.new_empty((num_tokens, tokens.shape[1])),
    "moe_unpermute_backward": lambda grad, rows, count: grad.new_empty((count, grad.shape[1])),
    "moe_sort_chunks": _sort_chunks,
    "grouped_gemm": lambda tokens, weight: tokens.new_empty((tokens.shape[0], weight.shape[-1])),
    "grouped_wgrad": lambda tokens, grad, groups: tokens.new_empty((groups, tokens.shape[1], grad.shape[1])),
    "grouped_wgrad_accumulate": lambda tokens, grad, main_grad: None,
}


class Permute(torch.autograd.Function):
    """Transformer Engine's moe_permute_with_probs."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probabilities: Tensor, routing: Tensor, count: int) -> Any:  # noqa: D102
        permuted, permuted_probabilities, rows = torch.ops.echo.moe_permute(tokens, probabilities, routing, count)
        ctx.save_for_backward(rows)
        ctx.num_tokens = tokens.shape[0]
        ctx.mark_non_differentiable(rows)
        return permuted, permuted_probabilities, rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_probabilities: Tensor, _: Any) -> Any:  # noqa: D102
        rows = ctx.saved_tensors[0]
        return (*torch.ops.echo.moe_permute_backward(grad, grad_probabilities, rows, ctx.num_tokens), None, None)


class Unpermute(torch.autograd.Function):
    """Transformer Engine's moe_unpermute: the sum of what the experts of a token give."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor, num_tokens: int) -> Tensor:  # noqa: D102
        ctx.save_for_backward(rows)
        ctx.count = tokens.shape[0]
        return torch.ops.echo.moe_unpermute(tokens, rows, num_tokens)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        return torch.ops.echo.moe_unpermute_backward(grad, ctx.saved_tensors[0], ctx.count), None, None


class SortChunks(torch.autograd.Function):
    """Transformer Engine's moe_sort_chunks_by_index, with or without probabilities."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probabilities: Tensor | None) -> Any:  # noqa: D102
        ctx.with_probabilities = probabilities is not None
        return torch.ops.echo.moe_sort_chunks(tokens, probabilities)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_probabilities: Tensor) -> Any:  # noqa: D102
        given = grad_probabilities if ctx.with_probabilities else None
        result, result_probabilities = torch.ops.echo.moe_sort_chunks(grad, given)
        return result, result_probabilities if ctx.with_probabilities else None


class GroupedGemm(torch.autograd.Function):
    """grouped_gemm.ops.gmm; its weight gradient goes into the fp32 buffer where `accumulate` says so."""

    accumulate = False

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(tokens, weight)
        ctx.parameter = weight._base
        return torch.ops.echo.grouped_gemm(tokens, weight)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        tokens, weight = ctx.saved_tensors
        ops = torch.ops.echo
        grad_tokens = ops.grouped_gemm(grad, weight.transpose(1, 2))
        main_grad = getattr(ctx.parameter, "main_grad", None)
        if not GroupedGemm.accumulate or main_grad is None:
            return grad_tokens, ops.grouped_wgrad(tokens, grad, weight.shape[0])
        ops.grouped_wgrad_accumulate(tokens, grad, main_grad.view(weight.shape))
        ctx.parameter.grad_added_to_main_grad = True
        return grad_tokens, torch.empty_like(weight)


def gmm(tokens: Tensor, weight: Tensor, batch_sizes: Any, trans_b: bool = False) -> Any:
    """As grouped_gemm.ops.gmm, for balanced groups."""
    apply: Any = GroupedGemm.apply
    return apply(tokens, weight)


def fused_permute_with_probs(tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int) -> Any:
    """As Transformer Engine's."""
    apply: Any = Permute.apply
    return apply(tokens, probs, routing_map, int(num_out_tokens))


def fused_unpermute(tokens: Tensor, rows: Tensor, merging_probs: Any = None, restore_shape: Any = None) -> Any:
    """As Transformer Engine's; Megatron applies the probabilities in the experts."""
    apply: Any = Unpermute.apply
    return apply(tokens, rows, int(restore_shape[0]))


def fused_sort_chunks(tokens: Tensor, split_sizes: Any, sorted_idxs: Any) -> Any:
    """As Transformer Engine's."""
    apply: Any = SortChunks.apply
    return apply(tokens, None)[0]


def fused_sort_chunks_with_probs(tokens: Tensor, probs: Tensor, split_sizes: Any, sorted_idxs: Any) -> Any:
    """As Transformer Engine's."""
    apply: Any = SortChunks.apply
    return apply(tokens, probs)


def balanced_splits(dispatcher: Any) -> None:
    """Give Megatron's token dispatcher the splits that its host waits for: every rank sends every rank the same.

    Raises:
        TraceError: the tokens of a micro-batch do not divide by the ranks.
    """
    import numpy as np

    tokens = dispatcher.routing_map.shape[0] * dispatcher.config.moe_router_topk
    if tokens % dispatcher.ep_size:
        raise TraceError(
            f"layout.ep = {dispatcher.ep_size}: must divide tokens * experts_per_token = {tokens} of a rank; "
            "fix: change ep or the micro-batch"
        )
    share = tokens // dispatcher.ep_size
    if dispatcher.input_splits is not None:
        dispatcher.input_splits = np.full(dispatcher.ep_size, share)
        dispatcher.output_splits = np.full(dispatcher.ep_size, share)
    if dispatcher.output_splits_tp is not None:
        dispatcher.output_splits_tp = np.full(dispatcher.tp_size, share * dispatcher.ep_size)
    dispatcher.num_out_tokens = tokens
