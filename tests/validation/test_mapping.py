"""Measured runs become candidates by framework, date, flags and dimensions."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core.home import list_data_files
from echo_explore.specs import Candidate
from echo_explore.validation import Declined, MeasuredRow, map_row
from echo_explore.validation.assumptions import assumed_of
from echo_explore.validation.clusters import CLUSTER_RULES, cluster_of
from echo_explore.validation.mapping import model_of
from echo_explore.validation.rows import parse_row
from echo_explore.validation.stacks import STACK_RULES, stack_of
from tests.validation.tables import CELLS


def row(**cells: str) -> MeasuredRow:
    return parse_row(CELLS | cells, where="test")


def mapped(**cells: str) -> Candidate:
    result = map_row(row(**cells))
    assert isinstance(result, Candidate), result
    return result


def declined(**cells: str) -> str:
    result = map_row(row(**cells), supported=lambda candidate: None)
    assert isinstance(result, Declined)
    return result.reason


def test_a_plain_run() -> None:
    candidate = mapped()
    assert candidate.layout.label() == "tp2 pp2 dp2"
    assert candidate.recipe.global_batch_size == 16
    assert (candidate.stack.name, candidate.cluster.name) == ("megatron-core", "a100-80gb-hdr")
    assert candidate.num_gpus == 8


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"framework": "megatron-lm", "framework_version_or_date": "2022-05"}, "megatron-2022"),
        ({"framework": "megatron-lm", "framework_version_or_date": "2021-11"}, "megatron-2022"),
        ({"framework": "megatron-lm", "framework_version_or_date": "2022-09"}, "megatron-2022"),
        ({"framework": "megatron-lm", "framework_version_or_date": "2022-10"}, "megatron-2023"),
        ({"framework": "megatron-lm", "framework_version_or_date": "2023-01"}, "megatron-2023"),
        ({"framework": "megatron-lm", "framework_version_or_date": "2023"}, "megatron-2023"),
        ({"framework": "megatron-lm", "framework_version_or_date": "2021-04 (commit 6985e589)"}, "megatron-2021"),
        ({"framework": "megatron-lm", "framework_version_or_date": "2025-01"}, "megatron-core"),
        ({"framework": "megatron-deepspeed"}, "megatron-deepspeed"),
        ({"framework": "deepspeed zero-3", "framework_version_or_date": "2021-04"}, "deepspeed-zero3"),
        ({"framework": "megatron-bridge"}, "megatron-bridge"),
        ({"framework": "nanotron"}, "nanotron"),
        ({"framework": "gpt-neox"}, "megatron-deepspeed"),
        ({"framework": "aleph-alpha scaling (megatron-like)"}, "aleph-scaling"),
        (
            {"framework": "NeMo 2.1.0, Megatron-LM", "framework_version_or_date": "MLPerf Training v5.1"},
            "nemo-megatron-2025",
        ),
        ({"framework": "NGC PyTorch 24.09", "framework_version_or_date": "MLPerf Training v4.1"}, "nemo-megatron"),
        ({"framework": "NGC PyTorch 25.04", "framework_version_or_date": "MLPerf Training v5.0"}, "nemo-megatron-2025"),
        ({"gpu": "L40S", "framework": "NeMo", "framework_version_or_date": "MLPerf Training v4.1"}, "nemo-megatron"),
        (
            {"gpu": "MI325X", "framework": "PyTorch", "framework_version_or_date": "MLPerf Training v5.1"},
            "rocm-megatron",
        ),
    ],
)
def test_stack_by_framework_and_date(cells: dict[str, str], stack: str) -> None:
    profile = stack_of(row(**cells))
    assert not isinstance(profile, str)
    assert profile.name == stack


def test_megatron_of_2023_overlaps_nothing_and_fuses_accumulation() -> None:
    """Its flags for overlap came in September 2023 and are off (Megatron-LM issue 391)."""
    profile = stack_of(row(framework="megatron-lm", framework_version_or_date="2023-01"))
    older = stack_of(row(framework="megatron-lm", framework_version_or_date="2022-05"))
    assert not isinstance(profile, str)
    assert not isinstance(older, str)
    assert {profile.overlap_grad_reduce, profile.overlap_param_gather, profile.overlap_p2p} == {False}
    assert (older.gradient_accumulation_fusion, profile.gradient_accumulation_fusion) == (False, True)


ALONE = {"tp": "1", "pp": "1", "dp": "8"}


@pytest.mark.parametrize(
    ("framework", "cells", "stack"),
    [
        ("metaseq", {"pp": "1", "framework_version_or_date": "2022-05", "zero_stage_or_fsdp": "fsdp"}, "megatron-2022"),
        ("PyTorch FSDP", ALONE, "llm-foundry-fsdp"),
        ("FSDP", {**ALONE, "attn_extra": "torch.compile"}, "fms-fsdp"),
        ("FSDP", {**ALONE, "attn_extra": "no compile"}, "llm-foundry-fsdp"),
        ("pytorch fsdp2", ALONE, "torchtitan-eager"),
        ("fsdp2", {**ALONE, "attn_extra": "compile by layer"}, "torch-fsdp2"),
        ("PyTorch DDP", ALONE, "torch-ddp"),
        ("deepspeed", {**ALONE, "zero_stage_or_fsdp": "3", "framework_version_or_date": "2021"}, "deepspeed-zero3"),
        ("deepspeed", {**ALONE, "zero_stage_or_fsdp": "3", "framework_version_or_date": "2024"}, "llm-foundry-fsdp"),
        ("deepspeed", {**ALONE, "zero_stage_or_fsdp": "2"}, "llm-foundry-fsdp"),
        ("deepspeed", {"zero_stage_or_fsdp": "1"}, "megatron-deepspeed"),
        ("hai-llm", {"framework_version_or_date": "2024-12", "zero_stage_or_fsdp": "1"}, "megatron-core"),
        ("Colossal-AI", {"framework_version_or_date": "2021-10"}, "megatron-2022"),
        ("colossalai", {"framework_version_or_date": "2024"}, "megatron-core"),
        ("colossal-ai", {**ALONE, "zero_stage_or_fsdp": "gemini zero3"}, "llm-foundry-fsdp"),
        ("hugging face accelerate", {**ALONE, "zero_stage_or_fsdp": "fsdp"}, "llm-foundry-fsdp"),
        ("huggingface trl", {**ALONE, "zero_stage_or_fsdp": "fsdp2"}, "torchtitan-eager"),
        ("transformers", ALONE, "torch-ddp"),
        ("axolotl", {**ALONE, "zero_stage_or_fsdp": "zero2"}, "llm-foundry-fsdp"),
        ("epfllm", {"framework_version_or_date": "2023"}, "megatron-core"),
        ("ms-swift", {"attn_extra": "megatron"}, "megatron-core"),
        ("olmo", {**ALONE, "zero_stage_or_fsdp": "fsdp"}, "llm-foundry-fsdp"),
        ("olmo-core", ALONE, "torch-fsdp2"),
    ],
)
def test_a_framework_without_a_profile_has_the_nearest(framework: str, cells: dict[str, str], stack: str) -> None:
    run = row(framework=framework, **cells)
    candidate = map_row(run)
    assert not isinstance(candidate, Declined), candidate
    assert candidate.stack.name == stack
    assert f"stack = {stack} stands in for {framework.lower()!r}" in assumed_of(run, candidate)


@pytest.mark.parametrize("framework", ["maxtext", "paxml", "mindspeed", "my own trainer"])
def test_other_words_are_declined_with_column_and_value(framework: str) -> None:
    found = map_row(row(framework=framework))
    assert isinstance(found, Declined)
    assert found.reason == f"framework {framework!r} has no stack profile"


def test_parameters_gathered_once_a_step_are_those_of_a_distributed_optimizer() -> None:
    cells = {"framework": "metaseq", "pp": "1", "zero_stage_or_fsdp": "fsdp"}
    candidate = mapped(**cells)
    assert candidate.recipe.distributed_optimizer
    assert "memory counts gradients and parameters whole" in assumed_of(row(**cells), candidate)


def test_a_row_may_name_dualpipe_which_hides_exchanges_of_experts() -> None:
    cells = {"framework": "hai-llm", "gpu": "H800", "num_gpus": "64", "tp": "1", "pp": "4", "dp": "16", "ep": "16"}
    cells |= {"moe_experts": "16", "moe_topk": "2", "moe_ffn_hidden": "1024", "activation": "swiglu"}
    cells |= {"num_heads": "32", "global_batch": "256", "notes": "DualPipe"}
    candidate = mapped(**cells)
    assert (candidate.recipe.schedule, candidate.layout.virtual_pipeline) == ("dualpipe", 2)
    assert candidate.overlaps_exchanges
    assert mapped(**cells, overlap_flags="dispatcher deepep").overlaps_exchanges
    assert not mapped(**(cells | {"pp": "1", "dp": "64"})).overlaps_exchanges
    assert "schedule" in declined(**(cells | {"notes": "schedule=mine"}))


def test_rules_name_shipped_files() -> None:
    assert {rule.cluster for rule in CLUSTER_RULES} <= set(list_data_files("clusters"))
    assert {rule.stack for rule in STACK_RULES if rule.stack} <= set(list_data_files("stacks"))
    assert all(rule.why for rule in CLUSTER_RULES)
    assert all(bool(rule.stack) != bool(rule.reason) for rule in STACK_RULES)


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ({}, "a100-80gb-hdr"),
        ({"inter_node_fabric": "8x200Gb/s HDR IB per node"}, "a100-80gb-hdr"),
        ({"inter_node_fabric": "HDR InfiniBand (per paper)"}, "a100-80gb-hdr (num_nics=4)"),
        ({"inter_node_fabric": "4x100Gb/s Omni-Path per node"},
         "a100-80gb-hdr (num_nics=4, nic_bandwidth_bytes_per_s=1.25e+10)"),
        ({"gpu": "A100-40GB-SXM", "inter_node_fabric": "1600 Gb/s per node RoCE"}, "a100-40gb-hdr (kind=roce)"),
        ({"gpu": "H100-80GB-SXM", "inter_node_fabric": "AWS p5, EFA"}, "h100-p5-efa"),
        ({"gpu": "H100-80GB-SXM", "gpus_per_node": "4"}, "h100-ndr (num_gpus=4, num_nics=4)"),
        ({"gpu": "GB200", "gpus_per_node": "4"}, "gb200-nvl72"),
        ({"gpu": "h100-sxm5-80gb"}, "h100-ndr"),
        ({"gpu": "A800-SXM4-80GB"}, "a100-80gb-hdr (link_bandwidth_bytes_per_s=2e+11)"),
        ({"gpu": "L40S"}, "l40s-pcie"),
        ({"gpu": "H100-80GB-SXM", "inter_node_fabric": "100 Gb/s Ethernet per node"},
         "h100-ndr (num_nics=8, nic_bandwidth_bytes_per_s=1.5625e+09)"),
        ({"gpu": "H100-80GB-SXM", "inter_node_fabric": "4x200Gb/s HDR per node", "gpus_per_node": "4"},
         "h100-ndr (num_gpus=4, num_nics=4, nic_bandwidth_bytes_per_s=2.5e+10)"),
        ({"gpu": "H100-80GB-SXM", "overlap_flags": "SHARP"}, "h100-ndr (in_network_reduction=True)"),
    ],
)  # fmt: skip
def test_cluster_by_gpu_and_fabric(cells: dict[str, str], name: str) -> None:
    cluster = cluster_of(row(**cells))
    assert cluster is not None
    assert cluster.name == name


def test_cluster_grows_to_the_run() -> None:
    cluster = cluster_of(row(num_gpus="80000"))
    assert cluster is not None
    assert cluster.max_gpus == 80000


def test_models_by_their_dimensions() -> None:
    gpt = model_of(row())
    assert (gpt.normalization, gpt.position_embedding, gpt.tied_embeddings, gpt.linear_bias) == (
        "layernorm",
        "learned",
        True,
        True,
    )
    llama = model_of(row(activation="swiglu", num_kv_heads="8", attn_extra="head_dim64"))
    assert (llama.normalization, llama.position_embedding, llama.tied_embeddings) == ("rmsnorm", "rope", False)
    assert (llama.num_key_value_heads, llama.head_dim) == (8, 64)
    assert model_of(row(attn_extra="alibi")).position_embedding == "alibi"
    assert model_of(row(activation="swiglu", notes="tied embeddings=True")).tied_embeddings
    extra = "MLA q_lora1536 kv_lora512 rope64 nope128 v128; 3 dense layers; 1 shared expert 2048"
    deepseek = model_of(
        row(activation="swiglu", moe_experts="64", moe_topk="8", moe_ffn_hidden="2048", attn_extra=extra)
    )
    assert deepseek.moe is not None
    assert deepseek.mla is not None
    assert (deepseek.moe.first_dense_layers, deepseek.moe.shared_ffn_hidden_size) == (3, 2048)
    assert (deepseek.mla.q_lora_rank, deepseek.mla.v_head_dim) == (1536, 128)


def test_what_a_run_says_wins_over_its_stack() -> None:
    recipe = mapped(distributed_optimizer="False", overlap_flags="no DP overlap", flash_attention="False").recipe
    assert (recipe.distributed_optimizer, recipe.overlap_grad_reduce, recipe.attention) == (False, False, "unfused")
    assert mapped().recipe.distributed_optimizer is True
    assert mapped(framework="nanotron", zero_stage_or_fsdp="1").recipe.distributed_optimizer is True
    assert mapped(overlap_flags="cuda_graph full_iteration").stack.cuda_graphs
    assert mapped(overlap_flags="CUDA_LAUNCH_BLOCKING=1").stack.launch_blocking
    assert mapped(overlap_flags="kernel=flash_attentionv1.0.8").stack.compute_scale == {"attention": 2.0}


def test_row_wise_scales_are_read_from_the_precision() -> None:
    titan = {"framework": "torchtitan", "gpu": "H100-80GB-SXM", "pp": "1", "dp": "8", "tp": "1"}
    for precision, scales in (("fp8-tensorwise", "tensor"), ("fp8-rowwise", "row"), ("fp8_row_wise", "row")):
        assert stack_of(row(**titan, precision=precision)).fp8_scales == scales  # type: ignore[union-attr]


def test_current_scaling_reads_arrays_before_the_cast_and_delayed_scaling_does_not() -> None:
    """Megatron-Bridge's fp8 recipes are current scaling, whatever a table calls them; NeMo's of MLPerf delayed."""
    for framework, precision, scales in (
        ("nemo", "fp8-cs", "tensor"),
        ("nemo", "FP8_CS", "tensor"),
        ("nemo", "fp8 current scaling", "tensor"),
        ("nemo", "fp8", "known"),
        ("megatron-bridge", "fp8", "tensor"),
    ):
        profile = stack_of(row(framework=framework, precision=precision))
        assert profile.fp8_scales == scales  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"framework": "megatron-fsdp", "tp": "1", "pp": "2", "dp": "4"}, "layout.pp = 2: is not traced for fsdp2"),
        ({"framework": "torchtitan", "pp": "2", "dp": "4", "tp": "1"}, "layout.pp = 2: is not traced for torchtitan"),
        ({"framework": "jax"}, "framework 'jax' has no stack profile"),
        ({"gpu": "TPUv5"}, "no cluster for GPU 'TPUv5'"),
        ({"task": "distillation"}, "task distillation is not represented yet"),
        ({"zero_stage_or_fsdp": "3"}, "sharded gradients and parameters"),
        ({"recompute": "selective:attn"}, "recompute 'selective:attn' is not represented yet"),
        ({"overlap_flags": "optimizer cpu offload"}, "what is moved to host memory is not represented yet"),
        ({"overlap_flags": "act cpu offload 20 layers"}, "recipe.offload_layers = 20: does not go with pipeline"),
        ({"precision": "int4"}, "precision 'int4' is not known"),
        ({"precision": "fp8"}, "precision = 'fp8': A100-SXM4-80GB has no such rate; fix: use one of"),
        ({"dp": "3"}, "tp*pp*dp*cp = 12: is not num_gpus = 8"),
        ({"global_batch": "17"}, "global_batch_size = 17: must be divisible"),
        ({"micro_batch": "0"}, "micro_batch_size = 0: must be 1 or more"),
        ({"num_heads": "33"}, "hidden_size = 4096: is not divisible by num_attention_heads = 33"),
    ],
)  # fmt: skip
def test_reasons(cells: dict[str, str], reason: str) -> None:
    assert declined(**cells).startswith(reason)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (
            {"cp": "2", "dp": "1", "flash_attention": "False"},
            "attention: context parallelism needs a fused kernel; use flash",
        ),
    ],
)
def test_capability_switches_runs_on(cells: dict[str, str], reason: str) -> None:
    assert map_row(row(**cells)) == Declined(reason=reason)
    assert isinstance(map_row(row(**cells), supported=lambda candidate: None), Candidate)


def test_experts_beside_tensor_parallelism_imply_sequence_parallelism() -> None:
    cells = {"moe_experts": "8", "moe_topk": "2", "activation": "swiglu", "moe_ffn_hidden": "2048"}
    assert mapped(**cells).layout.sequence_parallel


@given(name=st.text(max_size=20), family=st.text(max_size=20), source=st.text(max_size=20))
def test_names_decide_nothing(name: str, family: str, source: str) -> None:
    original: Any = map_row(row())
    other: Any = map_row(row(id=name, family=family, source=source))
    assert other == original
    assert other.hash == original.hash


def test_the_tables_of_rules_are_in_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")
    for rule in CLUSTER_RULES:
        pattern = rule.gpu.replace("|", "\\|")
        assert any(line.startswith(f"| `{pattern}` |") and rule.why in line for line in text.splitlines()), rule
    for stack in STACK_RULES:
        assert stack.stack is None or f"`{stack.stack}`" in text


def test_torchtitan_by_layer_is_every_second_layer() -> None:
    cells = {"framework": "torchtitan", "tp": "1", "pp": "1", "dp": "8", "attn_extra": "no compile"}
    assert mapped(**cells, recompute="selective(layer)").recipe.recompute == "full:every:2"
    assert mapped(**cells, recompute="selective(op)").recipe.recompute == "selective"


def test_megatron_fsdp_with_activations_in_host_memory() -> None:
    cells = {"framework": "megatron-bridge", "zero_stage_or_fsdp": "megatron-fsdp 64", "recompute": "none"}
    cells |= {"tp": "1", "pp": "1", "dp": "8", "overlap_flags": "act cpu offload 20 layers"}
    candidate = mapped(**cells)
    assert (candidate.stack.name, candidate.recipe.offload_layers) == ("megatron-fsdp", 20)
    assert mapped(recompute="none").recipe.offload_layers == 0


def test_the_width_of_adapters_comes_from_the_name_or_the_stack() -> None:
    named = mapped(task="lora", model_name="Llama2-70B LoRA r16")
    unnamed = mapped(task="lora")
    assert (named.recipe.lora_rank, unnamed.recipe.lora_rank) == (16, unnamed.stack.lora_rank)
    assert named.recipe.lora_targets == named.stack.lora_targets
    assert mapped().recipe.lora_rank == 0


@pytest.mark.parametrize(("flags", "checked"), [("", False), ("TORCH_DISTRIBUTED_DEBUG=DETAIL", True)])
def test_checks_of_collectives_follow_the_flags_and_no_id(flags: str, checked: bool) -> None:
    for run in ("run-1", "nanosweep-14098623-1"):
        profile = stack_of(row(id=run, framework="nanotron", num_gpus="16", dp="4", overlap_flags=flags))
        assert not isinstance(profile, str)
        assert profile.collective_checks == checked


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"notes": "pp engine fixed=True"}, "nanotron-2025-multi-host"),
        ({"framework_version_or_date": "2025-03"}, "nanotron-2025-multi-host"),
        ({"notes": "pp engine fixed=False"}, "nanotron"),
        ({"framework_version_or_date": "2024-12..2025-02"}, "nanotron"),
        ({"notes": "pp engine fixed=True", "num_gpus": "8", "dp": "2"}, "nanotron"),
    ],
)
def test_nanotron_after_its_fix_checks_collectives_on_several_hosts(cells: dict[str, str], stack: str) -> None:
    """Its launch scripts of February 2025 do; the run's id says nothing."""
    for run in ("run-1", "run-14098623"):
        profile = stack_of(row(id=run, **({"framework": "nanotron", "num_gpus": "16", "dp": "4"} | cells)))
        assert not isinstance(profile, str)
        assert (profile.name, profile.collective_checks) == (stack, stack != "nanotron")


def test_a_run_whose_layers_do_not_divide_had_some_split() -> None:
    """Llama 3 405B: 126 layers on 16 stages of 8 chunks, one layer less at both ends (arXiv 2407.21783, 3.3.2)."""
    cells = {"num_layers": "14", "pp": "4", "vpp": "2", "num_gpus": "16", "dp": "2", "attn_extra": "alibi"}
    layers = mapped(**cells).chunk_layers
    assert sum(layers) == 14
    assert min(layers) >= 1


def test_a_geglu_is_priced_as_a_swiglu() -> None:
    assert mapped(activation="geglu").model == mapped(activation="swiglu").model
