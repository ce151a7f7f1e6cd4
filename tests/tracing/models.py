"""Small models and requests for the tests."""

from typing import Any

from echo_explore.specs import ModelSpec
from echo_explore.specs.model import MoeSpec
from echo_explore.tracing import TraceRequest

GPT = ModelSpec(
    name="small-gpt",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    vocab_size=50257,
    max_sequence_length=512,
)
LLAMA = ModelSpec(
    name="small-llama",
    architecture="llama",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=32000,
    max_sequence_length=4096,
    normalization="rmsnorm",
    activation="swiglu",
    position_embedding="rope",
    tied_embeddings=False,
    linear_bias=False,
)

MOE = LLAMA.model_copy(
    update={
        "name": "small-moe",
        "moe": MoeSpec(
            num_experts=8, experts_per_token=2, ffn_hidden_size=512, shared_ffn_hidden_size=256, first_dense_layers=1
        ),
    }
)

OSS = LLAMA.model_copy(
    update={
        "name": "small-oss",
        "linear_bias": True,
        "activation": "quick-geglu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "moe": MoeSpec(num_experts=8, experts_per_token=2, ffn_hidden_size=512, balancing_loss="none"),
    }
)
"""GPT-OSS in small: biases everywhere, a clamped gate."""


def request(model: ModelSpec = GPT, **changes: Any) -> TraceRequest:
    """A request in bf16 with flash attention, without dropout and recomputation, changed."""
    fields: dict[str, Any] = {
        "model": model,
        "tensor_parallel": 1,
        "sequence_parallel": False,
        "micro_batch_size": 2,
        "sequence_length": 512,
        "precision": "bf16",
        "attention": "flash",
        "recompute": "none",
        "fusion": "fused",
        "gradient_accumulation_fusion": True,
        "dropout": False,
    }
    return TraceRequest(**fields | changes)
