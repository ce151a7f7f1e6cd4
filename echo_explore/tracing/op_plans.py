"""What the recorder does with each operator: decided once, from its schema."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echo_explore.tracing import functional_collectives
from echo_explore.tracing.grouped_rules import GROUPED_RULES
from echo_explore.tracing.op_rules import NO_KERNEL, Rule, rule_for, tensor_bytes
from echo_explore.tracing.script_attention import ATTENTION_RULES
from echo_explore.tracing.storages import Access
from echo_explore.tracing.vision_rules import VISION_RULES

MORE_RULES = VISION_RULES | ATTENTION_RULES | GROUPED_RULES
"""Rules of operators that only scripts call."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How an operator is recorded.

    Attributes:
        kind: `kernel`, `collective`, `functional` (collective), `item`, `allocation`, `view` or `query`.
        name: namespace and name, without the overload.
        rule: FLOP, bytes and sizes of a kernel; None for others.
        writes: positions of the arguments that it writes.
    """

    kind: str
    name: str
    rule: Rule | None
    writes: tuple[int, ...]


def plan_of(func: Any) -> Plan:
    """The plan of an operator overload."""
    name = f"{func.namespace}.{func._opname}"
    writes = tuple(
        position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if func.namespace == "prim":  # asked of fake tensors only
        return Plan("query", name, None, writes)
    if func.namespace == "c10d":
        return Plan("collective", name, None, writes)
    if func.namespace == functional_collectives.NAMESPACE:
        return Plan("functional", name, None, writes)
    if name == "aten._local_scalar_dense":
        return Plan("item", name, None, writes)
    if name in NO_KERNEL or func.is_view:
        return Plan("allocation" if "empty" in name else "view", name, None, writes)
    return Plan("kernel", name, MORE_RULES.get(name) or rule_for(func, name), writes)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, list | tuple | dict):
                found += tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            found += tensors_of(item)
    return found


def on_gpu(value: Any) -> list[torch.Tensor]:
    """Those of `tensors_of` that lie on the GPU."""
    return [t for t in tensors_of(value) if t.device.type == "cuda"]


def written_by(plan: Plan, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the GPU that an operator wrote: arguments first, then results that are none of them."""
    written = [t for position in plan.writes for t in on_gpu(args[position : position + 1])]
    return written + [t for t in outputs if not any(t is w for w in written)]


def distinct_bytes(tensors: Sequence[torch.Tensor], accesses: Sequence[Access]) -> float:
    """Bytes of the tensors, each place once."""
    places = {(a.key, a.start, a.stop): tensor_bytes(t) for t, a in zip(tensors, accesses, strict=True)}
    return float(sum(places.values()))
