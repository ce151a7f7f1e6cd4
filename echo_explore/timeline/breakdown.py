"""A step explained: breakdown by key, times of every rank class, and how uncertain the step time is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_explore.graph import OpClass
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.timeline.charges import AXIS_SIGMA, BUSY, CLASS_SIGMA, CLASS_SLOWED, NUM_AXES, Column
from echo_explore.timeline.ports import NUM_CODES

BREAKDOWN_KEYS: dict[str, Column] = {
    "compute_s": Column.COMPUTE,
    "optimizer_s": Column.OPTIMIZER,
    "tensor_s": Column.TENSOR,
    "context_s": Column.CONTEXT,
    "expert_s": Column.EXPERT,
    "data_s": Column.DATA,
    "pipeline_s": Column.PIPELINE,
    "bubble_s": Column.BUBBLE,
    "host_s": Column.HOST,
    "recompute_s": Column.RECOMPUTE,
    "interference_s": Column.INTERFERENCE,
    "straggler_s": Column.STRAGGLER,
}
"""Keys of a breakdown; those of `COMPUTE_PARTS` are parts of compute_s, the others add up to the step time."""

COMPUTE_PARTS = ("recompute_s", "interference_s", "straggler_s")
"""Recomputation, what transfers beside kernels cost, and what the slowest GPU takes longer than the mean one; a second
may belong to several."""

AXIS_NAMES = ("tensor", "context", "expert", "data", "pipeline")
_CLASS_NAMES = tuple(op_class.name.lower() for op_class in OpClass)  # by code

HOST_SIGMA_LOG = 0.24
"""Of host time: the root mean square of half the ranges (of the log) in which host costs were measured: 23 to 28 us a
call of Megatron-core, 10 to 14 of plain modules, 7 to 15 a call of a backward, 64 to 97 a collective, 0.28 to 0.45 ms a
check of it and rank [docs/stacks.md, 2026-12-01]."""

_TIE = 1e-10  # relative; far above rounding (1e-13 over a million ops), far below any effect


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimes:
    """Times of one rank class in a step.

    Attributes:
        label: of its stage.
        multiplicity: ranks in the class.
        finish_s: end of its step.
        busy_s: seconds of kernels ("compute") and of transfers by axis, from the rank and to it, whether or not
            something hides them; two at a time count twice.
        exposed_s: seconds charged to transfers by axis, never more than busy_s, and "bubble" and "host".
        slowed_s: what kernels took longer beside transfers, by op class in lower case, most first; they add up to
            `interference_s` of the rank.
    """

    label: str
    multiplicity: int
    finish_s: float
    busy_s: dict[str, float]
    exposed_s: dict[str, float]
    slowed_s: dict[str, float]


def breakdown_of(charges: Floats) -> dict[str, float]:
    """Seconds by key of `BREAKDOWN_KEYS`; rounding below 0 is cut off in the parts, which add up to nothing."""
    seconds = {key: float(charges[column]) for key, column in BREAKDOWN_KEYS.items()}
    return seconds | {key: max(0.0, seconds[key]) for key in COMPUTE_PARTS}


def class_times(label: str, multiplicity: int, finish_s: float, charges: Floats) -> ClassTimes:
    """The times of a rank class from its charges."""
    seconds = charges.tolist()
    exposed = dict(zip(AXIS_NAMES, seconds[Column.TENSOR : Column.TENSOR + NUM_AXES], strict=True))
    return ClassTimes(
        label=label,
        multiplicity=multiplicity,
        finish_s=finish_s,
        busy_s={"compute": seconds[Column.COMPUTE] + seconds[Column.OPTIMIZER]}
        | dict(zip(AXIS_NAMES, seconds[BUSY : BUSY + NUM_AXES], strict=True)),
        exposed_s=exposed | {"bubble": seconds[Column.BUBBLE], "host": seconds[Column.HOST]},
        slowed_s=_slowed(seconds),
    )


def _slowed(seconds: Sequence[float]) -> dict[str, float]:
    least = _TIE * seconds[Column.COMPUTE]  # below it is rounding
    by_class = zip(_CLASS_NAMES, seconds[CLASS_SLOWED:], strict=False)
    found = [(name, slowed_s) for name, slowed_s in by_class if slowed_s > least]
    return dict(sorted(found, key=lambda item: -item[1]))


def critical_class(finish_s: Floats) -> int:
    """The rank class that finishes last; the lowest of those that do within rounding."""
    return int(np.argmax(finish_s >= finish_s.max() * (1 - _TIE)))


def busiest(ranks: Ints, finish_s: Floats, charges: Floats) -> int:
    """Of rank classes that finish last within rounding, the one that waits least for others; the lowest on ties."""
    last = ranks[finish_s[ranks] >= finish_s.max() * (1 - _TIE)]
    waits = charges[last, Column.BUBBLE]
    return int(last[np.argmax(waits <= waits.min() + finish_s.max() * _TIE)])


def step_sigma_log(charges: Floats) -> float:
    """Standard deviation of the log of the step time, from the charges of the critical class.

    sigma = sqrt(sum_c (sum_i t_i sigma_i)^2) / T, c over kernel classes, axes of communication and the host, i over
    what was charged to c: errors of one class are taken as fully correlated, those of two classes as independent.

    # Approximation: a bubble is time in which peers do the same kinds of work, so it is spread over the classes of
    # forward and backward in proportion (either direction where the stages differ).
    """
    total = float(charges[: Column.HOST + 1].sum())
    if total <= 0:
        return 0.0
    per_class = charges[CLASS_SIGMA : CLASS_SIGMA + NUM_CODES].copy()
    per_axis = charges[AXIS_SIGMA : AXIS_SIGMA + NUM_AXES].copy()
    host = HOST_SIGMA_LOG * float(charges[Column.HOST])
    peers_do = [Column.COMPUTE, Column.TENSOR, Column.CONTEXT, Column.EXPERT, Column.PIPELINE, Column.HOST]
    work = float(charges[peers_do].sum())
    if work > 0:
        stretch = 1 + float(charges[Column.BUBBLE]) / work
        per_class[np.arange(NUM_CODES) != OpClass.OPTIMIZER] *= stretch
        per_axis[np.arange(NUM_AXES) != AXIS_NAMES.index("data")] *= stretch
        host *= stretch
    return math.sqrt(float((per_class**2).sum() + (per_axis**2).sum()) + host**2) / total
