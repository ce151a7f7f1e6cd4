"""What a trace is asked for: exactly what its key hashes, nothing of pipeline, data parallelism or cluster."""

from dataclasses import dataclass
from typing import Any

from echo_explore.core.hashing import content_hash
from echo_explore.core.versions import GRAPH_SCHEMA, TRACER_VERSION
from echo_explore.specs import Candidate, ModelSpec
from echo_explore.specs.recipe import Attention, ContextExchange, ExpertDispatcher, Fp8Scales, Fusion, TrainPrecision
from echo_explore.specs.recompute import recomputes_layers, traced_form


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One trace: model and everything that changes the ops of a layer on one rank.

    Attributes:
        model: dimensions; name and number of layers do not enter the key (layer kinds do).
        recompute: in the normal form of `specs.recompute`; how many layers run again is not part of the key.
        dropout: whether dropout kernels run.
        keeps_gathered_inputs: as in StackProfile.
        lora_rank, lora_targets: as in TrainingRecipe; no targets where the rank is 0.
        lora_dropout: adapters drop some of what they read.
        expert_dispatcher, expert_capacity_factor, pad_expert_input, expert_load, overlap_shared_experts: see
            TrainingRecipe.
        fused_router: see StackProfile.
        pads_experts: experts copy their tokens to rows of 16 or 32 each, for products in 8 and 4 bits.
        expert_rank: expert-parallel rank that is played; -1: that whose experts get most.
        fp8_scales: see StackProfile; `known` where nothing is in fp8.
        fused_loss: the cross-entropy is one kernel of a library even where nothing else is fused.
        gate_apart, blocking_input_gradients, gathered_loss, reads_sequence_lengths: as in StackProfile; false where
            they change nothing.
    """

    model: ModelSpec
    framework: str = "megatron"
    tensor_parallel: int
    sequence_parallel: bool
    context_parallel: int = 1
    context_exchange: ContextExchange = "p2p"
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    micro_batch_size: int
    sequence_length: int
    precision: TrainPrecision
    attention: Attention
    recompute: str
    fusion: Fusion
    gradient_accumulation_fusion: bool
    dropout: bool
    narrow_gradients: bool = False
    fused_loss: bool = False
    fp8_scales: Fp8Scales = "known"
    keeps_gathered_inputs: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: bool = False
    expert_dispatcher: ExpertDispatcher = "alltoall"
    expert_capacity_factor: float | None = None
    pad_expert_input: bool = False
    expert_load: tuple[float, ...] = ()
    overlap_shared_experts: bool = False
    fused_router: bool = False
    pads_experts: bool = False
    expert_rank: int = -1
    gate_apart: bool = False
    blocking_input_gradients: bool = False
    gathered_loss: bool = False
    reads_sequence_lengths: bool = False

    @property
    def lays_out_attention(self) -> bool:
        """Whether the fused attention is Transformer Engine's, as in Megatron jobs with its layers."""
        return self.framework == "megatron" and self.attention == "flash" and self.fusion == "fused"

    def canonical(self) -> dict[str, Any]:
        """Plain JSON value of the request, the key's content."""
        model = self.model.model_dump(mode="json", exclude={"name", "schema_version", "num_layers", "architecture"})
        model["layer_kinds"] = sorted(set(self.model.layer_kinds))
        request = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "model"}
        request["recompute"] = traced_form(self.recompute)
        _leave_out(request, {"pads_experts": False, "expert_rank": -1, "lora_dropout": False})
        plain = ("gate_apart", "blocking_input_gradients", "gathered_loss", "reads_sequence_lengths")
        _leave_out(request, dict.fromkeys(plain, False))
        if self.lays_out_attention:  # younger than TRACER_VERSION; traces of other jobs are found as before
            request["attention_layout"] = "transformer-engine"
        _leave_out(model, {"yarn_scaling_factor": 1.0})
        return request | {"model": model, "graph_schema": GRAPH_SCHEMA, "tracer_version": TRACER_VERSION}

    def to_json(self) -> dict[str, Any]:
        """A plain JSON value from which `request_from_json` makes it again."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "model"} | {
            "model": self.model.model_dump_json()
        }

    def key(self, framework_versions: dict[str, str]) -> str:
        """The trace key under the given versions of torch and framework."""
        return content_hash([self.canonical(), framework_versions], num_hex=32)


def _leave_out(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Take out fields younger than TRACER_VERSION where they say nothing, so that traces made before them are found."""
    for name, default in defaults.items():
        if values[name] == default:
            del values[name]


