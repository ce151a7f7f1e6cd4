"""Parameters of real traces against closed forms with the padded vocabulary."""

import pytest

from echo_explore.graph import Trace, weight_matrices
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, LLAMA, MOE, request

pytestmark = pytest.mark.torch


def whole(trace: Trace, piece: str, tensor: int) -> int:
    """Elements over the tensor-parallel group: shards add up, copies count once."""
    parameters = trace.pieces[piece].parameters
    return sum(p.num_elements * (tensor if p.tensor_sharded else 1) for p in parameters)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_gpt(service: TraceService, tensor: int) -> None:
    trace = service.trace(request(tensor_parallel=tensor, sequence_parallel=tensor > 1))
    h = GPT.hidden_size
    vocabulary = GPT.padded_vocab_size(tensor)
    assert whole(trace, "layer.dense", tensor) == 12 * h**2 + 13 * h
    assert whole(trace, "embedding", tensor) == (vocabulary + GPT.max_sequence_length) * h
    assert whole(trace, "head", tensor) == vocabulary * h + 2 * h


def test_llama(service: TraceService) -> None:
    trace = service.trace(request(LLAMA, tensor_parallel=2, sequence_parallel=True))
    h, f, kv = 1024, 2816, 4 * 64
    assert whole(trace, "layer.dense", 2) == h * (h + 2 * kv) + h * h + 3 * h * f + 2 * h
    assert whole(trace, "embedding", 2) == 32000 * h
    assert whole(trace, "head", 2) == 32000 * h + h


def test_query_and_key_norms_and_biases(service: TraceService) -> None:
    model = LLAMA.model_copy(update={"qk_norm": True, "qkv_bias": True})
    trace = service.trace(request(model))
    h, f, kv = 1024, 2816, 4 * 64
    expected = h * (h + 2 * kv) + (h + 2 * kv) + 2 * 64 + h * h + 3 * h * f + 2 * h
    assert whole(trace, "layer.dense", 1) == expected


def test_embedding_norm(service: TraceService) -> None:
    model = GPT.model_copy(update={"embedding_norm": True, "position_embedding": "alibi"})
    trace = service.trace(request(model))
    assert whole(trace, "embedding", 1) == GPT.padded_vocab_size(1) * GPT.hidden_size + 2 * GPT.hidden_size


def test_names_and_flags(service: TraceService) -> None:
    trace = service.trace(request(tensor_parallel=2, sequence_parallel=True))
    parameters = {p.name: p for p in trace.pieces["layer.dense"].parameters}
    assert list(parameters)[:2] == ["input_layernorm.weight", "input_layernorm.bias"]
    assert parameters["self_attention.linear_qkv.weight"].tensor_sharded
    assert not parameters["self_attention.linear_proj.bias"].tensor_sharded
    assert parameters["self_attention.linear_proj.bias"].sequence_parallel
    assert parameters["pre_mlp_layernorm.weight"].sequence_parallel
    assert not any(p.expert for p in parameters.values())


def test_shapes_of_matrices(service: TraceService) -> None:
    """What Muon updates, and how it is split: the word embedding is a matrix that it leaves alone."""
    trace = service.trace(request(LLAMA, tensor_parallel=2, sequence_parallel=True))
    found = {p.name: (p.shape, p.partition_dim) for p in weight_matrices(trace.pieces["layer.dense"].parameters)}
    assert found == {
        "self_attention.linear_proj.weight": ((1024, 512), 1),
        "self_attention.linear_qkv.weight": ((512 + 2 * 128, 1024), 0),
        "mlp.linear_fc1.weight": ((2816, 1024), 0),
        "mlp.linear_fc2.weight": ((1024, 1408), 1),
    }
    (table,) = (p for p in trace.pieces["embedding"].parameters if p.name.endswith("word_embeddings.weight"))
    assert (table.embedding, table.shape) == (True, (16000, 1024))
    assert weight_matrices(trace.pieces["embedding"].parameters + trace.pieces["head"].parameters) == ()


def test_each_expert_has_a_matrix(service: TraceService) -> None:
    trace = service.trace(request(MOE, expert_parallel=2))
    found = {p.name: p for p in weight_matrices(trace.pieces["layer.moe"].parameters)}
    assert MOE.moe is not None
    h, f, held = MOE.hidden_size, MOE.moe.ffn_hidden_size, MOE.moe.num_experts // 2
    first, second = found["mlp.experts.weight1"], found["mlp.experts.weight2"]
    assert (first.shape, first.num_matrices, first.partition_dim) == ((h, 2 * f), held, 1)
    assert (second.shape, second.num_matrices, second.partition_dim) == ((f, h), held, 0)
    assert found["mlp.router.weight"].partition_dim == -1
