"""What-if factors: multiply the time of one cause and see what the step becomes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo_explore.core import SpecError, nearest
from echo_explore.graph import Axis, OpClass
from echo_explore.simulate.hardware import HARDWARE
from echo_explore.specs import load_cluster

_AXES = {
    "tensor": (Axis.TENSOR,),
    "context": (Axis.CONTEXT,),
    "expert": (Axis.EXPERT, Axis.EXPERT_DATA, Axis.EXPERT_TENSOR, Axis.EXPERT_MODEL),
    "data": (Axis.DATA,),
    "pipeline": (Axis.PIPELINE, Axis.EMBEDDING),
}
_CLASSES = {op_class.name.lower(): op_class for op_class in OpClass if op_class != OpClass.NONE}
LARGEST_FACTOR = 1e6
"""Beyond this a factor is a slip, and sums of times lose their digits."""
TIMES = ("compute", "communication", "host", "interference", *_AXES, *_CLASSES)
"""Causes whose times a what-if may multiply."""
NAMES = (*TIMES, *HARDWARE, "overlap", "gpu")
_WORDS = {("interference", "none"): 0.0}
"""Words that stand for factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Factors on times, 1 where not given: `compute=0.5` halves every kernel, `tensor=0` makes tensor traffic free,
    `interference=0` or `none` lets kernels and transfers run beside each other at full speed. Names of
    `hardware.HARDWARE` multiply figures of the cluster instead: `bandwidth=2x` doubles those of all links.

    Attributes:
        factors: by name.
        perfect_overlap: every transfer runs beside compute (`overlap=perfect`).
        gpu: cluster whose GPU replaces the candidate's; empty: none.
    """  # noqa: D205

    factors: dict[str, float] = field(default_factory=dict)
    perfect_overlap: bool = False
    gpu: str = ""

    def kernel_factor(self, op_class: OpClass) -> float:
        """Factor on kernels of that class."""
        return self.factors.get("compute", 1.0) * self.factors.get(op_class.name.lower(), 1.0)

    def axis_factor(self, axis: Axis) -> float:
        """Factor on collectives and transfers of that axis."""
        name = next((n for n, axes in _AXES.items() if axis in axes), "")
        return self.factors.get("communication", 1.0) * self.factors.get(name, 1.0)

    @property
    def interference_factor(self) -> float:
        """Factor on what kernels and transfers take longer because they share a GPU."""
        return self.factors.get("interference", 1.0)

    @property
    def host_factor(self) -> float:
        """Factor on host times."""
        return self.factors.get("host", 1.0)


def parse_what_if(texts: Sequence[str]) -> WhatIf:
    """The factors in `NAME=VALUE` texts.

    Raises:
        SpecError: unknown name, repeated name, or a value that is not a number from 0 to LARGEST_FACTOR.
    """
    factors: dict[str, float] = {}
    gpu, perfect = "", False
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in NAMES:
            fix = f"did you mean {', '.join(nearest(name, NAMES))}? All: {', '.join(NAMES)}"
            raise SpecError("what-if", text, f"unknown name {name!r}", fix)
        if name in factors or (name == "gpu" and gpu) or (name == "overlap" and perfect):
            raise SpecError("what-if", text, f"{name} is given twice", "give each name once")
        if name == "gpu":
            gpu = value
            load_cluster(value)
            continue
        if name == "overlap":
            if value != "perfect":
                raise SpecError("what-if", text, "the value must be perfect", "write overlap=perfect")
            perfect = True
            continue
        try:
            number = value.removesuffix("x") if name in HARDWARE else value
            factor = _WORDS[name, value] if (name, value) in _WORDS else float(number)
        except ValueError:
            factor = math.nan
        if not 0 <= factor <= LARGEST_FACTOR:
            rule = f"the value must be a number from 0 to {LARGEST_FACTOR:g}"
            raise SpecError("what-if", text, rule, f"write {name}=0.5")
        if name in HARDWARE and not factor > 0.0 and "latency" not in name:
            raise SpecError("what-if", text, "a rate must stay above 0", f"write {name}=2x")
        factors[name] = factor
    return WhatIf(factors=factors, perfect_overlap=perfect, gpu=gpu)