def request_from_json(value: dict[str, Any]) -> TraceRequest:
    """The request of which `to_json` made `value`."""
    model = ModelSpec.model_validate_json(value["model"])
    return TraceRequest(
        **value
        | {"model": model, "expert_load": tuple(value["expert_load"]), "lora_targets": tuple(value["lora_targets"])}
    )


def unsupported(request: TraceRequest) -> str | None:
    """Why the tracer can't run a request: the field and what is missing; None when it can."""
    model = request.model
    refusals = (
        (
            model.moe is not None and request.precision == "fp32",
            "precision: fp32 is not traced for experts; grouped products take 16 bits and narrower",
        ),
        (
            model.moe is not None and model.linear_bias and model.moe.shared_ffn_hidden_size > 0,
            "model.linear_bias: Megatron's shared experts take no biases; use false",
        ),
        (
            model.moe is not None and model.linear_bias and request.expert_tensor_parallel > 1,
            "layout.etp: Megatron's experts with biases are not split; use etp=1",
        ),
        (
            model.activation == "quick-geglu" and request.framework != "megatron",
            f"model.activation: quick-geglu is not traced for {request.framework}; use --framework megatron",
        ),
        (
            model.mla is not None and model.position_embedding != "rope",
            f"model.position_embedding = {model.position_embedding}: multi-latent attention has rotary parts; use rope",
        ),
        *_context_refusals(request),
        (
            request.lora_rank > 0 and request.framework != "megatron",
            f"recipe.lora_rank: adapters are not traced for {request.framework}; use --framework megatron",
        ),
        (
            request.lora_rank > 0 and (model.moe is not None or model.mla is not None),
            "recipe.lora_rank: adapters are traced for dense models with plain attention only",
        ),
        (
            request.lora_rank > 0 and recomputes_layers(request.recompute),
            "recipe.lora_rank: adapters are not traced with recomputed layers yet; use another recompute",
        ),
        (
            request.fusion == "norm" and request.framework != "megatron",
            f"fusion: norm alone is not traced for {request.framework}; use eager or fused",
        ),
        (
            request.attention == "flash" and request.precision == "fp32",
            "attention: flash attention kernels take bf16 and fp16 only; use unfused with fp32",
        ),
    )
    return next((reason for wrong, reason in refusals if wrong), None)


