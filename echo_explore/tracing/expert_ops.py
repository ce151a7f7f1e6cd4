"""Operators that stand for the fused kernels of a mixture of experts, and the oracle of which experts tokens visit.

Token permutation as in Transformer Engine, matrix products over groups as in the package grouped_gemm. Which expert a
token visits is known to the GPU only; `specs.routing` says what sizes follow.
"""

from typing import Any

import torch

from echo_explore.core import TraceError
from echo_explore.specs.routing import Routing
from echo_explore.tracing import fake_device

Tensor = torch.Tensor
SCHEMAS = (
    "moe_permute(Tensor tokens, Tensor probabilities, Tensor map, int count) -> (Tensor, Tensor, Tensor)",
    "moe_permute_backward(Tensor grad, Tensor grad_probabilities, Tensor rows, int num_tokens) -> (Tensor, Tensor)",
    "moe_permute_plain(Tensor tokens, Tensor map, int count) -> (Tensor, Tensor)",
    "indices_to_multihot(Tensor indices, Tensor probabilities, int experts) -> (Tensor, Tensor)",
    "indices_to_multihot_backward(Tensor grad, Tensor indices) -> Tensor",
    "moe_unpermute(Tensor tokens, Tensor rows, int num_tokens) -> Tensor",
    "moe_unpermute_backward(Tensor grad, Tensor rows, int count) -> Tensor",
    "moe_sort_chunks(Tensor tokens, Tensor? probabilities) -> (Tensor, Tensor)",
    "moe_pad(Tensor tokens) -> Tensor",
    "select_known(Tensor values, Tensor mask, int count) -> Tensor",
    "select_known_backward(Tensor grad, Tensor mask) -> Tensor",
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
    "moe_permute_plain": lambda tokens, routing, count: (
        tokens.new_empty((count, tokens.shape[1])), routing.new_empty(routing.shape, dtype=torch.int32),
    ),
    "indices_to_multihot": lambda indices, probabilities, experts: (
        indices.new_empty((indices.shape[0], experts), dtype=torch.bool),
        probabilities.new_empty((indices.shape[0], experts)),
    ),
    "indices_to_multihot_backward": lambda grad, indices: grad.new_empty(indices.shape),
    "moe_unpermute": lambda tokens, rows, num_tokens: tokens.new_empty((num_tokens, tokens.shape[1])),
    "moe_unpermute_backward": lambda grad, rows, count: grad.new_empty((count, grad.shape[1])),
    "moe_sort_chunks": _sort_chunks,
    "moe_pad": lambda tokens: tokens.new_empty(tokens.shape),
    "select_known": lambda values, mask, count: values.new_empty((count,)),
    "select_known_backward": lambda grad, mask: grad.new_empty(mask.shape),
    "grouped_gemm": lambda tokens, weight: tokens.new_empty((tokens.shape[0], weight.shape[-1])),
    "grouped_wgrad": lambda tokens, grad, groups: tokens.new_empty((groups, tokens.shape[1], grad.shape[1])),
    "grouped_wgrad_accumulate": lambda tokens, grad, main_grad: None,
}  # fmt: skip


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


class PermutePlain(torch.autograd.Function):
    """Transformer Engine's moe_permute, without probabilities; its backward is moe_unpermute."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, routing: Tensor, count: int) -> Any:  # noqa: D102
        permuted, rows = torch.ops.echo.moe_permute_plain(tokens, routing, count)
        ctx.save_for_backward(rows)
        ctx.num_tokens = tokens.shape[0]
        ctx.mark_non_differentiable(rows)
        return permuted, rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:  # noqa: D102
        return torch.ops.echo.moe_unpermute(grad, ctx.saved_tensors[0], ctx.num_tokens), None, None


class Multihot(torch.autograd.Function):
    """Megatron's fused_indices_to_multihot, a Triton kernel each way."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, probabilities: Tensor, experts: int) -> Any:  # noqa: D102
        routing, spread = torch.ops.echo.indices_to_multihot(indices, probabilities, experts)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(routing)
        return routing, spread

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> Any:  # noqa: D102
        return None, torch.ops.echo.indices_to_multihot_backward(grad, ctx.saved_tensors[0]), None


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


