"""A closed-form lower bound of peak memory: what weights alone need, from dimensions and layout, without a trace."""

from dataclasses import replace

from echo_explore.memory.static_state import StateBytes, state_bytes
from echo_explore.specs import Candidate, ModelSpec
from echo_explore.specs.model import feed_forward_kind


def memory_lower_bound(candidate: Candidate) -> float:
    """Bytes that the fullest stage needs at least: parameters, gradients and optimizer states of weight matrices.

    Never above `memory_profile(...).peak_bytes`: biases, norms, gates of experts, latent projections of multi-latent
    attention, quantised copies, activations and framework memory count as nothing.
    """
    model, layout, each = candidate.model, candidate.layout, state_bytes(candidate)
    if candidate.recipe.lora_rank:  # weights are frozen
        each = replace(each, gradient_bytes=0.0, optimizer_bytes=0.0)
    matrices = replace(each, optimizer_bytes=each.optimizer_bytes if (m := each.matrix_optimizer_bytes) is None else m)
    kinds = model.layer_kinds
    layer_bytes = {kind: _layer_bytes(candidate, kind, matrices) for kind in set(kinds)}
    stages = [0.0] * layout.pipeline_parallel
    padded = candidate.stack.framework == "megatron"  # others do not pad the vocabulary
    table = embedding_weights(model, layout.tensor_parallel, padded=padded) * _each(each, each.dense_shards)
    schedule = candidate.schedule
    stage_of, _ = schedule.stage_and_chunk()
    chunks = schedule.num_model_chunks
    for copy in range(schedule.num_copies):
        first = 0
        for chunk, num_layers in enumerate(candidate.chunk_layers, start=copy * chunks):
            stage = int(stage_of[chunk])
            for kind in kinds[first : first + num_layers]:
                stages[stage] += layer_bytes[kind]
            first += num_layers
    with_embedding, with_head = stage_of[::chunks].tolist(), stage_of[chunks - 1 :: chunks].tolist()
    for stage in range(len(stages)):
        tables = with_embedding.count(stage) + with_head.count(stage)
        stages[stage] += table * (min(tables, 1) if model.tied_embeddings else tables)
    return max(stages)


def embedding_weights(model: ModelSpec, tensor_parallel: int, *, padded: bool = True) -> int:
    """Elements of one embedding matrix on a rank."""
    rows = model.padded_vocab_size(tensor_parallel) if padded else model.vocab_size
    return rows * model.hidden_size // tensor_parallel


def attention_weights(model: ModelSpec, tensor_parallel: int) -> int:
    """Elements of the projections of one attention on a rank; 0 of the latent ones.

    h (a d + 2 g d) + a d h over tp, for hidden h, a heads, g key-value heads of width d.
    """
    if model.mla is not None:
        out = model.num_attention_heads * model.mla.v_head_dim * model.hidden_size
        return out // tensor_parallel
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    return 2 * model.hidden_size * model.head_dim * (heads + groups) // tensor_parallel


def feed_forward_weights(model: ModelSpec, ffn_hidden_size: int) -> int:
    """Elements of one feed-forward over all ranks: 3 h f with a gate (SwiGLU), else 2 h f."""
    return (3 if model.gated else 2) * model.hidden_size * ffn_hidden_size


def _each(each: StateBytes, shards: int) -> float:
    return (
        min(each.parameter_bytes, each.weight_bytes) + each.gradient_bytes
    ) / each.whole_shards + each.optimizer_bytes / shards


def _layer_bytes(candidate: Candidate, kind: str, each: StateBytes) -> float:
    model, layout = candidate.model, candidate.layout
    tensor = layout.tensor_parallel
    dense = attention_weights(model, tensor)
    if feed_forward_kind(kind) == "dense" or model.moe is None:
        return (dense + feed_forward_weights(model, model.ffn_hidden_size) // tensor) * _each(each, each.dense_shards)
    dense += feed_forward_weights(model, model.moe.shared_ffn_hidden_size) // tensor
    experts = model.moe.num_experts // layout.expert_parallel * feed_forward_weights(model, model.moe.ffn_hidden_size)
    split = layout.expert_tensor_ranks if candidate.stack.framework == "megatron" else tensor
    return dense * _each(each, each.dense_shards) + experts // split * _each(each, each.expert_shards)
