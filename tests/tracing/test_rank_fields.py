"""Every field of a recipe and a stack reaches the trace of a rank, has no part in it, or is refused by name."""

import pytest

from echo_explore.core import SpecError
from echo_explore.specs import Candidate, JobOptions, StackProfile, TrainingRecipe, candidate_of
from echo_explore.tracing.rank_fields import NOT_IN_THE_GRAPH, REFUSED, TRACED
from echo_explore.tracing.rank_request import rank_request_of

FIELDS = {
    f"{kind}.{name}" for kind, of in (("recipe", TrainingRecipe), ("stack", StackProfile)) for name in of.model_fields
}


def test_every_field_is_named_once() -> None:
    names = [*TRACED, *REFUSED, *NOT_IN_THE_GRAPH]
    assert len(names) == len(set(names))
    assert set(names) == FIELDS


def job(model: str, layout: str, *changes: str, framework: str = "megatron", stack: str | None = None) -> Candidate:
    return candidate_of(
        JobOptions(
            model=model,
            cluster="h100-ndr",
            layout=layout,
            num_gpus=16,
            global_batch_size=16,
            micro_batch_size=1,
            sequence_length=2048,
            framework=framework,
            stack=stack,
            overrides=changes,
        )
    )


DENSE, EXPERTS = ("llama3-8b", "tp=2,sp=1,pp=2,vpp=2"), ("mixtral-8x7b", "tp=1,ep=8")


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (DENSE, "recipe.global_batch_size=32"),
        (DENSE, "recipe.micro_batch_size=2"),
        (DENSE, "recipe.sequence_length=4096"),
        (DENSE, "recipe.precision=fp8"),
        (DENSE, "recipe.recompute=full"),
        (DENSE, "recipe.attention=unfused"),
        (("llama3-8b", "tp=2,sp=1,cp=2"), "recipe.context_exchange=all_gather"),
        (DENSE, "recipe.fusion=eager"),
        (DENSE, "recipe.optimizer=muon"),
        (DENSE, "recipe.distributed_optimizer=false"),
        (DENSE, "recipe.overlap_grad_reduce=false"),
        (DENSE, "recipe.overlap_param_gather=false"),
        (DENSE, "recipe.overlap_p2p=false"),
        (DENSE, "recipe.gradient_accumulation_fusion=false"),
        (DENSE, "recipe.dropout=0.1"),
        (("llama3-8b", "tp=2,sp=1"), "recipe.lora_rank=8"),
        (EXPERTS, "recipe.expert_dispatcher=deepep"),
        (EXPERTS, "recipe.expert_load=[2, 1, 1, 1, 1, 1, 1, 1]"),
        (DENSE, "stack.bucket_elements=80000000"),
        (DENSE, "stack.gradient_dtype=bf16"),
        (DENSE, "stack.keeps_gathered_inputs=true"),
        (DENSE, "stack.gate_apart=true"),
        (("llama3-8b", "tp=2,sp=0"), "stack.blocking_input_gradients=true"),
        (DENSE, "stack.gathered_loss=true"),
        (DENSE, "stack.reads_sequence_lengths=true"),
        (EXPERTS, "stack.fused_router=true"),
    ],
)  # fmt: skip
def test_a_traced_field_changes_the_request(base: tuple[str, str], change: str) -> None:
    name = change.partition("=")[0]
    assert name in TRACED
    assert rank_request_of(job(*base), 0) != rank_request_of(job(*base, change), 0)


@pytest.mark.parametrize(
    ("base", "framework", "stack", "change"),
    [
        (("llama3-8b", "tp=1"), "megatron", None, "recipe.offload_layers=2"),
        (("llama3-8b", "tp=2,sp=1"), "megatron", None, "recipe.overlap_tensor=true"),
        (("llama3-8b", "tp=2,sp=1"), "torchtitan", None, "recipe.overlap_tensor=true"),
        (EXPERTS, "megatron", None, "recipe.overlap_expert_exchange=true"),
        (("llama3-8b", "tp=1"), "torchtitan", None, "recipe.reshard_after_forward=false"),
        (("llama3-8b", "tp=1"), "fsdp2", None, "stack.sharding.flat_parameters=true"),
        (("llama3-8b", "tp=1"), "fsdp2", None, "stack.sharding.group=host"),
        (("llama3-8b", "tp=1"), "fsdp2", None, "stack.sharding.gather_dtype=fp32"),
        (("llama3-8b", "tp=1"), "ddp", None, "stack.buckets.others=50 MiB"),
        (("llama3-8b", "tp=1,pp=2"), "megatron", None, "recipe.schedule=gpipe"),
    ],
)
def test_what_a_rank_does_not_run_is_refused_by_name(
    base: tuple[str, str], framework: str, stack: str | None, change: str
) -> None:
    name = change.partition("=")[0]
    assert ".".join(name.split(".")[:2]) in REFUSED | {"recipe.reshard_after_forward"}
    rank_request_of(job(*base, framework=framework, stack=stack), 0)
    shown = {"recipe.schedule": "schedule", "stack.buckets.others": "stack.buckets"}.get(name, name)
    with pytest.raises(SpecError, match=f"^{shown} = "):
        rank_request_of(job(*base, change, framework=framework, stack=stack), 0)


@pytest.mark.parametrize("change", ["recipe.reshard_after_forward=false", "stack.sharding.reshard_last_layer=true"])
def test_what_fsdp2_frees_reaches_the_request(change: str) -> None:
    plain, changed = (rank_request_of(job("llama3-8b", "tp=1", *c, framework="fsdp2"), 0) for c in ((), (change,)))
    assert plain != changed


def test_unfused_attention_with_context_parallelism_is_refused_before_any_tracer() -> None:
    with pytest.raises(SpecError, match=r"^attention = 'unfused': context parallelism needs a fused kernel"):
        job("llama3-8b", "cp=2", "recipe.attention=unfused")
