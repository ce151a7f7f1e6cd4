"""Which software stack a measured run used: one table by framework and date."""

import re
from dataclasses import dataclass

from echo_explore.specs import StackProfile, load_stack
from echo_explore.validation.rows import MeasuredRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRule:
    """A kind of framework and the stack profile that stands for it.

    Attributes:
        framework: regular expression found in the framework column, in lower case.
        version: regular expression found in the version column.
        gpu: regular expression found at the start of the GPU column.
        extra: regular expression found in attn_extra, case ignored.
        sharding: regular expression found in zero_stage_or_fsdp, case ignored.
        mixture: only mixtures of experts.
        several_hosts: only runs on more than one host.
        notes: regular expression found in notes, case ignored.
        stack: name of a shipped stack profile, or None.
        reason: why there is none.
    """

    framework: str
    version: str = ""
    gpu: str = ""
    extra: str = ""
    sharding: str = ""
    mixture: bool = False
    several_hosts: bool = False
    notes: str = ""
    stack: str | None = None
    reason: str = ""


STACK_RULES = (
    StackRule(framework=r"deepspeed zero-3", stack="deepspeed-zero3"),
    StackRule(framework=r"megatron.fsdp", stack="megatron-fsdp"),
    StackRule(framework=r"megatron", sharding=r"megatron.fsdp", stack="megatron-fsdp"),
    StackRule(framework=r"llm-foundry", gpu=r"H\d", stack="llm-foundry-fsdp-hopper"),
    StackRule(framework=r"llm-foundry", stack="llm-foundry-fsdp"),
    StackRule(framework=r"fms-fsdp", stack="fms-fsdp"),
    StackRule(framework=r"torchtitan", extra=r"no compile", stack="torchtitan-eager"),
    StackRule(framework=r"torchtitan", version=r"^202[45]", gpu=r"H\d", stack="torchtitan-2025-hopper"),
    StackRule(framework=r"torchtitan", stack="torchtitan-fsdp2"),
    StackRule(framework=r"fsdp", reason="no stack profile describes this use of fully sharded data parallelism"),
    StackRule(framework=r"gpt-neox", stack="megatron-deepspeed"),  # Megatron's layers, DeepSpeed's engine: 2204.06745
    StackRule(framework=r"megatron-deepspeed", stack="megatron-deepspeed"),
    StackRule(framework=r"aleph-alpha", stack="aleph-scaling"),
    StackRule(framework=r"megatron-lm", version=r"^202(0|1-0[1-9])", stack="megatron-2021"),
    StackRule(framework=r"megatron-lm", version=r"^(202[01]|2022(?!-1[0-2]))", stack="megatron-2022"),
    StackRule(framework=r"megatron-lm", version=r"^202[23]", stack="megatron-2023"),
    StackRule(framework=r"megatron-lm|megatron-core", stack="megatron-core"),
    StackRule(
        framework=r"megatron-bridge",
        version=r"\b26\.(0[6-9]|1\d)",
        gpu=r"GB\d",
        mixture=True,
        stack="megatron-bridge-graphs",
    ),
    StackRule(framework=r"megatron-bridge", stack="megatron-bridge"),
    # Its launch scripts of February 2025 check collectives; its pipeline engine was fixed as late (docs/validation.md).
    StackRule(
        framework=r"nanotron",
        several_hosts=True,
        notes=r"\bpp engine fixed=true\b",
        stack="nanotron-2025-multi-host",
    ),
    StackRule(framework=r"nanotron", version=r"^2025", several_hosts=True, stack="nanotron-2025-multi-host"),
    StackRule(framework=r"nanotron", stack="nanotron"),
    StackRule(framework=r"", version=r"^MLPerf Training v5", gpu=r"(A|H|B|GB|L)\d", stack="nemo-megatron-2025"),
    StackRule(framework=r"", version=r"^MLPerf Training", gpu=r"(A|H|B|GB|L)\d", stack="nemo-megatron"),
    StackRule(framework=r"nemo", stack="nemo-megatron"),
    StackRule(framework=r"", version=r"^MLPerf Training", gpu=r"MI\d", stack="rocm-megatron"),
)
"""Every framework that measured tables name; first match wins. MLPerf rows name containers, all of which run NeMo."""


FIRST_FLASH_SCALE = 2.0
"""Time of FlashAttention 1 over FlashAttention 2 ("around 2x": arXiv 2307.08691 (2023), abstract)."""


def _with_flags(profile: StackProfile, row: MeasuredRow) -> StackProfile:
    """The profile with what the run's flags change in it."""
    update: dict[str, object] = {}
    if row.overlap.cuda_graphs is not None:
        update["cuda_graphs"] = row.overlap.cuda_graphs
    if row.overlap.graph_scopes:
        update["graph_scopes"] = row.overlap.graph_scopes
    if row.overlap.launch_blocking:
        update["launch_blocking"] = True
    if row.overlap.collective_checks:
        update["collective_checks"] = True
    if profile.layer_split_rule == "none" and row.num_layers % (row.pp * row.vpp):
        # The run had some split: ends take less, as with Megatron's account_for_embedding_in_pipeline_split.
        update["layer_split_rule"] = "balanced"
    if row.overlap.narrow_reduction:
        update["gradient_dtype"] = "bf16"
    precision = row.values.get("precision", "").lower().replace("_", "-")
    if re.search(r"row-?wise", precision):
        update["fp8_scales"] = "row"
    elif re.search(r"\b(cs|current)\b", precision):  # Float8CurrentScaling: Transformer Engine 2, quantizer.cpp (2025)
        update["fp8_scales"] = "tensor"
    if row.overlap.first_flash:
        scale = profile.compute_scale.get("attention", 1.0) * FIRST_FLASH_SCALE
        update["compute_scale"] = profile.compute_scale | {"attention": scale}
    return profile.model_copy(update=update)


def stack_of(row: MeasuredRow) -> StackProfile | str:
    """The stack profile of the run, with what its flags say; or why there is none."""
    for rule in STACK_RULES:
        if not re.search(rule.framework, row.framework) or not re.search(rule.version, row.version):
            continue
        if not re.match(rule.gpu, row.gpu, re.I) or not re.search(rule.extra, row.extra, re.IGNORECASE):
            continue
        if not re.search(rule.sharding, row.values.get("zero_stage_or_fsdp", ""), re.IGNORECASE):
            continue
        if rule.mixture and not row.moe_experts:
            continue
        if rule.several_hosts and row.num_gpus <= row.gpus_per_node:
            continue
        if not re.search(rule.notes, row.values.get("notes", ""), re.IGNORECASE):
            continue
        if rule.stack is None:
            return rule.reason
        return _with_flags(load_stack(rule.stack), row)
    return f"framework {row.framework!r} has no stack profile"
