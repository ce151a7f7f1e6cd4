"""What a model is: dimensions of a decoder-only transformer, dense or mixture of experts."""

import functools
from typing import Literal, Self

from pydantic import Field, model_validator

from echo_explore.core import SpecError
from echo_explore.specs.base import LARGEST, StrictModel

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tensor_parallel [make_vocab_size_divisible_by, 0.16.1]."""

WINDOWED = "-window"
"""What the kind of a layer whose attention has a window ends in."""
FeedForwardKind = Literal["dense", "moe"]
GATED = ("swiglu", "quick-geglu")
"""Activations of which one half gates the other."""


class MoeSpec(StrictModel):
    """Mixture of experts in the feed-forward part.

    Attributes:
        num_experts: routed experts.
        experts_per_token: routed experts that each token visits.
        ffn_hidden_size: inner width of one routed expert.
        shared_ffn_hidden_size: inner width of the shared experts together; 0: none.
        first_dense_layers: leading layers with a dense feed-forward of the model's ffn_hidden_size.
        layer_frequency: every n-th of the other layers is a mixture, the rest dense.
        score_function: what turns the router's logits into weights.
        num_groups: groups of experts of which a token visits groups_per_token at most; 0: not limited.
        groups_per_token: see num_groups.
        selection_bias: experts are chosen after scores plus a bias that balances them without a loss; needs sigmoid.
        balancing_loss: auxiliary loss over a micro-batch (`batch`), over each sequence (`sequence`), or `none`.
    """

    num_experts: int = Field(ge=1, le=LARGEST)
    experts_per_token: int = Field(ge=1, le=LARGEST)
    ffn_hidden_size: int = Field(ge=1, le=LARGEST)
    shared_ffn_hidden_size: int = Field(default=0, ge=0, le=LARGEST)
    first_dense_layers: int = Field(default=0, ge=0, le=LARGEST)
    layer_frequency: int = Field(default=1, ge=1, le=LARGEST)
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = Field(default=0, ge=0, le=LARGEST)
    groups_per_token: int = Field(default=0, ge=0, le=LARGEST)
    selection_bias: bool = False
    balancing_loss: Literal["batch", "sequence", "none"] = "batch"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        groups, chosen = self.num_groups, self.groups_per_token
        if bool(groups) != bool(chosen):
            raise SpecError(
                "moe.groups_per_token", chosen, f"goes with moe.num_groups = {groups}", "give both or neither"
            )
        if groups and (self.num_experts % groups or self.experts_per_token % chosen):
            rule = f"must divide moe.num_experts = {self.num_experts}, and groups_per_token experts_per_token"
            raise SpecError("moe.num_groups", groups, rule, "change the groups")
        if groups and (chosen > groups or self.experts_per_token > chosen * (self.num_experts // groups)):
            rule = f"of {groups} groups must hold experts_per_token = {self.experts_per_token} experts"
            raise SpecError("moe.groups_per_token", chosen, rule, "change the groups")
        if self.selection_bias and self.score_function != "sigmoid":
            raise SpecError(
                "moe.selection_bias", True, "megatron-core has it with sigmoid only", 'set score_function = "sigmoid"'
            )
        return self


class MlaSpec(StrictModel):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    q_lora_rank: int = Field(ge=0, le=LARGEST)
    kv_lora_rank: int = Field(ge=1, le=LARGEST)
    qk_nope_head_dim: int = Field(ge=1, le=LARGEST)
    qk_rope_head_dim: int = Field(ge=1, le=LARGEST)
    v_head_dim: int = Field(ge=1, le=LARGEST)


class ModelSpec(StrictModel):
    """A decoder-only transformer; counts are of the whole model.

    Attributes:
        head_dim: width of one attention head; default hidden_size / num_attention_heads, and under multi-latent
            attention the width of queries and keys.
        num_key_value_heads: key and value heads; default num_attention_heads.
        vocab_size: rows of the published embedding; see `padded_vocab_size`.
        attention_window: a token sees so many tokens, itself included (sliding window); 0: all before it.
        full_attention_every: with a window, every n-th layer sees the whole sequence all the same (GPT-OSS 2, Gemma 3
            6); 0: none does.
        attention_sink: each head has a learnt logit that the softmax counts beside the scores (GPT-OSS).
        tied_embeddings: input and output embedding are one matrix.
        activation: `swiglu` gates with SiLU, `quick-geglu` with x sigmoid(1.702 x) (GPT-OSS).
        activation_func_clamp_value: of quick-geglu: the gate is at most so large, the other half within plus and minus
            of it; 0: not clamped (`swiglu_limit` of Hugging Face).
        glu_linear_offset: of quick-geglu: is added to the half that is not the gate (GPT-OSS 1).
        linear_bias: linear layers have biases, of experts and routers too.
        qkv_bias: query, key and value projections have biases even if linear_bias is false.
        qk_norm: norms on queries and keys, each of head_dim.
        yarn_scaling_factor: by which YaRN stretches rotary positions (arXiv 2309.00071); 1: it does not. Megatron's
            fused rotary kernel does not take the temperature that goes with it, so it turns heads operator by operator.
        multi_token_prediction_layers: extra prediction layers (DeepSeek-V3).
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str
    architecture: Literal["gpt", "llama", "mixtral", "qwen3", "qwen3-moe", "deepseek-v3", "gpt-oss"] = "gpt"
    num_layers: int = Field(ge=1, le=LARGEST)
    hidden_size: int = Field(ge=1, le=LARGEST)
    ffn_hidden_size: int = Field(ge=1, le=LARGEST)
    num_attention_heads: int = Field(ge=1, le=LARGEST)
    num_key_value_heads: int = Field(default=1, ge=1, le=LARGEST)
    head_dim: int = Field(default=1, ge=1, le=LARGEST)
    vocab_size: int = Field(ge=1, le=LARGEST)
    max_sequence_length: int = Field(ge=1, le=LARGEST)
    attention_window: int = Field(default=0, ge=0, le=LARGEST)
    full_attention_every: int = Field(default=0, ge=0, le=LARGEST)
    attention_sink: bool = False
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    activation: Literal["gelu", "swiglu", "quick-geglu", "relu", "squared-relu"] = "gelu"
    activation_func_clamp_value: float = Field(default=0.0, ge=0, le=LARGEST)
    glu_linear_offset: float = Field(default=0.0, ge=0, le=LARGEST)
    position_embedding: Literal["learned", "rope", "alibi", "none"] = "learned"
    yarn_scaling_factor: float = Field(default=1.0, ge=1, le=LARGEST)
    tied_embeddings: bool = True
    linear_bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    embedding_norm: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    multi_token_prediction_layers: int = Field(default=0, ge=0, le=LARGEST)

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        if isinstance(heads, int) and heads > 0:
            data.setdefault("num_key_value_heads", heads)
            if isinstance(data.get("mla"), dict) and "head_dim" not in data:
                parts = [data["mla"].get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
                data["head_dim"] = sum(p for p in parts if isinstance(p, int)) or 1  # MlaSpec refuses what is no number
            if isinstance(hidden, int) and "head_dim" not in data:
                if hidden % heads:
                    raise SpecError(
                        "hidden_size", hidden, f"is not divisible by num_attention_heads = {heads}", "give head_dim"
                    )
                data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise SpecError(
                "num_key_value_heads", groups, f"must divide num_attention_heads = {heads}", "correct one of them"
            )
        if self.moe and self.moe.experts_per_token > self.moe.num_experts:
            raise SpecError(
                "moe.experts_per_token", self.moe.experts_per_token, "exceeds moe.num_experts", "correct one of them"
            )
        for field in ("activation_func_clamp_value", "glu_linear_offset"):
            if self.activation != "quick-geglu" and (value := getattr(self, field)):
                rule = f"goes with quick-geglu, but activation = {self.activation}"
                raise SpecError(field, value, rule, "set it to 0, or activation to quick-geglu")
        return self

    @property
    def gated(self) -> bool:
        """The first product of a feed-forward has two halves, one of which gates the other."""
        return self.activation in GATED

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding as Megatron allocates it, over all ranks of the tensor-parallel group."""
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """What each layer is, in order: `dense` or `moe`, with `-window` behind it where attention has a window."""
        return _with_windows(self.feed_forward_kinds, self.attention_window, self.full_attention_every)

    @property
    def feed_forward_kinds(self) -> tuple[FeedForwardKind, ...]:
        """`dense` or `moe` for each layer, in order."""
        if self.moe is None:
            return _mixed(self.num_layers, self.num_layers, 1)
        return _mixed(self.num_layers, self.moe.first_dense_layers, self.moe.layer_frequency)


@functools.lru_cache(maxsize=128)  # searches ask for them in every bound, several times
def _mixed(num_layers: int, first_dense_layers: int, layer_frequency: int) -> tuple[FeedForwardKind, ...]:
    kinds: list[FeedForwardKind] = [
        "dense" if i < first_dense_layers or (i - first_dense_layers) % layer_frequency else "moe"
        for i in range(num_layers)
    ]
    return tuple(kinds)


@functools.lru_cache(maxsize=128)
def _with_windows(kinds: tuple[FeedForwardKind, ...], attention_window: int, full_every: int) -> tuple[str, ...]:
    if attention_window <= 0:
        return kinds
    is_full = [full_every > 0 and (i + 1) % full_every == 0 for i in range(len(kinds))]
    return tuple(kind + ("" if full else WINDOWED) for kind, full in zip(kinds, is_full, strict=True))


def feed_forward_kind(kind: str) -> FeedForwardKind:
    """`dense` or `moe` of a kind of layers."""
    return "moe" if kind.startswith("moe") else "dense"
