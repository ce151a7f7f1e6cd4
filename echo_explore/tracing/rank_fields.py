"""What the trace of one whole rank does with every field of a recipe and of a stack: traces, has no use for, refuses.

A new field must be named here: tests/tracing/test_rank_fields.py compares these tables with the fields.
"""

from collections.abc import Mapping
from typing import Final

from echo_explore.core import SpecError
from echo_explore.specs import Candidate
from echo_explore.specs.recompute import recomputes_layers
from echo_explore.specs.sharding import BucketSpec

TRACED: Final = frozenset(
    (
        "recipe.global_batch_size",
        "recipe.micro_batch_size",
        "recipe.sequence_length",
        "recipe.precision",
        "recipe.recompute",
        "recipe.attention",
        "recipe.context_exchange",
        "recipe.fusion",
        "recipe.optimizer",
        "recipe.muon_tp_mode",
        "recipe.muon_split_qkv",
        "recipe.precision_aware_optimizer",
        "recipe.main_params_dtype",
        "recipe.exp_avg_dtype",
        "recipe.exp_avg_sq_dtype",
        "recipe.distributed_optimizer",
        "recipe.overlap_grad_reduce",
        "recipe.overlap_param_gather",
        "recipe.overlap_p2p",
        "recipe.gradient_accumulation_fusion",
        "recipe.dropout",
        "recipe.reshard_after_forward",
        "recipe.expert_dispatcher",
        "recipe.expert_capacity_factor",
        "recipe.pad_expert_input",
        "recipe.expert_load",
        "recipe.overlap_shared_experts",
        "recipe.lora_rank",
        "recipe.lora_targets",
        "stack.framework",
        "stack.layer_split_rule",
        "stack.bucket_elements",
        "stack.gradient_dtype",
        "stack.keeps_gathered_inputs",
        "stack.gate_apart",
        "stack.blocking_input_gradients",
        "stack.gathered_loss",
        "stack.reads_sequence_lengths",
        "stack.fused_loss",
        "stack.fp8_scales",
        "stack.lora_dropout",
        "stack.fused_router",
    )
)
"""They reach the request of a rank."""
REFUSED: Final = frozenset(
    (
        "recipe.schedule",
        "recipe.schedule_lines",
        "recipe.overlap_expert_exchange",
        "recipe.overlap_tensor",
        "recipe.offload_layers",
        "stack.sharding",
        "stack.buckets",
    )
)
"""Values that a whole rank does not run are refused by `check_rank_fields` or the schedule's own check."""
_PRICE = "says what a row takes on GPU or host, not which rows there are"
_MEMORY = "says what lies in memory beside the tensors of the trace"
_NAME = "names the stack"
_RESOLVED = "fills in the recipe, whose own field is traced or refused"
NOT_IN_THE_GRAPH: Final[Mapping[str, str]] = {
    "stack.schema_version": _NAME,
    "stack.name": _NAME,
    "stack.description": _NAME,
    "stack.attention": _RESOLVED,
    "stack.fusion": _RESOLVED,
    "stack.distributed_optimizer": _RESOLVED,
    "stack.overlap_grad_reduce": _RESOLVED,
    "stack.overlap_param_gather": _RESOLVED,
    "stack.overlap_p2p": _RESOLVED,
    "stack.gradient_accumulation_fusion": _RESOLVED,
    "stack.dropout": _RESOLVED,
    "stack.lora_targets": _RESOLVED,
    "stack.lora_rank": "fills in measured runs, not recipes",
    "stack.expert_dispatcher": _RESOLVED,
    "stack.overlap_shared_experts": _RESOLVED,
    "stack.overlap_expert_exchange": _RESOLVED,
    "stack.overlap_tensor": _RESOLVED,
    "stack.tensor_overlap": "is the way of recipe.overlap_tensor, which is refused",
    "stack.logit_metrics": _PRICE,
    "stack.cuda_graphs": _PRICE,
    "stack.graph_scopes": _PRICE,
    "stack.launch_blocking": _PRICE,
    "stack.host_call_s": _PRICE,
    "stack.host_backward_call_s": _PRICE,
    "stack.host_step_s": _PRICE,
    "stack.host_parameter_s": _PRICE,
    "stack.host_sharded_parameter_s": _PRICE,
    "stack.host_modules": _PRICE,
    "stack.host_collective_s": _PRICE,
    "stack.collective_checks": _PRICE,
    "stack.sums_whole_gradients": "no traced framework sums gradients so",
    "stack.summed_gradient_dtype": "no traced framework sums gradients so",
    "stack.nccl_version": _PRICE,
    "stack.nccl_algo": _PRICE,
    "stack.nccl_proto": _PRICE,
    "stack.attention_kernel": _PRICE,
    "stack.kernel_source": _PRICE,
    "stack.experts_apart": _PRICE,
    "stack.fused_experts": _PRICE,
    "stack.compute_scale": _PRICE,
    "stack.memory": _MEMORY,
    "stack.narrow_parameters": _MEMORY,
    "stack.keeps_transposed_weights": _MEMORY,
    "stack.keeps_model_gradients": _MEMORY,
}
"""Fields without a part in the graph of a rank, and why."""


