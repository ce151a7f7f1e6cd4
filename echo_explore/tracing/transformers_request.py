"""What is asked of a model of the transformers package: its config and how PyTorch splits it; no torch is needed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_explore.core import SpecError

PARALLELISMS = {"transformers-fsdp2": "fsdp2", "transformers-ddp": "ddp"}
"""Names of `--framework`, and what wraps the model."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of a config that say how many experts a layer has."""


_COUNTS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "n_layer", "n_embd", "n_head", *EXPERT_COUNTS,
)  # fmt: skip
"""Keys of a config that transformers takes as they are: no layers, or fewer, are a model to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersJob:
    """A training step of a model that the transformers package makes from a config.

    Attributes:
        config: keys of its `config.json`.
        parallelism: `fsdp2` (bf16 over fp32 shards) or `ddp` (autocast).
        tensor_parallel: ranks of DTensor's plan, which the config's class names; 1: none.
        expert_parallel: ranks that hold the experts, of all GPUs.
        recompute: `none` or `full` (`torch.utils.checkpoint` around each layer).
        precision: bf16, fp16 or fp32.
    """

    config: Mapping[str, Any]
    parallelism: str
    tensor_parallel: int
    expert_parallel: int = 1
    world_size: int
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int
    recompute: str
    precision: str

    def __post_init__(self) -> None:
        """Refuse what can't be run.

        Raises:
            SpecError: naming the field.
        """
        if not isinstance(self.config.get("model_type"), str):
            raise SpecError(
                "config: model_type", "(missing)", "must be given as text", "use a Hugging Face config.json"
            )
        if isinstance(self.config.get("text_config"), Mapping):
            rule = "describes text and other inputs; only its text_config is a language model"
            raise SpecError("config: model_type", self.config["model_type"], rule, "give text_config as the config")
        self._check_config()
        if self.world_size % self.tensor_parallel:
            raise SpecError(
                "layout.tp", self.tensor_parallel, f"must divide the {self.world_size} GPUs", "change tp or --num-gpus"
            )
        for axis, degree in (("tp", self.tensor_parallel), ("ep", self.expert_parallel)):
            if self.parallelism == "ddp" and degree > 1:
                raise SpecError(f"layout.{axis}", degree, "is not combined with ddp", "use transformers-fsdp2")
        self._check_experts()
        if self.recompute not in ("none", "full"):
            raise SpecError("recompute", self.recompute, "is not what transformers can do", "use none or full")
        if self.precision not in ("bf16", "fp16", "fp32"):
            raise SpecError("precision", self.precision, "is not traced for transformers", "use bf16, fp16 or fp32")
        for name in ("num_micro_batches", "micro_batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise SpecError(name, getattr(self, name), "must be 1 or more", "correct it")

    def _check_config(self) -> None:
        try:
            json.dumps(self.config, allow_nan=False)
        except ValueError:
            raise SpecError("config", "NaN or Infinity", "is no value of a model", "correct the config") from None
        for name in _COUNTS:
            value = self.config.get(name)
            if isinstance(value, bool | float | str) or (isinstance(value, int) and value < 1):
                raise SpecError(f"config: {name}", value, "must be a whole number, 1 or more", "correct the config")
        heads, shared = (self.config.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
            rule = f"must divide num_attention_heads = {heads}"
            raise SpecError("config: num_key_value_heads", shared, rule, "correct one of them")

    def _check_experts(self) -> None:
        """DistributedConfig of transformers 5.24 makes groups of experts of whole tensor-parallel groups."""
        ranks, tensor, world = self.expert_parallel, self.tensor_parallel, self.world_size
        if ranks == 1:
            return
        for wrong, rule in (
            (ranks % tensor > 0, f"must be a multiple of tp = {tensor}"),
            (world % ranks > 0, f"must divide the {world} GPUs"),
        ):
            if wrong:
                raise SpecError("layout.ep", ranks, rule, "change ep")
        experts = max(int(self.config.get(name) or 0) for name in EXPERT_COUNTS)
        if experts and experts % ranks:
            raise SpecError("layout.ep", ranks, f"must divide the {experts} experts of the config", "use a divisor")
        chosen = self.config.get("num_experts_per_tok")
        pairs = self.micro_batch_size * self.sequence_length * (chosen if isinstance(chosen, int) else 1) // tensor
        if pairs % ranks:
            rule = f"must divide the {pairs} choices of a rank's tokens, which balanced routing shares out"
            raise SpecError("layout.ep", ranks, rule, "change ep or the batch")

    def to_json(self) -> dict[str, Any]:
        """A plain JSON value; `TransformersJob(**value)` makes it again."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"config": dict(self.config)}


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that is a language model: its `text_config` where it has one (Gemma 3, Llama 4), else all.

    Raises:
        SpecError: `text_config` does not say its own model_type.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    if not isinstance(inner.get("model_type"), str):
        rule = "must name the family of the language model"
        raise SpecError("config: text_config.model_type", "(missing)", rule, "add it, as in gemma3_text")
    return inner
