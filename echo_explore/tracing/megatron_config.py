"""Megatron's TransformerConfig from a description in plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echo_explore.core import TraceError
from echo_explore.specs import ModelSpec
from echo_explore.specs.model import WINDOWED, feed_forward_kind
from echo_explore.specs.recompute import modules_of, recomputes_layers
from echo_explore.tracing.megatron_activation import activation_settings, has_own_experts
from echo_explore.tracing.megatron_cluster import Degrees
from echo_explore.tracing.quantise import FORMATS
from echo_explore.tracing.request import TraceRequest

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(FORMATS, torch.bfloat16),  # narrow formats: parameters and everything but linear layers are bf16
}
DROPOUT = 0.1  # Megatron-LM 0.16's default of --hidden-dropout; any value above 0 gives the same kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How parameters and pipeline of a job are run; the defaults are those of one stage without replicas."""

    layers_of_chunks: tuple[int, ...] = ()
    overlap_p2p: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_elements: int | None = None
    narrow_gradients: bool = False


_BALANCING = {"batch": "aux_loss", "sequence": "seq_aux_loss", "none": "none"}


def _experts(request: TraceRequest, kinds: Sequence[str]) -> dict[str, Any]:
    """Routed experts over the expert-parallel group."""
    moe = request.model.moe
    if moe is None:
        return {}
    flex = request.expert_dispatcher in ("deepep", "hybridep")
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_layer_freq": [int(feed_forward_kind(kind) == "moe") for kind in kinds],
        "moe_token_dispatcher_type": "flex" if flex else request.expert_dispatcher,
        "moe_flex_dispatcher_backend": request.expert_dispatcher if flex else "deepep",
        # The fused exchanges carry weights in fp32 (Megatron-LM, megatron/core/transformer/moe/README.md, 2025).
        "moe_router_dtype": "fp32" if flex else None,
        "moe_expert_capacity_factor": request.expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": request.pad_expert_input,
        "moe_shared_expert_overlap": request.overlap_shared_experts,
        "moe_router_fusion": request.fused_router,
        "moe_router_score_function": moe.score_function,
        "moe_router_num_groups": moe.num_groups or None,
        "moe_router_group_topk": moe.groups_per_token or None,
        "moe_router_enable_expert_bias": moe.selection_bias,
        "moe_router_pre_softmax": moe.score_function == "softmax" and moe.experts_per_token == 1,
        "moe_grouped_gemm": True,
        "moe_use_legacy_grouped_gemm": not has_own_experts(request.model),
        "moe_permute_fusion": True,
        "moe_router_load_balancing_type": _BALANCING[moe.balancing_loss],
        "moe_aux_loss_coeff": 1e-2,  # Megatron-LM, examples/mixtral; any value above 0 gives the same kernels
        "expert_tensor_parallel_size": request.expert_tensor_parallel,
    }


def _fuses_rope(request: TraceRequest) -> bool:
    """Whether one kernel turns queries: not under YaRN, whose temperature 0.1 log(factor) + 1 the fused kernel has no
    place for; Megatron then falls back to operators (megatron-core 0.16.1, rope_utils.py, apply_rotary_pos_emb). MLA's
    kernels take it.
    """  # noqa: D205
    model = request.model
    stretched = model.yarn_scaling_factor > 1.0 and model.mla is None
    return request.fusion != "eager" and model.position_embedding == "rope" and not stretched


def _latent(model: ModelSpec) -> dict[str, Any]:
    """Multi-latent attention; YaRN's angles are made once, and its fused kernels are those of production jobs."""
    mla = model.mla
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "yarn",
    }


def _mask(model: ModelSpec, kinds: Sequence[str]) -> dict[str, Any]:
    """Windows of the layers, a prediction layer as the last of them, and the kind of softmax."""
    settings: dict[str, Any] = {"softmax_type": "learnable"} if model.attention_sink else {}
    if not model.attention_window:
        return settings
    windowed = [kind.endswith(WINDOWED) for kind in kinds]
    windowed += windowed[-1:] * model.multi_token_prediction_layers
    # Megatron's window is the number of tokens before a token.
    return settings | {"window_size": (model.attention_window - 1, 0), "window_attn_skip_freq": windowed}


def _recompute(name: str) -> dict[str, Any]:
    if recomputes_layers(name):
        _, method, count = (name if ":" in name else "full:uniform:1").split(":")
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(count)}
    modules = modules_of(name)
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}


def _unchanged(tensor: Any) -> Any:
    """Instead of initialising weights, which a trace does not need."""
    return tensor


def config_of(request: TraceRequest, kinds: Sequence[str], degrees: Degrees, schedule: Schedule) -> Any:
    """Megatron's TransformerConfig.

    Raises:
        TraceError: Megatron refuses it; the message is Megatron's.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model, fused = request.model, request.fusion == "fused"
    dtype = DTYPES[request.precision]
    rate = DROPOUT if request.dropout else 0.0
    settings: dict[str, Any] = {
        "num_layers": len(kinds),
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm" if model.normalization == "rmsnorm" else "LayerNorm",
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "mtp_num_layers": model.multi_token_prediction_layers or None,
        "hidden_dropout": rate,
        "attention_dropout": rate,
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "virtual_pipeline_model_parallel_size": degrees.virtual if degrees.virtual > 1 else None,
        "context_parallel_size": degrees.context,
        "cp_comm_type": request.context_exchange,
        "expert_model_parallel_size": degrees.expert,
        "sequence_parallel": request.sequence_parallel,
        "bf16": dtype is torch.bfloat16,
        "fp16": request.precision == "fp16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "gradient_accumulation_fusion": request.gradient_accumulation_fusion,
        "masked_softmax_fusion": fused,
        # Megatron's experts with biases refuse it (0.16.1, TEGroupedMLP.__init__).
        "bias_dropout_fusion": fused and not (model.moe is not None and model.linear_bias),
        "apply_rope_fusion": _fuses_rope(request),
        # Megatron's fused cross entropy casts its gradient to bf16, so only bf16 jobs can use it.
        "cross_entropy_loss_fusion": fused and dtype is torch.bfloat16,
        "persist_layer_norm": False,
        "init_method": _unchanged,
        "output_layer_init_method": _unchanged,
        "embedding_init_method": _unchanged,
        "overlap_p2p_comm": schedule.overlap_p2p and degrees.virtual > 1,
        "batch_p2p_comm": not (schedule.overlap_p2p and degrees.virtual > 1),
        "batch_p2p_sync": False,
        "deallocate_pipeline_outputs": True,
    }
    settings |= (
        activation_settings(model, fused=fused) | _experts(request, kinds) | _latent(model) | _mask(model, kinds)
    )
    settings |= _recompute(request.recompute) | _layout(schedule.layers_of_chunks, degrees)
    try:
        return (MLATransformerConfig if model.mla else TransformerConfig)(**settings)
    except (AssertionError, ValueError, TypeError) as error:
        raise TraceError(f"megatron-core refuses the configuration: {_first_line(error)}") from error


def _layout(layers_of_chunks: tuple[int, ...], degrees: Degrees) -> dict[str, Any]:
    """Megatron's own list of what each chunk holds, where the chunks are not equal."""
    if len(set(layers_of_chunks)) <= 1:
        return {}
    chunks: list[list[str]] = [["decoder"] * count for count in layers_of_chunks]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return {"pipeline_model_parallel_layout": chunks}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
