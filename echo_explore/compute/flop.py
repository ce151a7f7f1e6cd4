"""Closed forms of the floating-point operations (FLOP) of a training step.

The convention, stated once for the whole package (a multiply-add is 2 FLOP):

* `model_flop` counts what the mathematics needs, as Megatron-LM does (`num_floating_point_operations`): matrix products
  of attention, feed-forward and logits, forward once and backward twice; attention over the full square of the sequence
  (not causal); the padded vocabulary; no recomputation, norms, activations, router or optimizer.
  MFU is this over time x peak.
* `causal_model_flop` is the same with attention products halved, since a causal mask leaves half of the square.
* `executed_flop` counts what the kernels do: recomputation added, attention halved only where a causal flash kernel
  skips the masked half. HFU is this over time x peak. The recomputation inside a flash backward kernel is not counted.

For a GPT layer with b sequences of s tokens and width h the forward is 24 s b h^2 (1 + s/(6h)).

References:
    Narayanan et al. 2021, arXiv 2104.04473, equation 3 and appendix.
    Korthikanti et al. 2022, arXiv 2205.05198, appendix A.
    Megatron-LM core 0.16, megatron/training/training.py, `num_floating_point_operations`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from echo_explore.specs import Candidate, ModelSpec
from echo_explore.specs.model import WINDOWED, feed_forward_kind
from echo_explore.specs.recompute import modules_of, recompute_of_layers

LayerKind = Literal["dense", "moe"]
BACKWARD_OVER_FORWARD = 2.0
"""A matrix product C = AB has two of the same size in its backward: dA = dC B^T and dB = A^T dC."""


def masked_fraction(model: ModelSpec, kind: str, *, sequence_length: int) -> float:
    """Share of the square of the sequence that the mask of a layer leaves: 1/2; with a window W < s, W/s - (W/s)^2 / 2.

    Args:
        model: gives W.
        kind: of the layer, see `ModelSpec.layer_kinds`.
        sequence_length: s.
    """
    share = model.attention_window / sequence_length
    return share - share**2 / 2.0 if kind.endswith(WINDOWED) and share < 1.0 else 0.5


def attention_core_flop(
    model: ModelSpec, *, sequence_length: int, num_tokens: int, attended_fraction: float = 1.0
) -> float:
    """FLOP of Q K^T and P V of one layer forward: 2 T s H (d_qk + d_v) f.

    Args:
        model: gives H = num_attention_heads and the head widths d_qk and d_v.
        sequence_length: s, keys that each query sees without a mask.
        num_tokens: T, tokens that pass through the layer.
        attended_fraction: f, the share of the square that is computed: 1 or, for a causal kernel, 1/2.
    """
    if model.mla is not None:
        widths = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim
    else:
        widths = 2 * model.head_dim
    return 2.0 * num_tokens * sequence_length * model.num_attention_heads * widths * attended_fraction


def attention_projection_flop(model: ModelSpec, *, num_tokens: int) -> float:
    """FLOP of the query, key, value and output projections of one layer forward; 2 T per weight."""
    h, heads = model.hidden_size, model.num_attention_heads
    if model.mla is None:
        weights = h * model.head_dim * (2 * heads + 2 * model.num_key_value_heads)
        return 2.0 * num_tokens * weights
    mla = model.mla
    query_width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    weights = mla.q_lora_rank * (h + query_width) if mla.q_lora_rank else h * query_width
    weights += h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    weights += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    weights += heads * mla.v_head_dim * h
    return 2.0 * num_tokens * weights


def feed_forward_flop(model: ModelSpec, *, kind: LayerKind, num_tokens: int) -> float:
    """FLOP of the feed-forward part of one layer forward; a mixture counts the experts that a token visits."""
    width = float(model.ffn_hidden_size)
    if kind == "moe":
        if model.moe is None:
            raise ValueError("a layer of kind moe in a model without experts")
        width = model.moe.experts_per_token * model.moe.ffn_hidden_size + model.moe.shared_ffn_hidden_size
    matrices = 3 if model.gated else 2
    return 2.0 * num_tokens * matrices * model.hidden_size * width


def layer_forward_flop(
    model: ModelSpec, *, kind: LayerKind, sequence_length: int, num_tokens: int, attended_fraction: float = 1.0
) -> float:
    """FLOP of one transformer layer forward over `num_tokens` tokens in sequences of `sequence_length`."""
    core = attention_core_flop(
        model, sequence_length=sequence_length, num_tokens=num_tokens, attended_fraction=attended_fraction
    )
    return (
        core
        + attention_projection_flop(model, num_tokens=num_tokens)
        + feed_forward_flop(model, kind=kind, num_tokens=num_tokens)
    )


def recomputed_flop(
    model: ModelSpec,
    *,
    kind: LayerKind,
    recompute: str,
    sequence_length: int,
    num_tokens: int,
    attended_fraction: float = 1.0,
) -> float:
    """FLOP of what one layer runs again in its backward; norms and activations count 0, as everywhere here.

    Args:
        model: the dimensions.
        kind: of the layer.
        recompute: in the normal form of `specs.recompute`.
        sequence_length: tokens of a sequence.
        num_tokens: that pass through the layer.
        attended_fraction: share of the attention square that is computed.
    """
    core = attention_core_flop(
        model, sequence_length=sequence_length, num_tokens=num_tokens, attended_fraction=attended_fraction
    )
    if recompute == "full":
        projections = attention_projection_flop(model, num_tokens=num_tokens)
        return core + projections + feed_forward_flop(model, kind=kind, num_tokens=num_tokens)
    modules, total = modules_of(recompute), 0.0
    if "core_attn" in modules:
        total += core
    if "mla_up_proj" in modules and model.mla is not None:
        mla, heads = model.mla, model.num_attention_heads
        queries = (mla.q_lora_rank or model.hidden_size) * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        keys = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
        total += 2.0 * num_tokens * heads * (queries + keys)
    if ("mlp" if kind == "dense" else "moe") in modules:
        total += feed_forward_flop(model, kind=kind, num_tokens=num_tokens)
    if "shared_experts" in modules and kind == "moe" and model.moe is not None:
        matrices = 3 if model.gated else 2
        total += 2.0 * num_tokens * matrices * model.hidden_size * model.moe.shared_ffn_hidden_size
    return total


def logits_forward_flop(model: ModelSpec, *, num_tokens: int, padded_vocab_size: int) -> float:
    """FLOP of the output projection forward: 2 T h V, once more for each extra prediction layer."""
    return 2.0 * num_tokens * model.hidden_size * padded_vocab_size * (1 + model.multi_token_prediction_layers)


def _layers_forward_flop(model: ModelSpec, *, sequence_length: int, num_tokens: int, masked: bool) -> float:
    """All layers forward; an extra prediction layer is one more of the last kind and a 2h x h projection."""
    total = sum(
        count
        * layer_forward_flop(
            model,
            kind=feed_forward_kind(kind),
            sequence_length=sequence_length,
            num_tokens=num_tokens,
            attended_fraction=masked_fraction(model, kind, sequence_length=sequence_length) if masked else 1.0,
        )
        for kind, count in _kinds(model).items()
    )
    return total + model.multi_token_prediction_layers * 4.0 * num_tokens * model.hidden_size**2


def _cores_forward_flop(model: ModelSpec, *, sequence_length: int, num_tokens: int, masked: bool) -> float:
    """Attention cores of all layers forward, which hold no weights."""
    return sum(
        count
        * attention_core_flop(
            model,
            sequence_length=sequence_length,
            num_tokens=num_tokens,
            attended_fraction=masked_fraction(model, kind, sequence_length=sequence_length) if masked else 1.0,
        )
        for kind, count in _kinds(model).items()
    )


def _kinds(model: ModelSpec) -> Counter[str]:
    """How many layers there are of each kind, prediction layers included."""
    kinds = Counter(model.layer_kinds)
    kinds[model.layer_kinds[-1]] += model.multi_token_prediction_layers
    return kinds


def model_flop(
    model: ModelSpec,
    *,
    sequence_length: int,
    num_sequences: int,
    padded_vocab_size: int | None = None,
    masked: bool = False,
) -> float:
    """FLOP of one training step over `num_sequences` sequences, for `mfu` (not causal).

    Args:
        model: the dimensions.
        sequence_length: tokens of a sequence.
        num_sequences: sequences of the step (the global batch).
        padded_vocab_size: rows of the output projection; default the padding at tensor_parallel = 1.
        masked: only the part of the attention square that the mask leaves counts.
    """
    num_tokens = num_sequences * sequence_length
    vocab = model.padded_vocab_size(1) if padded_vocab_size is None else padded_vocab_size
    forward = _layers_forward_flop(
        model, sequence_length=sequence_length, num_tokens=num_tokens, masked=masked
    ) + logits_forward_flop(model, num_tokens=num_tokens, padded_vocab_size=vocab)
    return forward * (1 + BACKWARD_OVER_FORWARD)


def causal_model_flop(
    model: ModelSpec, *, sequence_length: int, num_sequences: int, padded_vocab_size: int | None = None
) -> float:
    """FLOP of one training step with attention halved, or cut to its window, for `mfu_causal`."""
    return model_flop(
        model,
        sequence_length=sequence_length,
        num_sequences=num_sequences,
        padded_vocab_size=padded_vocab_size,
        masked=True,
    )


def executed_flop(
    model: ModelSpec,
    *,
    sequence_length: int,
    num_sequences: int,
    recompute: str,
    attention: Literal["flash", "unfused"],
    padded_vocab_size: int | None = None,
    chunk_layers: Sequence[int] = (),
) -> float:
    """FLOP that the hardware executes in one training step, for `hfu`.

    Args:
        model: the dimensions.
        sequence_length: tokens of a sequence.
        num_sequences: sequences of the step.
        recompute: in the normal form of `specs.recompute`; `full` runs every layer forward once more, `full:block:N`
            N of each chunk.
        attention: a causal `flash` kernel executes half of the square, `unfused` products all of it.
        padded_vocab_size: rows of the output projection; default the padding at tensor_parallel = 1.
        chunk_layers: layers of each pipeline chunk; default one chunk of all.
    """
    num_tokens = num_sequences * sequence_length
    masked = attention == "flash"
    total = model_flop(
        model,
        sequence_length=sequence_length,
        num_sequences=num_sequences,
        padded_vocab_size=padded_vocab_size,
        masked=masked,
    )
    if recompute == "full":
        return total + _layers_forward_flop(
            model, sequence_length=sequence_length, num_tokens=num_tokens, masked=masked
        )
    words = [word for count in chunk_layers or (model.num_layers,) for word in recompute_of_layers(recompute, count)]
    layers = Counter(zip(model.layer_kinds, words, strict=True))
    layers[model.layer_kinds[-1], _recompute_of_predictions(recompute)] += model.multi_token_prediction_layers
    total += sum(
        count
        * recomputed_flop(
            model,
            kind=feed_forward_kind(kind),
            recompute=word,
            sequence_length=sequence_length,
            num_tokens=num_tokens,
            attended_fraction=masked_fraction(model, kind, sequence_length=sequence_length) if masked else 1.0,
        )
        for (kind, word), count in layers.items()
    )
    return total


def _recompute_of_predictions(recompute: str) -> str:
    """What prediction layers run again: nothing beside blocks of layers [megatron-core 0.16.1, 2026-12-01]."""
    return "none" if recompute.startswith("full:block:") else recompute


def weight_gradient_flop(
    model: ModelSpec, *, sequence_length: int, num_sequences: int, padded_vocab_size: int
) -> float:
    """FLOP of the products that give weight gradients in one step, which a frozen model leaves out: 2 T per weight."""
    num_tokens = num_sequences * sequence_length
    layers, cores = (
        forward(model, sequence_length=sequence_length, num_tokens=num_tokens, masked=False)
        for forward in (_layers_forward_flop, _cores_forward_flop)
    )
    return layers - cores + logits_forward_flop(model, num_tokens=num_tokens, padded_vocab_size=padded_vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlop:
    """FLOP of one step of a candidate over all GPUs, by the three conventions of this module.

    Attributes:
        model_flop: for `mfu`.
        model_flop_causal: for `mfu_causal`.
        executed_flop: for `hfu`, by the closed form.
    """

    model_flop: float
    model_flop_causal: float
    executed_flop: float


def step_flop(candidate: Candidate) -> StepFlop:
    """FLOP of one training step of the candidate, with the vocabulary padded as its tensor parallelism pads it.

    With adapters the weight gradients of the frozen model are left out; the adapters' own products count as nothing.
    """
    model, recipe = candidate.model, candidate.recipe
    vocab = model.padded_vocab_size(candidate.layout.tensor_parallel)
    length, batch = recipe.sequence_length, recipe.global_batch_size
    frozen = (
        weight_gradient_flop(model, sequence_length=length, num_sequences=batch, padded_vocab_size=vocab)
        if recipe.lora_rank
        else 0.0
    )
    return StepFlop(
        model_flop=model_flop(model, sequence_length=length, num_sequences=batch, padded_vocab_size=vocab) - frozen,
        model_flop_causal=causal_model_flop(model, sequence_length=length, num_sequences=batch, padded_vocab_size=vocab)
        - frozen,
        executed_flop=executed_flop(
            model,
            sequence_length=length,
            num_sequences=batch,
            recompute=recipe.recompute,
            attention=recipe.attention or "flash",
            padded_vocab_size=vocab,
            chunk_layers=candidate.chunk_layers,
        )
        - frozen,
    )
