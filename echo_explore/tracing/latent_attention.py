"""What multi-latent attention runs of Transformer Engine and of Megatron's Triton kernels, for Megatron's own module.

Down projections are not split over tensor-parallel ranks, and work on this rank's part of the sequence. The rotary
embedding is one kernel in place for queries, and one that makes keys and values of the projected latent.

References:
    megatron-core 0.16.1 (2026), transformer/multi_latent_attention.py, fusions/fused_mla_yarn_rope_apply.py.
"""

from typing import Any

import torch

Tensor = torch.Tensor
SCHEMAS = (
    "latent_rope_query(Tensor(a!) query, Tensor cos, Tensor sin) -> ()",
    "latent_rope_keys(Tensor joined, Tensor position, Tensor cos, Tensor sin, int nope) -> (Tensor, Tensor)",
    "latent_rope_keys_backward(Tensor grad_key, Tensor grad_value, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
)


def _keys(joined: Tensor, position: Tensor, cos: Tensor, sin: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    outer = joined.shape[:-1]
    key = joined.new_empty((*outer, nope + position.shape[-1]))
    return key, joined.new_empty((*outer, joined.shape[-1] - nope))


def _keys_backward(grad_key: Tensor, grad_value: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    outer, rotary = grad_key.shape[:-1], cos.shape[-1]
    joined = grad_key.new_empty((*outer, grad_key.shape[-1] - rotary + grad_value.shape[-1]))
    return joined, grad_key.new_empty((*outer[:-1], 1, rotary))


IMPLEMENTATIONS: dict[str, Any] = {
    "latent_rope_query": lambda *_: None,
    "latent_rope_keys": _keys,
    "latent_rope_keys_backward": _keys_backward,
}


class _QueryRope(torch.autograd.Function):
    """Turns the rotary part of [seq, batch, heads, head_dim] in place, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        torch.ops.echo.latent_rope_query(query, cos, sin)
        return query.view(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        torch.ops.echo.latent_rope_query(grad, *ctx.saved_tensors)
        return grad, None, None


class _KeyRope(torch.autograd.Function):
    """Keys and values of [seq, batch, heads, nope + value_dim] and the shared rotary part [seq, batch, 1, rotary]."""

    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, position: Tensor, cos: Tensor, sin: Tensor, nope: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        key, value = torch.ops.echo.latent_rope_keys(joined, position, cos, sin, nope)
        return key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        joined, position = torch.ops.echo.latent_rope_keys_backward(*grads, *ctx.saved_tensors)
        return joined, position, None, None, None


def rope_query(query: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Tensor:
    """Instead of `fused_apply_mla_rope_for_q`."""
    apply: Any = _QueryRope.apply
    turned: Tensor = apply(query, cos, sin)
    return turned


def rope_keys(
    joined: Tensor, position: Tensor, cos: Tensor, sin: Tensor, rotary: int, nope: int, *_: Any
) -> tuple[Tensor, Tensor]:
    """Instead of `fused_apply_mla_rope_for_kv`."""
    apply: Any = _KeyRope.apply
    key, value = apply(joined, position, cos, sin, nope)
    return key, value


class DuplicatedLinear(torch.nn.Module):
    """Transformer Engine's linear layer with `parallel_mode = "duplicated"`: the whole weight on every tensor rank."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, bias: bool, skip_bias_add: bool, parallel_mode: str,
        **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert parallel_mode == "duplicated"
        assert not bias
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, device="cuda", dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._accumulates = config.gradient_accumulation_fusion

    def forward(self, tensor: Tensor) -> tuple[Tensor, None]:
        """The product, and no bias."""
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        out: Tensor = linear_with_grad_accumulation_and_async_allreduce(
            tensor, self.weight, None, self._accumulates, allreduce_dgrad=False, sequence_parallel=False
        )
        return out, None


def install() -> None:
    """Let Megatron's module find them."""
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.TELinear = DuplicatedLinear
    multi_latent_attention.fused_apply_mla_rope_for_q = rope_query
    multi_latent_attention.fused_apply_mla_rope_for_kv = rope_keys


def unfused_core_attention() -> Any:
    """Megatron's unfused attention with other widths of values than of keys, which its own does not take."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)  # Megatron makes one without widths first, and drops it
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return LatentDotProductAttention
