"""Builds the real Megatron-core model of one rank from a description in plain values."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echo_explore.core import TraceError
from echo_explore.graph import Axis
from echo_explore.specs import ModelSpec
from echo_explore.specs.model import WINDOWED, feed_forward_kind
from echo_explore.specs.recompute import modules_of, recomputes_layers
from echo_explore.specs.routing import Routing
from echo_explore.tracing import expert_ops, fake_cluster, fused_dispatch
from echo_explore.tracing.core_attention import FlashCoreAttention, unfused_alibi_attention
from echo_explore.tracing.eager_norm import EagerRmsNorm
from echo_explore.tracing.expert_ops import GroupedGemm
from echo_explore.tracing.gathered_inputs import keep_gathered_inputs
from echo_explore.tracing.grouped_experts import experts_spec
from echo_explore.tracing.latent_attention import DuplicatedLinear, unfused_core_attention
from echo_explore.tracing.lora import adapt
from echo_explore.tracing.megatron_activation import activation_settings, has_own_experts
from echo_explore.tracing.quantise import FORMATS
from echo_explore.tracing.request import TraceRequest, unsupported

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(FORMATS, torch.bfloat16),  # narrow formats: parameters and everything but linear layers are bf16
}
DROPOUT = 0.1  # Megatron-LM 0.16's default of --hidden-dropout; any value above 0 gives the same kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of parallelism of a job, and the rank that is played."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    rank: int = 0
    num_gpus: int | None = None

    @property
    def world_size(self) -> int:
        """GPUs of the job; what the degrees make, unless given."""
        return self.num_gpus or self.tensor * self.pipeline * self.context * self.data


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


def start_cluster(degrees: Degrees) -> dict[str, Axis]:
    """Be one rank of a fake cluster; the axis of every process group by its name."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a, moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    parallel_state.destroy_model_parallel()
    fused_dispatch.forget_buffers(fused_a2a)
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None  # a fake tensor of the trace before
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    MTPLossLoggingHelper.tracker = {}
    fake_cluster.start(degrees.rank, degrees.world_size)
    parallel_state.initialize_model_parallel(
        degrees.tensor,
        degrees.pipeline,
        degrees.virtual if degrees.virtual > 1 else None,
        context_parallel_size=degrees.context,
        expert_model_parallel_size=degrees.expert,
        expert_tensor_parallel_size=degrees.expert_tensor,
        create_gloo_process_groups=False,
    )
    return _axes(parallel_state)


def _axes(parallel_state: Any) -> dict[str, Axis]:
    whole = parallel_state.get_expert_tensor_parallel_world_size() == 1
    groups = {
        Axis.TENSOR: [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_and_context_parallel_group(),
        ],
        Axis.CONTEXT: [parallel_state.get_context_parallel_group()],
        Axis.PIPELINE: [parallel_state.get_pipeline_model_parallel_group()],
        # With the distributed optimizer the gradient norm is summed over replicas too.
        Axis.MODEL: [
            parallel_state.get_model_parallel_group(),
            parallel_state.get_intra_distributed_optimizer_instance_group(check_initialized=False),
        ],
        # Where experts are whole on their rank, the group of the axis EXPERT_MODEL is that of EXPERT.
        Axis.EXPERT_MODEL: [parallel_state.get_expert_tensor_and_model_parallel_group()],
        Axis.EXPERT_TENSOR: [parallel_state.get_expert_tensor_parallel_group()],
        Axis.EXPERT: [
            parallel_state.get_expert_model_parallel_group(),
            *([parallel_state.get_expert_tensor_and_model_parallel_group()] if whole else []),
        ],
        Axis.EXPERT_DATA: [
            parallel_state.get_expert_data_parallel_group(),
            parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True),
        ],
        Axis.EMBEDDING: [
            parallel_state.get_embedding_group(check_initialized=False),
            parallel_state.get_position_embedding_group(check_initialized=False),
        ],
        Axis.DATA: [
            parallel_state.get_data_parallel_group(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        ],
    }
    return {
        group.group_name: axis
        for axis, listed in groups.items()
        for group in listed
        if group is not None and group.size() > 1
    }


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
        "apply_rope_fusion": request.fusion != "eager" and model.position_embedding == "rope",
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


