"""From a measured run to the candidate that stands for it, or the reason why none does.

Rules look at framework, date, flags and dimensions only; a row's id or family decides nothing, and the name of its
model only beside equal dimensions (`model_files`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echo_explore.core import EchoError, SpecError
from echo_explore.specs import Candidate, ModelSpec, ParallelConfig, StackProfile, TrainingRecipe, make_candidate
from echo_explore.specs.base import validate
from echo_explore.specs.recompute import MODULES, modules_of, recomputes_layers
from echo_explore.specs.schedules import is_v_shaped
from echo_explore.tracing.request import request_of
from echo_explore.tracing.request import unsupported as tracer_refuses
from echo_explore.validation.clusters import cluster_of
from echo_explore.validation.model_files import assumed, completed
from echo_explore.validation.rows import MeasuredRow
from echo_explore.validation.stacks import rule_of_stack, stack_of

Capability = Callable[[Candidate], str | None]
"""None when a candidate can be predicted, else why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """A run that is not predicted, and why."""

    reason: str


def unsupported(candidate: Candidate) -> str | None:
    """Why the tracer of this version cannot run the candidate; None when it can."""
    return tracer_refuses(request_of(candidate))


def map_row(row: MeasuredRow, *, supported: Capability = unsupported) -> Candidate | Declined:
    """The candidate that stands for a measured run.

    Args:
        row: the run.
        supported: says why a candidate cannot be predicted; None when it can.
    """
    stack = stack_of(row)
    if isinstance(stack, str):
        return Declined(reason=stack)
    if reason := _not_represented(row, stack):
        return Declined(reason=reason)
    cluster = cluster_of(row)
    if cluster is None:
        return Declined(reason=f"no cluster for GPU {row.gpu!r}")
    try:
        candidate = make_candidate(
            model=model_of(row),
            cluster=cluster,
            layout=layout_of(row),
            recipe=recipe_of(row, stack),
            stack=stack,
            num_gpus=row.num_gpus,
        )
    except EchoError as error:
        return Declined(reason=str(error))
    missing = supported(candidate)
    return Declined(reason=missing) if missing else candidate


def _not_represented(row: MeasuredRow, stack: StackProfile) -> str | None:
    """What a run does that no recipe can say yet."""
    if row.task not in ("pretrain", "sft", "lora"):
        return f"task {row.task} is not represented yet"
    if row.sharding in ("zero2", "zero3") and stack.framework == "megatron" and not gathers_once(row):
        return "sharded gradients and parameters (ZeRO-2 and 3, FSDP) are not represented yet"
    if row.overlap.offload and not row.overlap.offload_layers:
        return "what is moved to host memory is not represented yet: only activations of a number of layers"
    if recompute_of(row, stack) is None:
        return f"recompute {row.recompute!r} is not represented yet: only layers and Megatron's modules"
    if row.precision is None:
        return f"precision {row.values.get('precision', '')!r} is not known"
    return None


def gathers_once(row: MeasuredRow) -> bool:
    """Whether what the run shards is gathered once a step and kept, as parameters of a distributed optimizer are."""
    rule = rule_of_stack(row)
    return rule is not None and rule.gathers_once


def recompute_of(row: MeasuredRow, stack: StackProfile) -> str | None:
    """What the run recomputes in words of a recipe; None where there are none.

    `selective` means core attention in Megatron, which also takes modules by name, and, in plain PyTorch, all but
    attention and every second product, which torchtitan calls selective by op; by layer means every second layer there
    (torchtitan 0.1 to 0.2, 2024 to 2025, selective_ac_option = "2" unless said otherwise).
    """
    if row.recompute in ("none", "full"):
        return row.recompute
    if stack.framework == "megatron" and recomputes_layers(row.recompute):
        return row.recompute
    if stack.framework == "megatron":
        modules = modules_of(row.recompute)
        return row.recompute if modules and set(modules) <= set(MODULES) else None
    if row.recompute == "selective(layer)" and stack.framework == "fsdp2":
        return "full:every:2"
    return "selective" if row.recompute in ("selective(op)", "selective(per-op)") else None


