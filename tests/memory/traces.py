"""Traces built by hand: pieces without ops, with parameters and activation bytes from closed forms."""

from typing import Any

from echo_explore.graph import Parameter, Piece, Trace, build_graph
from echo_explore.memory.bound import attention_weights, embedding_weights, feed_forward_weights
from echo_explore.specs import (
    Candidate,
    ModelSpec,
    ParallelConfig,
    TrainingRecipe,
    load_cluster,
    load_stack,
    make_candidate,
)

EMPTY = build_graph([])
MODEL = ModelSpec(
    name="toy", num_layers=16, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, vocab_size=32000,
    max_sequence_length=2048,
)  # fmt: skip


def parameter(name: str, num_elements: int, *, expert: bool = False) -> Parameter:
    return Parameter(name=name, num_elements=num_elements, tensor_sharded=True, expert=expert)


def piece(*parameters: Parameter, saved: float, forward: float | None = None, backward: float | None = None) -> Piece:
    return Piece(
        forward=EMPTY,
        backward=EMPTY,
        parameters=parameters,
        saved_bytes=saved,
        forward_peak_bytes=saved if forward is None else forward,
        backward_peak_bytes=0.0 if backward is None else backward,
    )


def layer_activation_bytes(candidate: Candidate) -> float:
    """s b h (34 + 5 a s / h) / t with sequence parallelism, 34 instead of the sum with selective recomputation.

    Korthikanti et al., arXiv 2205.05198 (2022), equations 4 and 6; the input alone with full recomputation.
    """
    model, recipe, layout = candidate.model, candidate.recipe, candidate.layout
    tokens = recipe.sequence_length // layout.context_parallel * recipe.micro_batch_size * model.hidden_size
    scores = 5 * model.num_attention_heads * recipe.sequence_length / model.hidden_size
    each = {"none": 34 + scores, "selective": 34.0, "full": 2.0}[recipe.recompute]
    sharded = layout.sequence_parallel or recipe.recompute != "full"
    return tokens * each / (layout.tensor_parallel if sharded else 1)


def trace_of(candidate: Candidate) -> Trace:
    """Pieces of a candidate whose weights are those of `memory_lower_bound` plus norms and biases."""
    model, layout, recipe = candidate.model, candidate.layout, candidate.recipe
    tensor, hidden = layout.tensor_parallel, model.hidden_size
    saved = layer_activation_bytes(candidate)
    boundary = 2.0 * recipe.sequence_length * recipe.micro_batch_size * hidden / layout.context_parallel
    boundary /= tensor if layout.sequence_parallel else 1
    table = embedding_weights(model, tensor)
    common = (
        parameter("self_attention.weight", attention_weights(model, tensor)),
        Parameter(name="norms", num_elements=4 * hidden, tensor_sharded=False),
    )
    dense = parameter("mlp.weight", -(-feed_forward_weights(model, model.ffn_hidden_size) // tensor))
    pieces = {
        "embedding": piece(parameter("embedding.word_embeddings.weight", table), saved=boundary),
        "layer.dense": piece(*common, dense, saved=saved, forward=1.2 * saved, backward=0.3 * saved),
        "head": piece(
            parameter("output_layer.weight", table), saved=2 * boundary, forward=3 * boundary, backward=boundary
        ),
    }
    if model.moe is not None:
        held = model.moe.num_experts // layout.expert_parallel
        experts = parameter(
            "experts.weight", held * feed_forward_weights(model, model.moe.ffn_hidden_size) // tensor, expert=True
        )
        pieces["layer.moe"] = piece(*common, experts, saved=saved, forward=saved, backward=0.5 * saved)
    return Trace(
        key="0" * 32,
        request={},
        pieces=pieces,
        layer_kinds=model.layer_kinds,
        boundary_bytes=boundary,
        facts={},
    )


def candidate_of(
    layout: ParallelConfig,
    *,
    model: ModelSpec = MODEL,
    cluster: str = "h100-ndr",
    num_micro_batches: int = 8,
    micro_batch_size: int = 1,
    **recipe: Any,
) -> Candidate:
    replicas = layout.data_parallel or 1
    values = {"sequence_length": 2048, "micro_batch_size": micro_batch_size} | recipe
    return make_candidate(
        model=model,
        cluster=load_cluster(cluster),
        layout=layout,
        recipe=TrainingRecipe.model_validate(
            values | {"global_batch_size": num_micro_batches * micro_batch_size * replicas}
        ),
        stack=load_stack("megatron-core"),
    )
