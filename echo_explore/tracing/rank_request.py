"""What the trace of one whole rank is asked for: a trace request, and everything a trace of pieces leaves out."""

from dataclasses import dataclass, replace
from typing import Any

from echo_explore.core import SpecError
from echo_explore.specs import Candidate
from echo_explore.tracing.rank_fields import check_rank_fields
from echo_explore.tracing.request import TraceRequest, request_from_json, request_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """One iteration of one rank of a whole job.

    Attributes:
        trace: model, tensor parallelism, batch, precision, kernels.
        rank: global rank that is played.
        chunk_layers: layers of each chunk in model order.
        bucket_elements: elements after which a gradient bucket is closed.
        optimizer, muon_tp_mode, muon_split_qkv: see TrainingRecipe.
        precision_aware_optimizer, main_params_dtype, exp_avg_dtype, exp_avg_sq_dtype: see TrainingRecipe.
        reshard_after_forward: fsdp2 frees gathered parameters of layers between forward and backward.
        reshard_last_layer: those of the last layer too.
        megatron_fsdp: Megatron's model under Megatron-FSDP, not under its DistributedDataParallel.
    """

    trace: TraceRequest
    rank: int
    pipeline_parallel: int
    virtual_pipeline: int
    data_parallel: int
    num_micro_batches: int
    chunk_layers: tuple[int, ...]
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    overlap_p2p: bool
    bucket_elements: int
    optimizer: str = "adam"
    muon_tp_mode: str = "blockwise"
    muon_split_qkv: bool = True
    precision_aware_optimizer: bool = False
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    reshard_after_forward: bool = True
    reshard_last_layer: bool = True
    megatron_fsdp: bool = False

    def to_json(self) -> dict[str, Any]:
        """A plain JSON value from which `rank_request_from_json` makes it again."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return value | {"trace": self.trace.to_json(), "chunk_layers": list(self.chunk_layers)}


def rank_request_from_json(value: dict[str, Any]) -> RankRequest:
    """The request of which `to_json` made `value`."""
    trace = request_from_json(value["trace"])
    return RankRequest(**value | {"trace": trace, "chunk_layers": tuple(value["chunk_layers"])})


def rank_request_of(candidate: Candidate, rank: int) -> RankRequest:
    """One iteration of one rank of a candidate.

    Raises:
        SpecError: the job has no such rank, or asks for what whole ranks do not run.
    """
    layout, recipe = candidate.layout, candidate.recipe
    if not 0 <= rank < candidate.num_gpus:
        raise SpecError("rank", rank, f"must be 0 to {candidate.num_gpus - 1}", "choose a rank of the job")
    if candidate.recipe.schedule not in ("auto", candidate.schedule_by_default):
        raise SpecError(
            "schedule", candidate.recipe.schedule, "is not Megatron's, whose own program is traced", "leave it out"
        )
    if recipe.optimizer == "muon" and candidate.model.moe is not None:
        rule = "is not traced in whole ranks with experts, which share one tensor there"
        raise SpecError("recipe.optimizer", "muon", rule, "use adam, or predict")
    check_rank_fields(candidate)
    sharded = candidate.stack.fully_sharded and candidate.stack.sharding.wrapper == "megatron"
    trace = request_of(candidate)
    return RankRequest(
        trace=_as_megatron(trace, candidate) if sharded else trace,
        rank=rank,
        pipeline_parallel=layout.pipeline_parallel,
        virtual_pipeline=layout.virtual_pipeline,
        data_parallel=layout.data_parallel,
        num_micro_batches=candidate.num_micro_batches,
        chunk_layers=candidate.chunk_layers,
        distributed_optimizer=bool(recipe.distributed_optimizer),
        overlap_grad_reduce=bool(recipe.overlap_grad_reduce),
        overlap_param_gather=bool(recipe.overlap_param_gather and recipe.distributed_optimizer),
        overlap_p2p=bool(recipe.overlap_p2p),
        optimizer=recipe.optimizer,
        muon_tp_mode=recipe.muon_tp_mode or "blockwise",
        muon_split_qkv=recipe.muon_split_qkv is not False,
        precision_aware_optimizer=recipe.precision_aware_optimizer,
        main_params_dtype=recipe.main_params_dtype or "fp32",
        exp_avg_dtype=recipe.exp_avg_dtype or "fp32",
        exp_avg_sq_dtype=recipe.exp_avg_sq_dtype or "fp32",
        reshard_after_forward=recipe.reshard_after_forward is not False,
        megatron_fsdp=sharded,
        reshard_last_layer=candidate.stack.sharding.reshard_last_layer,
        # Megatron-LM 0.16, training.py: max(40000000, 1000000 * dp)
        bucket_elements=max(candidate.stack.bucket_elements, 1_000_000 * layout.data_parallel),
    )


def _as_megatron(trace: TraceRequest, candidate: Candidate) -> TraceRequest:
    """The request of Megatron's own model, where a stack's pieces are those of plain PyTorch."""
    narrow = candidate.stack.main_gradient_dtype(candidate.recipe.precision) != "fp32"
    if trace.gradient_accumulation_fusion and not narrow:
        rule = "is not traced under Megatron-FSDP with weight gradients that are added into fp32 buffers"
        fix = "add --set recipe.gradient_accumulation_fusion=false, or predict"
        raise SpecError("stack.gradient_dtype", candidate.stack.gradient_dtype, rule, fix)
    return replace(trace, framework="megatron", narrow_gradients=narrow, fused_loss=False)
