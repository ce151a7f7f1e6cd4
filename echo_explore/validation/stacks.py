"""Which software stack a measured run used: one table by framework and date."""

import re
from dataclasses import dataclass
from typing import Any

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
        stands_in: the profile is that of another framework, the nearest by documented behaviour.
        gathers_once: parameters that it shards are gathered once a step and kept, so that Megatron's distributed
            optimizer moves the same bytes.
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
    stands_in: bool = False
    gathers_once: bool = False


_SHARDED = r"fsdp|hsdp|zero-?[23]|^\s*[23]|gemini"
"""Cells of zero_stage_or_fsdp where gradients, or parameters too, are sharded."""
_TRAINER = r"hugging ?face|transformers|accelerate|\btrl\b|axolotl|\bswift\b"
"""Frameworks that run the Trainer of transformers."""


def _stand_in(framework: str, stack: str, **conditions: Any) -> StackRule:
    return StackRule(framework=framework, stack=stack, stands_in=True, **conditions)


STAND_INS = (
    # arXiv 2205.01068 (2022), section 2.2 and metaseq's opt_baselines: Megatron-LM's tensor parallelism, FSDP with
    # no-reshard-after-forward, full recomputation; dropout and softmax are kernels of their own.
    _stand_in(r"metaseq", "megatron-2022", gathers_once=True),
    # DeepSeek-V3, arXiv 2412.19437 (2024), section 3.2: ZeRO-1, experts and stages as Megatron-core splits them.
    _stand_in(r"hai-?llm", "megatron-core"),
    # epfLLM/Megatron-LLM (2023), ms-swift's Megatron-SWIFT (2025), Pai-Megatron-Patch (2023 on): forks of Megatron-LM.
    _stand_in(r"epf-?llm|megatron-(llm|swift)|ms-swift|pai-megatron", "megatron-core"),
    _stand_in(r"\bswift\b", "megatron-core", extra=r"megatron"),
    _stand_in(r"^megatron$", "megatron-2022", version=r"^20(2[01]|22(?!-1[0-2]))"),
    _stand_in(r"^megatron$", "megatron-2023", version=r"^202[23]"),
    _stand_in(r"^megatron$", "megatron-core"),
    # Colossal-AI (arXiv 2110.14883, 2021): Megatron's splits; ShardFormer (0.3, 2023) with flash attention and ZeRO-1;
    # Gemini shards parameters by chunk, gathers them for every layer and frees them.
    _stand_in(r"colossal", "llm-foundry-fsdp", sharding=_SHARDED),
    _stand_in(r"colossal", "megatron-2022", version=r"^202[0-2]"),
    _stand_in(r"colossal", "megatron-core"),
    # DeepSpeed: ZeRO-3 of 2020 to 2022 as deepspeed-zero3; later it prefetches layer by layer (0.8, 2023,
    # partitioned_param_coordinator.py) like FSDP1; ZeRO-2 keeps parameters whole (arXiv 1910.02054, section 5).
    _stand_in(r"deepspeed", "deepspeed-zero3", version=r"^202[0-2]", sharding=r"zero-?3|^\s*3"),
    _stand_in(r"deepspeed.*zero-?[23]", "llm-foundry-fsdp"),
    _stand_in(r"deepspeed", "llm-foundry-fsdp", sharding=_SHARDED),
    _stand_in(r"deepspeed", "megatron-deepspeed"),
    # OLMo-core (2024-12 on): FSDP2 and torch.compile by layer; OLMo (arXiv 2402.00838, 2024): FSDP1, not compiled.
    _stand_in(r"olmo-?core", "torch-fsdp2"),
    _stand_in(r"\bolmo\b", "llm-foundry-fsdp"),
    # torch 2.4 (2024) on: fully_shard; what is compiled says so. Before: FSDP1, flat parameters by layer, eager.
    _stand_in(r"fsdp-?2|fully_?shard", "torch-fsdp2", extra=r"(?<!no )\bcompile"),
    _stand_in(r"fsdp-?2|fully_?shard", "torchtitan-eager"),
    _stand_in(r"\bfsdp", "fms-fsdp", extra=r"(?<!no )\bcompile"),
    _stand_in(r"\bfsdp", "llm-foundry-fsdp"),
    _stand_in(r"\bddp\b|distributeddataparallel", "torch-ddp"),
    # transformers 4 and 5 and accelerate run DDP, FSDP1 (FSDP2 from accelerate 1.3, 2025) or DeepSpeed, eager; trl and
    # axolotl run their Trainer.
    _stand_in(_TRAINER, "torchtitan-eager", sharding=r"fsdp-?2"),
    _stand_in(_TRAINER, "llm-foundry-fsdp", sharding=_SHARDED),
    _stand_in(_TRAINER, "torch-ddp"),
)
"""Frameworks without a profile of their own, and the nearest one by what they document; the column `assumed` says so.

Profiles of 2023 and 2024 on Ampere stand for sharding under plain PyTorch, whose attention is a fused kernel too."""

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
    StackRule(framework=r"gpt-neox", stack="megatron-deepspeed"),  # Megatron's layers, DeepSpeed's engine: 2204.06745
    StackRule(framework=r"megatron-deepspeed", stack="megatron-deepspeed"),
    StackRule(framework=r"aleph-alpha", stack="aleph-scaling"),
    StackRule(framework=r"megatron-lm", version=r"^202(0|1-0[1-9])", stack="megatron-2021"),
    StackRule(framework=r"megatron-lm", version=r"^(202[01]|2022(?!-1[0-2]))", stack="megatron-2022"),
    StackRule(framework=r"megatron-lm", version=r"^202[23]", stack="megatron-2023"),
    # An MLPerf submission lists libraries of its container, Megatron-LM among them, and runs NeMo.
    StackRule(framework=r"megatron-lm|megatron-core", version=r"^(?!MLPerf)", stack="megatron-core"),
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
    *STAND_INS,
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


def rule_of_stack(row: MeasuredRow) -> StackRule | None:
    """The first rule that the run meets."""
    return next((rule for rule in STACK_RULES if _meets(row, rule)), None)


def _meets(row: MeasuredRow, rule: StackRule) -> bool:
    return (
        bool(re.search(rule.framework, row.framework))
        and bool(re.search(rule.version, row.version))
        and bool(re.match(rule.gpu, row.gpu, re.IGNORECASE))
        and bool(re.search(rule.extra, row.extra, re.IGNORECASE))
        and bool(re.search(rule.sharding, row.values.get("zero_stage_or_fsdp", ""), re.IGNORECASE))
        and bool(re.search(rule.notes, row.values.get("notes", ""), re.IGNORECASE))
        and not (rule.mixture and not row.moe_experts)
        and not (rule.several_hosts and row.num_gpus <= row.gpus_per_node)
    )


def stack_of(row: MeasuredRow) -> StackProfile | str:
    """The stack profile of the run, with what its flags say; or why there is none."""
    rule = rule_of_stack(row)
    if rule is None:
        return f"framework {row.framework!r} has no stack profile"
    return rule.reason if rule.stack is None else _with_flags(load_stack(rule.stack), row)
