"""Core attention of production jobs for Megatron's layer specs: fused kernels, also over a split sequence."""

import math
from typing import Any

import torch

from echo_explore.tracing.context_attention import CONTEXT_ATTENTION
from echo_explore.tracing.fused_ops import FlashAttention


class FlashCoreAttention(torch.nn.Module):
    """Takes the place of `DotProductAttention`: [seq, batch, heads, head_dim] in, [seq, batch, hidden] out.

    Whether the layer has a window, and how keys and values travel (`cp_comm_type`), is Megatron's configuration.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import is_layer_window_attention

        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.causal = attn_mask_type.name == "causal"
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = 1.0 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Megatron's window counts the tokens before a query: it sees one more, itself.
        self.window = config.window_size[0] + 1 if windowed else 0
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, device="cuda", dtype=config.params_dtype))
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.group = parallel_state.get_context_parallel_group()
        self.exchange = cp_comm_type or config.cp_comm_type or "p2p"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Context of every token; the mask is the kernel's own causal one."""
        out: torch.Tensor
        apply: Any
        query, key, value = self.laid_out(query, key, value)
        if self.group.size() > 1:
            apply = CONTEXT_ATTENTION[self.exchange].apply
            out = apply(query, key, value, self.dropout, self.scale, self.window, self.group, self.softmax_offset)
        else:
            apply = FlashAttention.apply
            out = apply(query, key, value, self.dropout, self.causal, self.scale, self.window, self.softmax_offset)
        return out.reshape(*out.shape[:2], -1)

    def laid_out(self, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values as the kernel is given them: as they come, whatever their strides."""
        return arrays


class TransformerEngineAttention(FlashCoreAttention):
    """The same behind Transformer Engine's DotProductAttention, which copies arrays to a layout that its kernels take.

    So values, cut out of one array with queries and keys, are copied once rotary positions have made new queries and
    keys; what is kept for the backward is the copy, and the joint array is free [Transformer Engine 2.8 (2025),
    pytorch/attention/dot_product_attention/utils.py, get_qkv_layout].
    """

    def laid_out(self, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As they come where all three lie in one array alike, or keys and values in two alike; else copies."""
        _, key, value = arrays
        joint = len({(x.untyped_storage()._cdata, x.shape, x.stride()) for x in arrays}) == 1
        each = {tuple(step // x.shape[-1] for step in x.stride()[:-1]) for x in (key, value)}
        apart = len(each) == 1 and key.storage_offset() == value.storage_offset() == 0
        return arrays if joint or apart else tuple(x.contiguous() for x in arrays)


def unfused_alibi_attention() -> Any:
    """Megatron's unfused attention with a bias of one number a head and key, as BLOOM's trainer adds it.

    The bias goes into the product of queries and keys as its third argument (Megatron-DeepSpeed, 2022,
    megatron/model/transformer.py, CoreAttention: `baddbmm(alibi, query, key, beta=1)`).
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class AlibiDotProductAttention(DotProductAttention):  # type: ignore[misc]
        bias: torch.Tensor | None = None

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            plain = torch.baddbmm

            def with_bias(scores: torch.Tensor, *products: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
                if self.bias is None:
                    self.bias = scores.new_empty((scores.shape[0], 1, scores.shape[2]))
                return plain(self.bias, *products, beta=1.0, alpha=alpha)

            functions: Any = torch
            functions.baddbmm = with_bias
            try:
                out: torch.Tensor = super().forward(*args, **kwargs)
            finally:
                functions.baddbmm = plain
            return out

    return AlibiDotProductAttention
