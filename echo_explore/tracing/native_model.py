"""Decoder-only transformers in plain PyTorch, as written for FSDP2 and DDP: torch modules and functionals only.

Compiled functions are one kernel each where the request asks for fusion, as Inductor fuses pointwise chains and their
reductions between two matrix products; else every operator is a kernel. Attention is one flash kernel, or matrix
products and a softmax. Names of modules follow Megatron's, so that pieces are cut and found by the same names.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from echo_explore.specs import ModelSpec
from echo_explore.specs.recompute import recompute_of_layers
from echo_explore.tracing.fused_ops import FlashAttention
from echo_explore.tracing.native_fusion import compiled, compiled_linear, one_kernel
from echo_explore.tracing.native_parallel import gather, parallel_cross_entropy, scatter
from echo_explore.tracing.request import TraceRequest

Tensor = torch.Tensor


@compiled
def _rms_norm(tensor: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As torchtitan 0.1 (2024) models/norms.py: in fp32, then back, then scaled."""
    wide = tensor.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).type_as(tensor) * weight


@compiled
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


@compiled
def _gelu(tensor: Tensor) -> Tensor:
    return functional.gelu(tensor)


@compiled_linear
def _rotate(tensor: Tensor, angles: Tensor) -> Tensor:
    """As torchtitan 0.1 (2024) models/llama/model.py, apply_rotary_emb: complex numbers in fp32."""
    pairs = torch.view_as_complex(tensor.float().reshape(*tensor.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(tensor)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of logits [tokens, vocabulary], computed in fp32."""
    return functional.cross_entropy(logits.float(), labels)


_compiled_cross_entropy, _fused_cross_entropy = compiled(cross_entropy), one_kernel(cross_entropy)


class RmsNorm(nn.Module):
    """Root-mean-square norm of the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, tensor: Tensor) -> Tensor:
        """The normed tensor."""
        out: Tensor = _rms_norm(tensor, self.weight, 1e-5)
        return out


def _norm(model: ModelSpec, size: int) -> nn.Module:
    return RmsNorm(size) if model.normalization == "rmsnorm" else nn.LayerNorm(size, bias=model.linear_bias)


class Attention(nn.Module):
    """Self-attention with the heads of this rank; one projection for all three where widths are equal, else three."""

    def __init__(self, request: TraceRequest) -> None:
        super().__init__()
        model, tensor = request.model, request.tensor_parallel
        self.head_dim, self.flash = model.head_dim, request.attention == "flash"
        self.num_ranks, self.rate = tensor, DROPOUT if request.dropout else 0.0
        heads, groups = model.num_attention_heads // tensor, model.num_key_value_heads // tensor
        # GPT-2 and MPT project once (transformers 5.24 and llm-foundry 0.4); Llama's code projects three times.
        self.widths = [heads * model.head_dim, groups * model.head_dim, groups * model.head_dim]
        bias = model.linear_bias or model.qkv_bias
        split = [sum(self.widths)] if model.normalization == "layernorm" else self.widths
        self.linear_qkv = nn.ModuleList(nn.Linear(model.hidden_size, width, bias=bias) for width in split)
        self.linear_proj = nn.Linear(heads * model.head_dim, model.hidden_size, bias=model.linear_bias)
        self.q_norm = _norm(model, model.head_dim) if model.qk_norm else None
        self.k_norm = _norm(model, model.head_dim) if model.qk_norm else None

    def forward(self, tensor: Tensor, angles: Tensor | None) -> Tensor:
        """[sequence, batch, hidden] to the same, before the sum over tensor-parallel ranks."""
        parts = [linear(tensor) for linear in self.linear_qkv]
        if len(parts) == 1:
            parts = list(parts[0].split(self.widths, dim=-1))
        query, key, value = (p.unflatten(-1, (-1, self.head_dim)) for p in parts)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = _rotate(query, angles), _rotate(key, angles)
        if self.flash:
            apply: Any = FlashAttention.apply
            out: Tensor = apply(query, key, value, self.rate, True, 1.0 / math.sqrt(self.head_dim))
        else:
            out = self._unfused(query, key, value)
        out = self.linear_proj(out.flatten(2))
        return out

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeat = query.shape[2] // key.shape[2]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=2), value.repeat_interleave(repeat, dim=2)
        sequence, batch, heads, width = query.shape
        q, k, v = (t.reshape(sequence, batch * heads, width).transpose(0, 1) for t in (query, key, value))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(width)
        mask = torch.ones(sequence, sequence, dtype=torch.bool, device="cuda").triu(1)
        weights = functional.softmax(scores.masked_fill(mask, -math.inf), dim=-1)
        if self.rate:
            weights = functional.dropout(weights, self.rate)
        return torch.bmm(weights, v).transpose(0, 1).reshape(sequence, batch, heads, width)


class FeedForward(nn.Module):
    """Two products with an activation between, or three with a gate; the inner width of this rank."""

    def __init__(self, request: TraceRequest) -> None:
        super().__init__()
        model = request.model
        inner = model.ffn_hidden_size // request.tensor_parallel
        self.activation = model.activation
        count = 2 if model.activation == "swiglu" else 1
        self.linear_fc1 = nn.ModuleList(
            nn.Linear(model.hidden_size, inner, bias=model.linear_bias) for _ in range(count)
        )
        self.linear_fc2 = nn.Linear(inner, model.hidden_size, bias=model.linear_bias)

    def forward(self, tensor: Tensor) -> Tensor:
        """[sequence, batch, hidden] to the same, before the sum over tensor-parallel ranks."""
        parts = [linear(tensor) for linear in self.linear_fc1]
        if self.activation == "swiglu":
            inner = _swiglu(*parts)
        elif self.activation == "gelu":
            inner = _gelu(*parts)
        else:
            inner = functional.relu(parts[0])
            inner = inner * inner if self.activation == "squared-relu" else inner
        out: Tensor = self.linear_fc2(inner)
        return out


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, request: TraceRequest) -> None:
        super().__init__()
        hidden, self.num_ranks = request.model.hidden_size, request.tensor_parallel
        self.rate = DROPOUT if request.dropout else 0.0
        self.input_layernorm = _norm(request.model, hidden)
        self.self_attention = Attention(request)
        self.pre_mlp_layernorm = _norm(request.model, hidden)
        self.mlp = FeedForward(request)

    def forward(self, tensor: Tensor, angles: Tensor | None) -> Tensor:
        """The next hidden states."""
        normed = gather(self.input_layernorm(tensor), self.num_ranks)
        tensor = tensor + self._dropped(scatter(self.self_attention(normed, angles), self.num_ranks))
        normed = gather(self.pre_mlp_layernorm(tensor), self.num_ranks)
        return tensor + self._dropped(scatter(self.mlp(normed), self.num_ranks))

    def _dropped(self, tensor: Tensor) -> Tensor:
        return functional.dropout(tensor, self.rate) if self.rate else tensor