def model_of(row: MeasuredRow) -> ModelSpec:
    """The model of the run; what its columns do not say follows the file of the same model, see `model_files`.

    Raises:
        SpecError: its dimensions do not fit together.
    """
    return completed(_described(row))


def taken_from_file(row: MeasuredRow) -> str:
    """What was taken from the file of the model, as text; empty where nothing was, or no model fits the row."""
    try:
        return assumed(_described(row))
    except EchoError:
        return ""


def _described(row: MeasuredRow) -> ModelSpec:
    """The model in the row's columns: Llama-shaped when its activation is gated, GPT-shaped otherwise."""
    extra = row.extra.lower()
    gated = row.activation == "swiglu"
    alibi, rope = "alibi" in extra, gated or "position-embedding-type=rope" in extra
    head_dim = re.search(r"(?:head_dim|kv-channels=)(\d+)", extra)
    window = re.search(r"(alternating )?(\d+)-token sliding window", extra)
    tied = row.tied_embeddings if row.tied_embeddings is not None else not gated
    fields: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", row.model_name)[:80] or "measured",
        "architecture": "llama" if gated else "gpt",
        "num_layers": row.num_layers,
        "hidden_size": row.hidden_size,
        "ffn_hidden_size": row.ffn_hidden_size,
        "num_attention_heads": row.num_heads,
        "num_key_value_heads": row.num_kv_heads,
        "vocab_size": row.vocab_size,
        "max_sequence_length": row.seq_len,
        "normalization": "rmsnorm" if gated else "layernorm",
        "activation": row.activation,
        "position_embedding": "alibi" if alibi else "rope" if rope else "learned",
        "tied_embeddings": tied,
        # llm-foundry scripts/train/yamls (2023): no_bias = true in all of them.
        "linear_bias": not gated and "llm-foundry" not in row.framework,
        "qk_norm": "qk-layernorm=true" in extra,
        "moe": moe_of(row),
        "mla": _mla(extra),
        "attention_window": int(window[2]) if window else 0,
        "full_attention_every": 2 if window and window[1] else 0,
        "multi_token_prediction_layers": _prediction_layers(extra),
    }
    if head_dim:
        fields["head_dim"] = int(head_dim[1])
    return validate(ModelSpec, {key: value for key, value in fields.items() if value is not None})


def moe_of(row: MeasuredRow) -> dict[str, int] | None:
    """The mixture of experts that the row's columns and words describe; None for a dense model."""
    if not row.moe_experts:
        return None
    extra = row.extra.lower()
    inner = row.moe_ffn_hidden or row.ffn_hidden_size
    shared = 0
    if found := re.search(r"shared-expert-intermediate-size=(\d+)", extra):
        shared = int(found[1])
    elif found := re.search(r"(\d+) shared experts?(?: (\d+))?", extra):
        shared = int(found[1]) * int(found[2] or inner)
    leading = re.search(r"(\d+) dense layers?", extra) or re.search(r"moe-layer-freq=\(\[0\]\*(\d+)", extra)
    return {
        "num_experts": row.moe_experts,
        "experts_per_token": row.moe_topk or 1,
        "ffn_hidden_size": inner,
        "shared_ffn_hidden_size": shared,
        "first_dense_layers": int(leading[1]) if leading else 0,
    }


def _prediction_layers(extra: str) -> int:
    """Multi-token prediction layers; a recipe that has them has one (Megatron-Bridge, deepseek_v3.py, 2025)."""
    if found := re.search(r"mtp-num-layers=(\d+)", extra):
        return int(found[1])
    return int("mtp per recipe" in extra)