def check_rank_fields(candidate: Candidate) -> None:
    """Refuse what `predict` puts between or around pieces, and a whole rank does not run.

    Raises:
        SpecError: naming the field, of the recipe or of the stack that fills it in.
    """
    recipe, stack = candidate.recipe, candidate.stack
    refusals = (
        ("recipe.offload_layers", recipe.offload_layers, recipe.offload_layers > 0),
        ("recipe.overlap_tensor", True, candidate.overlaps_tensor),
        ("recipe.overlap_expert_exchange", True, candidate.overlaps_exchanges),
        (
            "recipe.reshard_after_forward",
            False,
            stack.framework == "torchtitan" and recipe.reshard_after_forward is False,
        ),
    )
    for name, value, wrong in refusals:
        if wrong:
            off = {"recipe.offload_layers": "0", "recipe.reshard_after_forward": "true"}.get(name, "false")
            raise SpecError(name, value, "is not run in whole ranks", f"predict, or add --set {name}={off}")
    if stack.fully_sharded and stack.sharding.wrapper == "megatron":
        _check_megatron_fsdp(candidate)
    elif stack.fully_sharded:
        _check_sharding(candidate)
    if stack.framework == "ddp" and stack.buckets != BucketSpec():
        raise SpecError("stack.buckets", "(other sizes)", "whole ranks run PyTorch's default", "predict, or leave out")


def _check_megatron_fsdp(candidate: Candidate) -> None:
    """Whole ranks run Megatron-FSDP over all replicas, with the model's own type in flat buffers."""
    spec, precision = candidate.stack.sharding, candidate.recipe.precision
    for name, value, wrong in (
        ("group", spec.group, candidate.num_shards < candidate.num_replicas),
        ("regathers", "true", spec.regathers),
        ("slices", "(given)", spec.slices is not None),
        ("flat_parameters", "false", not spec.flat_parameters),
    ):
        if wrong:
            raise SpecError(f"stack.sharding.{name}", value, "is not what Megatron-FSDP does", "leave it out")
    if precision == "fp32":
        raise SpecError("precision", precision, "is not traced under Megatron-FSDP", "use bf16, or predict")


def _check_sharding(candidate: Candidate) -> None:
    """Whole ranks run `fully_shard` over all replicas, with every parameter by itself."""
    recipe, spec = candidate.recipe, candidate.stack.sharding
    dtype = recipe.precision if recipe.precision in ("fp32", "fp16") else "bf16"
    grads = candidate.stack.gradient_dtype
    if recipe.precision != "fp32" and grads != "fp32":
        raise SpecError("stack.gradient_dtype", grads, "whole ranks of fsdp2 reduce in fp32", "predict, or use fp32")
    again = spec.regathers and recomputes_layers(recipe.recompute)
    for name, value, wrong, fix in (
        ("flat_parameters", "true", spec.flat_parameters, "false"),
        ("regathers", "true", again, "false"),
        ("slices", "(given)", spec.slices is not None, None),
        ("group", spec.group, candidate.num_shards < candidate.num_replicas, "all"),
        ("gather_dtype", spec.gather_dtype, dtype != "fp32" and spec.gather_dtype != dtype, dtype),
    ):
        if wrong:
            change = f"add --set stack.sharding.{name}={fix}" if fix else "use --stack torch-fsdp2"
            raise SpecError(f"stack.sharding.{name}", value, "is not run in whole ranks", f"predict, or {change}")