def _block_spec(request: TraceRequest, config: Any, stage: int | None) -> Any:
    """Layers of one chunk and the norm behind the last; RMS norms are torch's, as in Megatron's own, or eager."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    normalization = "RMSNorm" if request.model.normalization == "rmsnorm" else None
    latent = request.model.mla is not None
    eager_norm = normalization is not None and request.fusion == "eager"

    def spec_of(kind: str) -> Any:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if kind == "moe" else None,
            moe_grouped_gemm=kind == "moe",
            moe_use_legacy_grouped_gemm=kind == "moe",
            qk_layernorm=request.model.qk_norm or latent,
            multi_latent_attention=latent,
            normalization=normalization,
        )
        parts = spec.submodules.self_attention.submodules
        if latent:
            parts.linear_q_down_proj = parts.linear_kv_down_proj = DuplicatedLinear
        if request.attention == "flash":
            parts.core_attention = FlashCoreAttention
        elif latent:
            parts.core_attention = unfused_core_attention()
        elif request.model.position_embedding == "alibi":
            parts.core_attention = unfused_alibi_attention()
        if kind == "moe" and has_own_experts(request.model):
            spec.submodules.mlp.submodules.experts = experts_spec()
        if eager_norm:
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = EagerRmsNorm
        return spec

    count = get_num_layers_to_build(config, vp_stage=stage)
    first = get_transformer_layer_offset(config, vp_stage=stage)
    experts = config.moe_layer_freq if request.model.moe is not None else [0] * config.num_layers
    return TransformerBlockSubmodules(
        layer_specs=[spec_of("moe" if experts[n] else "dense") for n in range(first, first + count)],
        layer_norm=EagerRmsNorm if eager_norm else WrappedTorchNorm if normalization else FusedLayerNorm,
    )


def _prediction_spec(request: TraceRequest, config: Any, block: Any, stage: int | None) -> Any:
    """Multi-token prediction of the chunk that holds the loss: layers as the last of the model; None elsewhere."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    if not request.model.multi_token_prediction_layers:
        return None
    spec = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=stage)
    for layer in spec.layer_specs if spec is not None else ():
        parts = layer.submodules
        parts.enorm = parts.hnorm = parts.layer_norm = block.layer_norm
    return spec


def build_chunks(
    request: TraceRequest, config: Any, degrees: Degrees, *, tied: bool, only: int | None = None
) -> list[Any]:
    """The GPTModels of this rank, one a virtual pipeline chunk, as Megatron builds them.

    Args:
        request: the model.
        config: of `config_of`.
        degrees: of the running cluster.
        tied: input and output embedding share one matrix.
        only: build this chunk alone.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    model, chunks = request.model, []
    GroupedGemm.accumulate = request.gradient_accumulation_fusion
    expert_ops.set_routing(routing_of(request))
    # ALiBi is in the core attention: fused kernels take slopes, unfused products a bias.
    positions = {"learned": "learned_absolute", "rope": "rope", "alibi": "none", "none": "none"}
    for number in range(degrees.virtual) if only is None else (only,):
        stage = number if degrees.virtual > 1 else None
        block = _block_spec(request, config, stage)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chunk = GPTModel(
                config,
                block,
                model.padded_vocab_size(degrees.tensor),
                model.max_sequence_length,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                parallel_output=True,
                share_embeddings_and_output_weights=tied,
                position_embedding_type=positions[model.position_embedding],
                mtp_block_spec=_prediction_spec(request, config, block, stage),
                vp_stage=stage,
            )
        if model.embedding_norm and chunk.pre_process:
            _add_embedding_norm(chunk.embedding, config)
        if request.lora_rank:
            adapt(chunk, rank=request.lora_rank, targets=request.lora_targets)
        elif request.keeps_gathered_inputs:
            keep_gathered_inputs(chunk)
        _take_half_precision(chunk, config)
        chunks.append(chunk.cuda())
    return chunks


def routing_of(request: TraceRequest) -> Routing | None:
    """Which experts tokens visit; None for a dense model."""
    moe = request.model.moe
    if moe is None:
        return None
    return Routing(
        num_experts=moe.num_experts,
        experts_per_token=moe.experts_per_token,
        num_groups=moe.num_groups,
        groups_per_token=moe.groups_per_token,
        load=request.expert_load,
    )


def _take_half_precision(chunk: Any, config: Any) -> None:
    """Let experts run in fp16: Megatron's GroupedMLP wants bf16, Transformer Engine's, whose place it takes, both."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    if config.num_moe_experts is None or not config.fp16:
        return
    for module in chunk.modules():
        if isinstance(module, GroupedMLP):
            module.config = copy.copy(config)
            module.config.bf16 = True


def _add_embedding_norm(embedding: Any, config: Any) -> None:
    """A norm behind the embedding, as in BLOOM (arXiv 2211.05100, section 3.2.2); megatron-core has none of its own."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    embedding.norm = FusedLayerNorm(config, config.hidden_size)
    embedding.register_forward_hook(lambda module, _, output: module.norm(output))


def wrap(chunks: list[Any], config: Any, schedule: Schedule) -> list[Any]:
    """The chunks inside Megatron's mixed-precision and data-parallel wrappers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=schedule.distributed_optimizer,
        overlap_grad_reduce=schedule.overlap_grad_reduce,
        overlap_param_gather=schedule.overlap_param_gather,
        grad_reduce_in_fp32=not schedule.narrow_gradients,
        bucket_size=schedule.bucket_elements,
    )
    wrapped = []
    for number, chunk in enumerate(chunks):
        inner = Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk
        # Megatron-LM: only the first model chunk of the first stage is cut into buckets (training.py, get_model).
        ddp = DistributedDataParallel(config, settings, inner, disable_bucketing=number > 0)
        for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
            # Of the second iteration on: the first one does not overlap, because it only counts.
            group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
            group.is_first_batch = False
        wrapped.append(ddp)
    return wrapped


def refuse_unsupported(request: TraceRequest) -> None:
    """Raise for what the tracer can't do yet.

    Raises:
        TraceError: names the field, what is not supported, and a way out.
    """
    if request.framework != "megatron":
        raise TraceError(f"framework: {request.framework} is not Megatron; use megatron")
    if reason := unsupported(request):
        raise TraceError(reason)
