"""Attention of a user's program: the kernels that PyTorch's `scaled_dot_product_attention` launches on a GPU.

Without a GPU it falls apart into products and a softmax. Here it calls the operator that it would choose (torch 2.13,
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): FlashAttention-2 for 16-bit arrays without a mask, else the
memory-efficient kernel, which takes masks and fp32.
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from echo_explore.core import TraceError
from echo_explore.graph import OpClass
from echo_explore.tracing import upstream
from echo_explore.tracing.op_rules import Kernel, Rule, Tensors, attended_pairs, attention_flop

LARGEST_HEAD = 256
"""Largest head dimension of the flash kernel (torch 2.13, sdp_utils.cpp, check_head_dim_size_flash)."""


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As `torch.nn.functional.scaled_dot_product_attention`, as one kernel."""
    aten: Any = torch.ops.aten
    half = query.dtype in (torch.bfloat16, torch.float16)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if attn_mask is None and half and query.shape[-1] <= LARGEST_HEAD:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    repeat = query.shape[-3] // key.shape[-3]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, -3), value.repeat_interleave(repeat, -3)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    needs_grad = any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Attention as one kernel, for programs that call it by its name in `torch.nn.functional`."""
    module: Any = torch.nn.functional
    real = module.scaled_dot_product_attention
    missing = [
        name
        for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
        if not hasattr(torch.ops.aten, name)
    ]
    if missing:
        raise TraceError(f"torch = {torch.__version__}: {', '.join(missing)} is gone; fix: use torch 2.13")
    module.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        module.scaled_dot_product_attention = real


@contextlib.contextmanager
def masks_as_on_a_gpu() -> Iterator[None]:
    """Let transformers, if a program uses it, leave out masks as on a GPU; for fake tensors it makes them all.

    It asks the GPU whether a batch is one sequence a row: a wait of the host, whose answer is taken as yes.

    Raises:
        TraceError: the patch was not written for this version of transformers.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if module is None:
        yield
        return
    upstream.check_version("transformers")
    real = module.is_fake_tensor
    module.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        module.is_fake_tensor = real


def _attention(causal_at: int, *, backward: bool = False) -> Rule:
    """Args: position of the causal flag among the arguments, and whether the first input is a gradient."""

    def rule(inputs: Tensors, outputs: Tensors, args: tuple[Any, ...]) -> Kernel:
        query, key, value = inputs[1:4] if backward else inputs[:3]
        batch, heads, seq_q, head_dim = query.shape
        kv_heads, seq_k, value_dim = key.shape[1], key.shape[2], value.shape[3]
        causal = bool(args[causal_at]) if len(args) > causal_at else False  # a default is left out
        pairs = attended_pairs(seq_q, seq_k, causal, 0)
        return Kernel(
            op_class=OpClass.ATTENTION,
            dims=(batch, heads, kv_heads, seq_q, seq_k, head_dim, int(causal), 0, value_dim),
            flop=attention_flop(batch, heads, pairs, head_dim, value_dim, backward=backward),
            dtype=query.dtype,
        )

    return rule


ATTENTION_RULES: dict[str, Rule] = {
    "aten._scaled_dot_product_flash_attention": _attention(4),
    "aten._scaled_dot_product_flash_attention_backward": _attention(11, backward=True),
    "aten._scaled_dot_product_efficient_attention": _attention(6),
    "aten._scaled_dot_product_efficient_attention_backward": _attention(11, backward=True),
}
"""Rules by operator."""
