"""How many parameters a model has, in closed form.

With h = hidden_size, f = ffn_hidden_size, a heads and g key-value heads of width d, V rows of the embedding:

    attention   h a d + 2 h g d + a d h             (+ a d + 2 g d + h biases, + 2 d norms, + a sinks)
    MLA         h r_q + r_q + r_q a (d_n + d_r)     queries (h a (d_n + d_r) when r_q = 0)
                + h (r_kv + d_r) + r_kv + r_kv a (d_n + d_v) + a d_v h
    feed        2 h f, gated 3 h f                  (+ f + h biases, gated 2 f + h)
    mixture     h E router (+ E biases) + E experts + shared experts
    norm        h (root mean square) or 2 h (layer norm); two a layer and one at the end
    ends        V h, again V h for an output layer of its own, S h learned positions

References:
    arXiv 2104.04473 (2021), equation 2, for GPT; arXiv 2405.04434 (2024), section 2.1, for MLA.
"""

from dataclasses import dataclass

from echo_explore.core import SpecError
from echo_explore.specs.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameters of a whole model by part; prediction layers (multi-token prediction) are counted apart.

    Attributes:
        embedding: input embedding, learned positions and embedding norm.
        output: output layer; 0 when it is the input embedding.
        attention: of all layers.
        dense_ffn: feed-forward of dense layers and shared experts.
        router: of all mixtures.
        experts: routed experts of all layers.
        norms: of all layers, and the last one.
        active_experts: routed experts that one token visits, in all layers.
        prediction: multi-token prediction layers, which share embedding and output layer with the model.
    """

    embedding: int
    output: int
    attention: int
    dense_ffn: int
    router: int
    experts: int
    norms: int
    active_experts: int
    prediction: int

    @property
    def total(self) -> int:
        """Parameters of the model without its prediction layers, as model cards count them."""
        return self.active - self.active_experts + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token passes, embeddings included."""
        shared = self.embedding + self.output + self.attention + self.dense_ffn + self.router + self.norms
        return shared + self.active_experts


def count_parameters(model: ModelSpec, *, vocab_rows: int | None = None) -> ParameterCount:
    """The parameters of `model`.

    Args:
        model: its dimensions.
        vocab_rows: rows of the embedding; default the published vocabulary. Give `padded_vocab_size(tp)` for what
            Megatron allocates.

    Raises:
        SpecError: fewer rows than the vocabulary has.
    """
    rows = model.vocab_size if vocab_rows is None else vocab_rows
    if rows < model.vocab_size:
        raise SpecError(
            "vocab_rows", rows, f"is below vocab_size = {model.vocab_size}", "pad the vocabulary, do not cut it"
        )
    hidden, moe = model.hidden_size, model.moe
    num_dense = model.feed_forward_kinds.count("dense")
    num_mixtures = model.num_layers - num_dense
    expert = feed_forward_parameters(model, moe.ffn_hidden_size) if moe else 0
    shared = feed_forward_parameters(model, moe.shared_ffn_hidden_size) if moe and moe.shared_ffn_hidden_size else 0
    num_experts, num_active = (moe.num_experts, moe.experts_per_token) if moe else (0, 0)
    positions = model.max_sequence_length * hidden if model.position_embedding == "learned" else 0
    attention, norm = attention_parameters(model), norm_parameters(model)
    router = (hidden + (1 if model.linear_bias else 0)) * num_experts
    mixture = router + num_experts * expert + shared
    layer = attention + 2 * norm + (mixture if moe else feed_forward_parameters(model, model.ffn_hidden_size))
    return ParameterCount(
        embedding=rows * hidden + positions + (norm if model.embedding_norm else 0),
        output=0 if model.tied_embeddings else rows * hidden,
        attention=model.num_layers * attention,
        dense_ffn=num_dense * feed_forward_parameters(model, model.ffn_hidden_size) + num_mixtures * shared,
        router=num_mixtures * router,
        experts=num_mixtures * num_experts * expert,
        norms=(2 * model.num_layers + 1) * norm,
        active_experts=num_mixtures * num_active * expert,
        # One layer, three norms and the projection of hidden state and embedding: arXiv 2412.19437 (2024), section 2.2.
        prediction=model.multi_token_prediction_layers * (layer + 3 * norm + 2 * hidden * hidden),
    )


def attention_parameters(model: ModelSpec) -> int:
    """Parameters of the attention of one layer, norms of queries and keys included."""
    hidden, heads, groups, width = (
        model.hidden_size,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
    )
    if model.mla is not None:
        mla = model.mla
        query_width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        query = (
            hidden * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * query_width
            if mla.q_lora_rank
            else hidden * query_width
        )
        key_value = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        key_value += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return query + key_value + heads * mla.v_head_dim * hidden
    projected = (heads + 2 * groups) * width
    biases = (projected if model.linear_bias or model.qkv_bias else 0) + (hidden if model.linear_bias else 0)
    norms = 2 * width * (2 if model.normalization == "layernorm" else 1) if model.qk_norm else 0
    sinks = heads if model.attention_sink else 0
    return hidden * projected + heads * width * hidden + biases + norms + sinks


def feed_forward_parameters(model: ModelSpec, inner: int) -> int:
    """Parameters of one feed-forward of inner width `inner`, norm excluded."""
    ways_in = 2 if model.gated else 1
    biases = ways_in * inner + model.hidden_size if model.linear_bias else 0
    return (ways_in + 1) * model.hidden_size * inner + biases


def norm_parameters(model: ModelSpec) -> int:
    """Parameters of one norm over the hidden size."""
    return model.hidden_size * (2 if model.normalization == "layernorm" else 1)
