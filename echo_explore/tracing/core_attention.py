"""Core attention of production jobs for Megatron's layer specs: one flash kernel forward, one backward."""

import math
from typing import Any

import torch

from echo_explore.tracing.fused_ops import FlashAttention


class FlashCoreAttention(torch.nn.Module):
    """Takes the place of `DotProductAttention`: [seq, batch, heads, head_dim] in, [seq, batch, hidden] out."""

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
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.causal = attn_mask_type.name == "causal"
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

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
        apply: Any = FlashAttention.apply
        out: torch.Tensor = apply(query, key, value, self.dropout, self.causal, self.scale)
        return out.reshape(*out.shape[:2], -1)