class Pad(torch.autograd.Function):
    """Transformer Engine's Fp8Padding and Fp8Unpadding: a copy each way.

    # Approximation: the rows that fill an expert's up to 16 or 32 are left out (under-estimates by half as many).
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:  # noqa: D102
        return torch.ops.echo.moe_pad(tokens)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: D102
        return torch.ops.echo.moe_pad(grad)  # type: ignore[no-any-return]


def with_padding(experts: Any) -> None:
    """Let a module of experts pad what it is given and cut what it gives (TEGroupedMLP.forward of 0.16.1 in 8 bits)."""
    forward, pad = experts.forward, Pad.apply

    def padded(tokens: Tensor, counts: Any, probabilities: Tensor) -> Any:
        taken = pad(probabilities.unsqueeze(-1)).squeeze(-1)  # type: ignore[no-untyped-call]
        out, bias = forward(pad(tokens), counts, taken)  # type: ignore[no-untyped-call]
        return pad(out), bias  # type: ignore[no-untyped-call]

    experts.forward = padded


class Select(torch.autograd.Function):
    """masked_select with a known count."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, count: int) -> Tensor:  # noqa: D102
        ctx.save_for_backward(mask)
        return torch.ops.echo.select_known(values, mask, count)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        return torch.ops.echo.select_known_backward(grad, ctx.saved_tensors[0]), None, None


class GroupedGemm(torch.autograd.Function):
    """grouped_gemm.ops.gmm; its weight gradient goes into the fp32 buffer where `accumulate` says so."""

    accumulate = False

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(tokens, weight)
        ctx.parameter = weight if weight._base is None else weight._base
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
    """As grouped_gemm.ops.gmm; one row, whatever the sizes of the groups."""
    apply: Any = GroupedGemm.apply
    return apply(tokens, weight)


def fused_permute_with_probs(tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int) -> Any:
    """As Transformer Engine's."""
    apply: Any = Permute.apply
    return apply(tokens, probs, routing_map, int(num_out_tokens))


def fused_permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: int) -> Any:
    """As Transformer Engine's."""
    apply: Any = PermutePlain.apply
    return apply(tokens, routing_map, int(num_out_tokens))


def indices_to_multihot(self: Any, indices: Tensor, probs: Tensor) -> Any:
    """Instead of _DeepepManager._indices_to_multihot, whose shapes the GPU alone knows: the fused kernel."""
    apply: Any = Multihot.apply
    return apply(indices, probs, self.num_local_experts)


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


_routing: list[Routing] = []


def set_routing(routing: Routing | None) -> None:
    """Which experts tokens visit in the traces that follow."""
    _routing[:] = [] if routing is None else [routing]


def current_routing() -> Routing:
    """What `set_routing` was given.

    Raises:
        TraceError: nothing.
    """
    if not _routing:
        raise TraceError("routing = (none): no oracle says which experts tokens visit; fix: give set_routing one")
    return _routing[0]


def known_splits(dispatcher: Any) -> None:
    """Give Megatron's token dispatcher the counts that its host waits for: the oracle's, the same on every rank."""
    import numpy as np

    local, ranks = dispatcher.num_local_experts, dispatcher.ep_size
    counts = current_routing().counts(dispatcher.routing_map.shape[0])
    sent = [sum(counts[rank * local : (rank + 1) * local]) for rank in range(ranks)]
    mine = sent[dispatcher.local_expert_indices[0] // local]
    if dispatcher.input_splits is not None:
        dispatcher.input_splits = np.array(sent)
        dispatcher.output_splits = np.full(ranks, mine)
    if dispatcher.output_splits_tp is not None:
        dispatcher.output_splits_tp = np.full(dispatcher.tp_size, mine * ranks)
    dispatcher.num_out_tokens = sum(counts)


def gathered_postprocess(self: Any, hidden_states: Tensor, probs: Tensor) -> Any:
    """As MoEAllGatherTokenDispatcher.dispatch_postprocess of 0.16.1, with the count that its host waits for known."""
    from megatron.core.transformer.moe import token_dispatcher

    self.hidden_shape_before_permute = hidden_states.shape
    first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
    self.local_map = self.routing_map[:, first:last].contiguous()
    self.local_probs = probs[:, first:last].contiguous()
    tokens_per_expert = self.local_map.sum(dim=0).long().to("cpu", non_blocking=True)
    fake_device.host_sync("tokens_per_expert.cpu()")
    ranks = max(1, self.tp_size * self.ep_size)
    count = ranks * sum(current_routing().counts(hidden_states.shape[0] // ranks)[first:last])
    permuted, _, self.reversed_local_input_permutation_mapping = token_dispatcher.permute(
        hidden_states, self.local_map, num_out_tokens=count, fused=self.config.moe_permute_fusion
    )
    select: Any = Select.apply
    self.local_probs = select(self.local_probs.T.contiguous(), self.local_map.T.contiguous(), count)
    self.routing_map = None
    return permuted, tokens_per_expert, self.local_probs