class CheckpointedLayer(nn.Module):
    """A layer under torch.utils.checkpoint; `policy` says which results are kept, None keeps the input only."""

    def __init__(self, block: Layer, policy: Any) -> None:
        super().__init__()
        self.block = block
        self._policy = policy

    def forward(self, tensor: Tensor, angles: Tensor | None) -> Tensor:
        """As the layer."""
        options = {"context_fn": self._policy} if self._policy is not None else {}
        out: Tensor = checkpoint(self.block, tensor, angles, use_reentrant=False, preserve_rng_state=False, **options)
        return out


class Embedding(nn.Module):
    """Word embedding (rows of this rank), learned positions and embedding norm."""

    def __init__(self, request: TraceRequest) -> None:
        super().__init__()
        model = request.model
        self.num_ranks = request.tensor_parallel
        rows = model.vocab_size // self.num_ranks
        self.word_embeddings = nn.Embedding(rows, model.hidden_size)
        learned = model.position_embedding == "learned"
        self.position_embeddings = nn.Embedding(model.max_sequence_length, model.hidden_size) if learned else None
        self.norm = _norm(model, model.hidden_size) if model.embedding_norm else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [sequence / ranks, batch, hidden] of token ids [sequence, batch]."""
        out: Tensor
        if self.num_ranks == 1:
            out = self.word_embeddings(tokens)
        else:
            elsewhere = tokens >= self.word_embeddings.num_embeddings
            out = self.word_embeddings(tokens.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
            out = scatter(out, self.num_ranks)
        if self.position_embeddings is not None:
            positions = torch.arange(out.shape[0], device="cuda").unsqueeze(-1)
            out = out + self.position_embeddings(positions)
        return self.norm(out) if self.norm is not None else out


class Decoder(nn.Module):
    """The layers and the norm behind the last."""

    def __init__(self, request: TraceRequest, num_layers: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for recompute in recompute_of_layers(request.recompute, num_layers):
            layer = Layer(request)
            keeps = keep_every_second_product if recompute == "selective" else None
            layers.append(layer if recompute == "none" else CheckpointedLayer(layer, keeps))
        self.layers = nn.ModuleList(layers)
        self.final_layernorm = _norm(request.model, request.model.hidden_size)


class Transformer(nn.Module):
    """Token ids to the mean loss."""

    def __init__(self, request: TraceRequest, num_layers: int) -> None:
        super().__init__()
        model = request.model
        self.num_ranks, self.head_dim = request.tensor_parallel, model.head_dim
        self.rotary = model.position_embedding == "rope"
        self.loss = _fused_cross_entropy if request.fused_loss else _compiled_cross_entropy
        self.embedding = Embedding(request)
        self.decoder = Decoder(request, num_layers)
        # An output layer of its own even where the matrix is tied: as a piece the head is what it computes.
        self.output_layer = nn.Linear(model.hidden_size, model.vocab_size // self.num_ranks, bias=False)

    def forward(self, tokens: Tensor, angles: Tensor | None) -> Tensor:
        """The loss of tokens [sequence, batch] against themselves."""
        hidden = self.embedding(tokens)
        for layer in self.decoder.layers:
            hidden = layer(hidden, angles)
        logits = self.output_layer(gather(self.decoder.final_layernorm(hidden), self.num_ranks)).flatten(0, 1)
        labels = tokens.flatten()
        if self.num_ranks > 1:
            return parallel_cross_entropy(logits.float(), labels)
        return self.loss(logits, labels)


def rotary_angles(request: TraceRequest) -> Tensor | None:
    """The table of rotary embedding as complex numbers [sequence, 1, 1, head_dim / 2]."""
    if request.model.position_embedding != "rope":
        return None
    return torch.empty(request.sequence_length, 1, 1, request.model.head_dim // 2, dtype=torch.complex64, device="cuda")


DROPOUT = 0.1  # GPT-2's resid_pdrop (transformers 5.24); any value above 0 gives the same kernels


def keep_every_second_product() -> Any:
    """Contexts of torch's selective checkpointing with torchtitan 0.1's list: attention, and every second product.

    [torchtitan 0.1, parallelisms/parallelize_llama.py, apply_ac, `selective` with option `op`, 2024-08.]
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    counts = {False: 0, True: 0}

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = function._opname if hasattr(function, "_opname") else ""
        if name == "mm":
            counts[context.is_recompute] += 1
        keeps = name in ("flash_attention", "_reduce_scatter_base_") or (
            name == "mm" and counts[context.is_recompute] % 2
        )
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
