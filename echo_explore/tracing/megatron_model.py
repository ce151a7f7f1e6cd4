"""Builds the real Megatron-core model of one rank, and wraps it as a training job does."""

import copy
import warnings
from typing import Any

from echo_explore.core import TraceError
from echo_explore.specs.expert_legality import routing_of
from echo_explore.tracing import expert_ops
from echo_explore.tracing.core_attention import FlashCoreAttention, TransformerEngineAttention, unfused_alibi_attention
from echo_explore.tracing.eager_norm import EagerRmsNorm
from echo_explore.tracing.expert_ops import GroupedGemm
from echo_explore.tracing.gathered_inputs import keep_gathered_inputs
from echo_explore.tracing.grouped_experts import experts_spec
from echo_explore.tracing.latent_attention import DuplicatedLinear, unfused_core_attention
from echo_explore.tracing.lora import adapt
from echo_explore.tracing.megatron_activation import has_own_experts
from echo_explore.tracing.megatron_cluster import Degrees
from echo_explore.tracing.megatron_config import Schedule
from echo_explore.tracing.plain_parallel import (
    gate_apart_spec,
    gather_loss,
    sum_input_gradients_last,
    wait_for_lengths,
)
from echo_explore.tracing.request import TraceRequest, unsupported


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
            parts.core_attention = TransformerEngineAttention if request.lays_out_attention else FlashCoreAttention
        elif latent:
            parts.core_attention = unfused_core_attention()
        elif request.model.position_embedding == "alibi":
            parts.core_attention = unfused_alibi_attention()
        if kind == "moe" and has_own_experts(request.model):
            spec.submodules.mlp.submodules.experts = experts_spec()
        if request.gate_apart and kind == "dense":
            gate_apart_spec(spec)
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
    expert_ops.set_routing(None if model.moe is None else routing_of(model.moe, request.expert_load))
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
            adapt(chunk, rank=request.lora_rank, targets=request.lora_targets, dropout=request.lora_dropout)
        elif request.keeps_gathered_inputs:
            keep_gathered_inputs(chunk)
        if request.blocking_input_gradients:
            sum_input_gradients_last(chunk)
        if request.reads_sequence_lengths:
            wait_for_lengths(chunk)
        if request.gathered_loss and chunk.post_process:
            gather_loss(chunk)
        _take_half_precision(chunk, config)
        if request.pads_experts:
            _pad_experts(chunk)
        if request.lays_out_attention:
            _copy_normed_keys(chunk)
        chunks.append(chunk.cuda())
    return chunks


def _take_half_precision(chunk: Any, config: Any) -> None:
    """Let experts run in fp16: Megatron's GroupedMLP wants bf16, Transformer Engine's, whose place it takes, both."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    if config.num_moe_experts is None or not config.fp16:
        return
    for module in chunk.modules():
        if isinstance(module, GroupedMLP):
            module.config = copy.copy(config)
            module.config.bf16 = True


def _pad_experts(chunk: Any) -> None:
    """Let experts fill up their rows for products in 8 and 4 bits, as Transformer Engine's do."""
    from megatron.core.transformer.moe.experts import GroupedMLP, TEGroupedMLP

    for module in chunk.modules():
        if isinstance(module, (GroupedMLP, TEGroupedMLP)):
            expert_ops.with_padding(module)


def _copy_normed_keys(chunk: Any) -> None:
    """Let norms of keys copy what they read: a cut of the array that holds queries, keys and values.

    Transformer Engine's norms make their input contiguous and keep that copy (2.8 (2025), pytorch/ops/basic/rmsnorm.py,
    layer_norm.py), so that the joint array is free; queries were copied by Megatron.
    """
    from megatron.core.transformer.identity_op import IdentityOp

    for path, module in chunk.named_modules():
        if path.rpartition(".")[2] == "k_layernorm" and not isinstance(module, IdentityOp):
            module.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]))


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