def _mla(extra: str) -> dict[str, int] | None:
    """Multi-latent attention from attn_extra; widths that it leaves out are DeepSeek-V2's (arXiv 2405.04434, 2024)."""
    if "mla" not in extra and "multi-latent-attention=true" not in extra:
        return None

    def width(pattern: str, default: int) -> int:
        found = re.search(pattern, extra)
        return int(found[1]) if found else default

    return {
        "q_lora_rank": width(r"(?:q_lora|q-lora-rank=)(\d+)", 0),
        "kv_lora_rank": width(r"(?:kv_lora |kv_lora|kv-lora-rank=)(\d+)", 512),
        "qk_nope_head_dim": width(r"nope(\d+)", 128),
        "qk_rope_head_dim": width(r"rope(\d+)", 64),
        "v_head_dim": width(r"\bv(\d+)", 128),
    }


def layout_of(row: MeasuredRow) -> ParallelConfig:
    """The layout of the run.

    Raises:
        SpecError: the degrees do not give its GPUs.
    """
    product = row.tp * row.pp * row.dp * row.cp
    if product != row.num_gpus:
        raise SpecError("tp*pp*dp*cp", product, f"is not num_gpus = {row.num_gpus}", "correct the row")
    return validate(
        ParallelConfig,
        {
            "tensor_parallel": row.tp,
            "pipeline_parallel": row.pp,
            # Schedules of two chunks a stage: a row that names one need not say so.
            "virtual_pipeline": 2 if is_v_shaped(row.overlap.schedule or "") and row.pp > 1 else row.vpp,
            "data_parallel": row.dp,
            "context_parallel": row.cp,
            "expert_parallel": row.ep,
            # Megatron trains no mixture beside tensor parallelism without it (megatron-core 0.16.1, moe_layer.py).
            "sequence_parallel": row.sequence_parallel or (row.moe_experts > 0 and row.tp > 1),
        },
        where="layout.",
    )


def _overlaps_exchange(row: MeasuredRow) -> bool | None:
    """DualPipe is made to hide exchanges of experts (arXiv 2412.19437 (2024), section 3.2.1)."""
    if row.ep == 1:
        return None
    return True if row.overlap.schedule == "dualpipe" and row.pp > 1 else row.overlap.expert_exchange


def recipe_of(row: MeasuredRow, stack: StackProfile) -> TrainingRecipe:
    """The recipe of the run; what the run does not say follows the stack.

    Raises:
        SpecError: a count is not positive.
    """
    sharded = (
        row.distributed_optimizer
        if row.distributed_optimizer is not None
        else True
        if row.sharding == "zero1" or (row.sharding in ("zero2", "zero3") and gathers_once(row))
        else None
    )
    fields: dict[str, Any] = {
        "global_batch_size": row.global_batch,
        "micro_batch_size": row.micro_batch,
        "sequence_length": row.seq_len,
        "precision": row.precision,
        "recompute": recompute_of(row, stack),
        "attention": row.attention,
        "distributed_optimizer": sharded,
        "overlap_grad_reduce": row.overlap.grad_reduce,
        "overlap_param_gather": row.overlap.param_gather,
        # torch 2.13 (2026) _context_parallel/_attention.py: keys and values are gathered by default.
        "context_exchange": "all_gather" if stack.framework == "torchtitan" and row.cp > 1 else None,
        "overlap_tensor": row.overlap.tensor if row.tp > 1 and row.sequence_parallel else None,
        "expert_dispatcher": row.overlap.expert_dispatcher if row.moe_experts else None,
        "overlap_expert_exchange": _overlaps_exchange(row),
        "schedule": row.overlap.schedule if row.pp > 1 else None,
    }
    if row.moe_experts and row.expert_load:
        fields["expert_load"] = list(row.expert_load)
    if row.overlap.offload_layers:
        fields["offload_layers"] = row.overlap.offload_layers
    if row.task == "lora":
        fields["lora_rank"] = row.lora_rank or stack.lora_rank
    if row.sharding == "zero2" and stack.fully_sharded:
        fields["reshard_after_forward"] = False
    if stack.fusion == "eager" and row.overlap.fused_norm:
        fields["fusion"] = "norm"
    return validate(TrainingRecipe, {key: value for key, value in fields.items() if value is not None})
