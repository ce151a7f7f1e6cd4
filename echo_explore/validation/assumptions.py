"""What a prediction of a measured run takes for granted: cells that the source leaves empty, and what stands in."""

from collections.abc import Callable, Mapping

from echo_explore.specs import Candidate, load_stack
from echo_explore.validation.clusters import fabric_is_known, rule_of
from echo_explore.validation.mapping import gathers_once, taken_from_file
from echo_explore.validation.rows import MeasuredRow, normal_attention, normal_sharding
from echo_explore.validation.stacks import rule_of_stack

Value = Callable[[Candidate], object]


def _overlap(candidate: Candidate) -> str:
    """What empty flags of overlap follow: the stack's profile, with what matters most spelt out."""
    recipe, stack = candidate.recipe, candidate.stack
    flags = {
        "overlap_grad_reduce": recipe.overlap_grad_reduce,
        "overlap_param_gather": recipe.overlap_param_gather,
        "overlap_tensor": recipe.overlap_tensor,
        "cuda_graphs": stack.cuda_graphs,
    }
    return f"{', '.join(f'{name} {str(value).lower()}' for name, value in flags.items())} of {stack.name}"


DEFAULTS: Mapping[str, Value] = {
    "ffn_hidden_size": lambda c: c.model.ffn_hidden_size,
    "num_kv_heads": lambda c: c.model.num_key_value_heads,
    "activation": lambda c: c.model.activation,
    "gpus_per_node": lambda c: c.cluster.node.num_gpus,
    "dp": lambda c: c.layout.data_parallel,
    "sequence_parallel": lambda c: c.layout.sequence_parallel,
    "distributed_optimizer": lambda c: c.recipe.distributed_optimizer,
    "recompute": lambda c: c.recipe.recompute,
    "flash_attention": lambda c: c.recipe.attention,
    "overlap_flags": _overlap,
}
"""Columns that a source may leave empty, and what the candidate has instead."""


def _stand_ins(row: MeasuredRow, candidate: Candidate) -> list[str]:
    """What stands in for words that say nothing known, and for what no profile, kernel or split is made for."""
    said = {name: row.values.get(name, "").strip() for name in ("gpu", "activation", *_WORDS)}
    parts = []
    rule = rule_of_stack(row)
    if rule is not None and rule.stands_in:
        parts.append(f"stack = {candidate.stack.name} stands in for {row.framework!r}")
    if gathers_once(row) and row.sharding in ("zero2", "zero3"):
        parts.append("zero_stage_or_fsdp = distributed optimizer: memory counts gradients and parameters whole")
    if said["gpu"].lower() != row.gpu.lower():
        parts.append(f"gpu = {row.gpu} for {said['gpu']!r}")
    if said["activation"].lower() == "geglu":
        parts.append("activation = swiglu for 'geglu'")
    for name, known in _WORDS.items():
        if said[name] and not known(said[name]):
            parts.append(f"{name} = as {candidate.stack.name} for {said[name]!r}")
    stack = candidate.stack
    if (split := stack.layer_split_rule) != load_stack(stack.name).layer_split_rule:
        parts.append(f"layers of a stage = {split}, for which {stack.name} has no rule")
    return parts


_WORDS: Mapping[str, Callable[[str], bool]] = {
    "flash_attention": lambda text: normal_attention(text) is not None,
    "zero_stage_or_fsdp": lambda text: normal_sharding(text) != "unknown",
}
"""Columns of free text and whether theirs says something known."""


def assumed_of(row: MeasuredRow, candidate: Candidate | None) -> str:
    """What the source does not say and the prediction takes, as text: `recompute = none; ...`; empty for nothing.

    Args:
        row: the run.
        candidate: what stands for it; None where nothing does.
    """
    parts = [text] if (text := taken_from_file(row)) else []
    if candidate is None:
        return "; ".join(parts)
    parts += [
        f"{name} = {value(candidate)}" for name, value in DEFAULTS.items() if not row.values.get(name, "").strip()
    ]
    parts += _stand_ins(row, candidate)
    rule = rule_of(row)
    if rule is not None and not fabric_is_known(row) and row.num_gpus > row.gpus_per_node:
        parts.append(f"inter_node_fabric = {candidate.cluster.name}" + (f": {rule.why}" if rule.why else ""))
    if candidate.stack.collective_checks and not row.overlap.collective_checks:
        parts.append(f"collective_checks = true of {candidate.stack.name}")
    return "; ".join(parts)