def _context_refusals(request: TraceRequest) -> tuple[tuple[bool, str], ...]:
    """What Transformer Engine's context parallelism does not take (2.8, 2025, context_parallel.py)."""
    model, context, exchange = request.model, request.context_parallel, request.context_exchange
    if context == 1:
        return ()
    heads = [n // min(n, request.tensor_parallel) for n in (model.num_attention_heads, model.num_key_value_heads)]
    return (
        (
            exchange == "p2p" and 0 < model.attention_window < request.sequence_length,
            "recipe.context_exchange: p2p takes no sliding window; use all_gather or a2a",
        ),
        (model.attention_sink and exchange != "a2a", f"recipe.context_exchange: {exchange} takes no sinks; use a2a"),
        (request.attention == "unfused", "attention: context parallelism needs a fused kernel; use flash"),
        (
            exchange == "a2a" and any(n % context for n in heads),
            f"recipe.context_exchange: a2a splits heads and key-value heads of a rank, {heads}, over cp = {context}; "
            "use p2p",
        ),
    )


def request_of(candidate: Candidate) -> TraceRequest:
    """The trace that a candidate needs; its recipe must be resolved."""
    layout, recipe = candidate.layout, candidate.recipe
    assert recipe.attention is not None
    assert recipe.fusion is not None
    assert recipe.dropout is not None
    return TraceRequest(
        model=candidate.model,
        framework=candidate.stack.framework,
        tensor_parallel=layout.tensor_parallel,
        sequence_parallel=layout.sequence_parallel,
        context_parallel=layout.context_parallel,
        context_exchange=recipe.context_exchange if layout.context_parallel > 1 else "p2p",
        expert_parallel=layout.expert_parallel,
        expert_tensor_parallel=layout.expert_tensor_ranks if candidate.model.moe else 1,
        micro_batch_size=recipe.micro_batch_size,
        sequence_length=recipe.sequence_length,
        precision=recipe.precision,
        attention=recipe.attention,
        recompute=recipe.recompute,
        fusion=recipe.fusion,
        gradient_accumulation_fusion=bool(recipe.gradient_accumulation_fusion),
        dropout=recipe.dropout > 0,
        narrow_gradients=candidate.stack.framework == "megatron"
        and candidate.stack.main_gradient_dtype(recipe.precision) != "fp32",
        fused_loss=candidate.stack.fused_loss and candidate.stack.framework != "megatron",
        fp8_scales=candidate.stack.fp8_scales if recipe.precision == "fp8" else "known",
        lora_rank=recipe.lora_rank,
        lora_targets=(recipe.lora_targets or ()) if recipe.lora_rank else (),
        lora_dropout=recipe.lora_rank > 0 and candidate.stack.lora_dropout > 0,
        keeps_gathered_inputs=candidate.stack.keeps_gathered_inputs and layout.sequence_parallel,
        **_plain_parts_of(candidate),
        **_experts_of(candidate),
    )


def _plain_parts_of(candidate: Candidate) -> dict[str, Any]:
    """Which parts of a Megatron model are written as its trainer has them, where that changes something."""
    stack, layout, model = candidate.stack, candidate.layout, candidate.model
    if stack.framework != "megatron":
        return {}
    alone = layout.tensor_parallel > 1 and not layout.sequence_parallel
    return {
        "gate_apart": stack.gate_apart and model.gated and "dense" in model.layer_kinds,
        "blocking_input_gradients": stack.blocking_input_gradients and alone,
        "gathered_loss": stack.gathered_loss,
        "reads_sequence_lengths": stack.reads_sequence_lengths and candidate.recipe.attention == "flash",
    }


def _experts_of(candidate: Candidate) -> dict[str, Any]:
    """What a mixture adds; where all experts lie on one rank nothing is exchanged, and every dispatcher is one."""
    recipe = candidate.recipe
    if candidate.model.moe is None:
        return {}
    return {
        "expert_dispatcher": recipe.expert_dispatcher if candidate.layout.expert_gpus > 1 else "alltoall",
        "expert_capacity_factor": recipe.expert_capacity_factor,
        "pad_expert_input": recipe.pad_expert_input,
        "expert_load": recipe.expert_load,
        "overlap_shared_experts": bool(recipe.overlap_shared_experts)
        and candidate.model.moe.shared_ffn_hidden_size > 0,
        "fused_router": candidate.stack.fused_router and recipe.fusion == "fused",
        "pads_experts": _pads_experts(candidate),
    }


def _pads_experts(candidate: Candidate) -> bool:
    """Whether experts copy their tokens to filled-up rows.

    Megatron's do in 8 and 4 bits unless the router fills them up (megatron-core 0.16.1, TEGroupedMLP.forward;
    moe_router_padding_for_quantization is off by default, and Megatron-Bridge's performance recipes of 2025 and 2026
    for Qwen3, DeepSeek-V3 and Kimi K2 leave it so); HybridEP's permutation makes full rows (token_dispatcher.py,
    pad_multiple), a capacity equal ones.
    """
    recipe = candidate.recipe
    is_narrow = recipe.precision in ("fp8", "mxfp8", "nvfp4")
    exchanged = candidate.layout.expert_gpus > 1
    fills = recipe.pad_expert_input or (recipe.expert_dispatcher == "hybridep" and exchanged)
    return is_narrow and not fills and candidate.stack.framework == "megatron" and candidate.stack.experts_apart
