"""What-if factors: multiply the time of one cause and see what the step becomes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo_explore.core import SpecError, nearest
from echo_explore.graph import Axis, OpClass
from echo_explore.simulate.disturbances import (
    AXES,
    LARGEST_FACTOR,
    LEAST_FACTOR,
    Disturbed,
    SlowRanks,
    broken_links,
    jitter,
    known_cluster,
    other_gpus,
    slow_ranks,
)
from echo_explore.simulate.hardware import HARDWARE

_CLASSES = {op_class.name.lower(): op_class for op_class in OpClass if op_class != OpClass.NONE}
TIMES = ("compute", "communication", "host", "interference", "stragglers", *AXES, *_CLASSES)
"""Causes whose times a what-if may multiply."""
NAMES = (*TIMES, *HARDWARE, "overlap", "gpu", "slow_rank", "broken_link", "mixed_gpu", "jitter")
_NAMES_OF_AXES = {axis: name for name, axes in AXES.items() for axis in axes}
_WORDS = {("interference", "none"): 0.0, ("stragglers", "none"): 0.0}
"""Words that stand for factors."""
_EXAMPLE = {True: "2x", False: "0.5"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Factors on times, 1 where not given: `compute=0.5` halves every kernel, `tensor=0` makes tensor traffic free,
    `interference=0` or `none` lets kernels and transfers run beside each other at full speed, `stragglers=0` or `none`
    makes all GPUs equal. Names of
    `hardware.HARDWARE` multiply figures of the cluster instead: `bandwidth=2x` doubles those of all links.

    Attributes:
        factors: by name.
        perfect_overlap: every transfer runs beside compute (`overlap=perfect`).
        gpu: cluster whose GPU replaces the candidate's; empty: none.
        slow_ranks: stages with a rank whose kernels take so many times as long (`slow_rank=3:1.2,5:1.1`).
        disturbed: replicas that are not as the others: slow ones (`slow_rank=3:1.2:1`), behind broken links
            (`broken_link=data:4:1`), on other GPUs (`mixed_gpu=a100-80gb-hdr:2`).
        jitter_sigma_log: passes that take longer by chance, see `PipelineJob` (`jitter=0.05`, `jitter=0.05:SEED`).
        jitter_seed: of the draws.
        given: the texts that say so.
    """  # noqa: D205

    factors: dict[str, float] = field(default_factory=dict)
    perfect_overlap: bool = False
    gpu: str = ""
    slow_ranks: tuple[tuple[int, float], ...] = ()
    disturbed: tuple[Disturbed, ...] = ()
    jitter_sigma_log: float = 0.0
    jitter_seed: int = 0
    given: tuple[str, ...] = ()

    def texts_of(self, *names: str) -> str:
        """What was given for these names; the names themselves if nothing was."""
        texts = [text for text in self.given if text.partition("=")[0].strip() in names]
        return ", ".join(texts or names)

    def kernel_factor(self, op_class: OpClass) -> float:
        """Factor on kernels of that class."""
        return self.factors.get("compute", 1.0) * self.factors.get(op_class.name.lower(), 1.0)

    def axis_factor(self, axis: Axis) -> float:
        """Factor on collectives and transfers of that axis."""
        return self.factors.get("communication", 1.0) * self.factors.get(_NAMES_OF_AXES.get(axis, ""), 1.0)

    @property
    def interference_factor(self) -> float:
        """Factor on what kernels and transfers take longer because they share a GPU."""
        return self.factors.get("interference", 1.0)

    @property
    def straggler_factor(self) -> float:
        """Factor on what the slowest GPU takes longer than the mean one."""
        return self.factors.get("stragglers", 1.0)

    @property
    def host_factor(self) -> float:
        """Factor on host times."""
        return self.factors.get("host", 1.0)


def parse_what_if(texts: Sequence[str]) -> WhatIf:
    """The factors in `NAME=VALUE` texts.

    Raises:
        SpecError: unknown name, repeated name, or a value that is neither 0 nor a number from LEAST_FACTOR to
            LARGEST_FACTOR.
    """
    factors: dict[str, float] = {}
    gpu, perfect = "", False
    slow = SlowRanks()
    disturbed: list[Disturbed] = []
    sigma, seed = 0.0, 0
    given: set[str] = set()
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in NAMES:
            fix = f"did you mean {', '.join(nearest(name, NAMES))}? All: {', '.join(NAMES)}"
            raise SpecError("what-if", text, f"unknown name {name!r}", fix)
        if name in given:
            raise SpecError("what-if", text, f"{name} is given twice", "give each name once")
        given.add(name)
        if name == "gpu":
            gpu = known_cluster(text, value)
            continue
        if name == "overlap":
            if value != "perfect":
                raise SpecError("what-if", text, "the value must be perfect", "write overlap=perfect")
            perfect = True
            continue
        if name == "slow_rank":
            slow = slow_ranks(text, value)
            disturbed += slow.replicas
            continue
        if name in ("broken_link", "mixed_gpu"):
            disturbed += broken_links(text, value) if name == "broken_link" else other_gpus(text, value)
            continue
        if name == "jitter":
            sigma, seed = jitter(text, value)
            continue
        try:
            number = value.removesuffix("x") if name in HARDWARE else value
            factor = _WORDS[name, value] if (name, value) in _WORDS else float(number)
        except ValueError:
            factor = math.nan
        is_rate = name in HARDWARE and "latency" not in name
        if not (LEAST_FACTOR <= factor <= LARGEST_FACTOR or (factor == 0.0 and not is_rate)):
            words = [f"{word} (0)" for other, word in _WORDS if other == name]
            others = "" if is_rate else "".join(f", or {word}" for word in words or ["0"])
            rule = f"the value must be a number from {LEAST_FACTOR:g} to {LARGEST_FACTOR:g}{others}"
            raise SpecError("what-if", text, rule, f"write {name}={_EXAMPLE[is_rate]}")
        factors[name] = factor
    return WhatIf(
        factors=factors,
        perfect_overlap=perfect,
        gpu=gpu,
        slow_ranks=slow.everywhere,
        disturbed=tuple(disturbed),
        jitter_sigma_log=sigma,
        jitter_seed=seed,
        given=tuple(texts),
    )
