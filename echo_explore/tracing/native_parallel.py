"""Tensor and sequence parallelism as DTensor's plans run it: gathers and scatters of activations between modules.

The plans of torchtitan 0.2.2 (models/llama3/infra/parallelize.py): sequence-parallel norms, one gather before attention
and one before feed-forward, a reduce-scatter behind each, logits split over the vocabulary. What was gathered is kept
for the backward. Arrays are [sequence, batch, ...], so that what is gathered is contiguous, as in production kernels.
"""

from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor
_group: list[Any] = []


def use_group(group: Any) -> None:
    """Communicate over this process group from now on; None: over all ranks."""
    _group[:] = [] if group is None else [group]


def _over() -> Any:
    return _group[0] if _group else None


def _gathered(tensor: Tensor, num_ranks: int) -> Tensor:
    out = tensor.new_empty((tensor.shape[0] * num_ranks, *tensor.shape[1:]))
    dist.all_gather_into_tensor(out, tensor.contiguous(), group=_over())
    return out


def _scattered(tensor: Tensor, num_ranks: int) -> Tensor:
    out = tensor.new_empty((tensor.shape[0] // num_ranks, *tensor.shape[1:]))
    dist.reduce_scatter_tensor(out, tensor.contiguous(), group=_over())
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return _gathered(tensor, num_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _scattered(grad, ctx.num_ranks), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return _scattered(tensor, num_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gathered(grad, ctx.num_ranks), None


class _ParallelCrossEntropy(torch.autograd.Function):
    """DTensor's loss_parallel: logits [tokens, vocabulary / ranks]; three small sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_over())
        shifted = logits - largest
        exponents = shifted.exp()
        total = exponents.sum(-1, keepdim=True)
        dist.all_reduce(total, group=_over())
        here = (labels < logits.shape[-1]).unsqueeze(-1)
        picked = shifted.gather(-1, labels.unsqueeze(-1)) * here
        dist.all_reduce(picked, group=_over())
        ctx.save_for_backward(exponents.div_(total), labels)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        probabilities, labels = ctx.saved_tensors
        probabilities.scatter_add_(-1, labels.unsqueeze(-1), grad.expand(labels.shape).unsqueeze(-1))
        return probabilities.mul_(grad), None


def gather(tensor: Tensor, num_ranks: int) -> Tensor:
    """The whole sequence on every rank; its gradient is summed and split again."""
    return _Gather.apply(tensor, num_ranks) if num_ranks > 1 else tensor  # type: ignore[no-untyped-call]


def scatter(tensor: Tensor, num_ranks: int) -> Tensor:
    """The sum over the ranks, split along the sequence; its gradient is gathered."""
    return _Scatter.apply(tensor, num_ranks) if num_ranks > 1 else tensor  # type: ignore[no-untyped-call]


def parallel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of logits that are split over the vocabulary."""
    return _ParallelCrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call,no-any-return]
