"""Why a step takes what it takes: its critical path, what of it is exposed, and when stages wait."""

from dataclasses import dataclass

import numpy as np

from echo_explore.graph import Axis, OpClass
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.specs.schedules import PassKind
from echo_explore.timeline.breakdown import AXIS_NAMES
from echo_explore.timeline.charges import NUM_AXES, Column, charge_ranks
from echo_explore.timeline.ops import NUM_STREAMS, TRANSFERS, Charge
from echo_explore.timeline.pipeline import StepProgram
from echo_explore.timeline.program import Program, Times, ran_ops
from echo_explore.timeline.templates import Template

_AXIS_OF_CHARGE = {Charge.TENSOR + i: name for i, name in enumerate(AXIS_NAMES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleSplit:
    """When a stage waits for peers that compute.

    Attributes:
        warm_up_s: before its first backward.
        steady_s: from there to the end of its last forward.
        cool_down_s: after that.
    """

    warm_up_s: float
    steady_s: float
    cool_down_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation:
    """A step explained.

    Attributes:
        critical_path_s: seconds of the chain of ops that is as long as the step, by op class in lower case, axis of
            communication (`tensor`, ...), `host`, and `wait` inside a pass until others come to its exchange; they add
            up to the step time.
        critical_path_stages_s: the same seconds by rank class that ran them.
        bubbles: of every rank class.
        optimizer_transfers_s: by rank class, seconds of the transfers behind its last pass by Axis in lower case: of
            gradient norms (`model`), of tied embeddings, gathers of updated parameters. None is hidden.
    """

    critical_path_s: dict[str, float]
    critical_path_stages_s: tuple[float, ...]
    bubbles: tuple[BubbleSplit, ...]
    optimizer_transfers_s: tuple[dict[str, float], ...]


def explain_run(step: StepProgram, times: Times) -> StepExplanation:
    """The explanation of a run of all micro-batches."""
    program = step.program
    path = critical_path(program, times)
    seconds = times.end_s[path] - times.start_s[path]
    stages = np.bincount(program.rank[path], weights=seconds, minlength=program.num_ranks)
    return StepExplanation(
        critical_path_s=_shares(step, path, seconds),
        critical_path_stages_s=tuple(stages.tolist()),
        bubbles=_bubble_splits(step, times),
        optimizer_transfers_s=_optimizer_transfers(step, times),
    )


def critical_path(program: Program, times: Times) -> Ints:
    """Ops from the start of the step to its end of which each starts when the one before ends, last first.

    Of several that end then, one of the same rank goes first, then the lowest.
    """
    n = program.ops.num_ops
    before = _Before(program)
    op = int(np.lexsort((-np.arange(n), times.end_s))[-1])
    path = [op]
    while times.start_s[op] > 0.0 or program.ops.duration_s[op] == 0.0:
        candidates = before.of(op)
        if not candidates.size:
            break
        latest = candidates[times.end_s[candidates] >= times.end_s[candidates].max()]
        op = int(latest[np.lexsort((latest, program.rank[latest] != program.rank[op]))[0]])
        path.append(op)
    return np.array(path, dtype=np.int64)


class _Before:
    """What an op waits for: edges, the op ahead of it on its stream, and the same of those that it meets."""

    def __init__(self, program: Program) -> None:
        ops = program.ops
        order = np.argsort(ops.edge_target, kind="stable")
        self._sources = ops.edge_source[order]
        self._first = np.searchsorted(ops.edge_target[order], np.arange(ops.num_ops + 1))
        stream = program.rank * NUM_STREAMS + ops.stream
        in_order = np.lexsort((program.order, stream))
        self._ahead = np.full(ops.num_ops, -1, dtype=np.int64)
        same = stream[in_order[1:]] == stream[in_order[:-1]]
        self._ahead[in_order[1:][same]] = in_order[:-1][same]
        self._group = program.group

    def of(self, op: int) -> Ints:
        """Ops of which one has to end last before `op` may start."""
        group = int(self._group[op])
        members = np.flatnonzero(self._group == group) if group >= 0 else np.array([op])
        parts = [self._sources[self._first[m] : self._first[m + 1]] for m in members.tolist()]
        ahead = self._ahead[members]
        return np.concatenate([*parts, ahead[ahead >= 0]]).astype(np.int64)


def _shares(step: StepProgram, path: Ints, seconds: Floats) -> dict[str, float]:
    total: dict[str, float] = {}
    inside: dict[int, dict[str, float]] = {}
    ops = step.program.ops
    for op, took in zip(path.tolist(), seconds.tolist(), strict=True):
        if took <= 0.0:
            continue
        charge = int(ops.charge[op])
        if charge == Charge.BODY:
            body = int(step.pool.template_of[step.program.source[op]])
            parts = inside.setdefault(body, _body_shares(step.pool.templates[body]))
            for name, share in parts.items():
                total[name] = total.get(name, 0.0) + share * took
            continue
        name = _name(charge, int(ops.op_class[op]))
        total[name] = total.get(name, 0.0) + took
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _name(charge: int, op_class: int) -> str:
    if charge <= Charge.OPTIMIZER:
        return OpClass(op_class).name.lower()
    return _AXIS_OF_CHARGE.get(charge, "host")


def _body_shares(template: Template) -> dict[str, float]:
    """Share of a collapsed pass by op class, axis and host; they add up to 1."""
    assert template.charges is not None
    charges, graph = template.charges, template.source.graph
    by_class = np.bincount(graph.op_class, weights=template.source.time_s * graph.is_compute, minlength=len(OpClass))
    kernels = float(by_class.sum())
    stretch = float(charges[Column.COMPUTE] + charges[Column.OPTIMIZER]) / kernels if kernels > 0 else 0.0
    shares = {OpClass(c).name.lower(): float(s) * stretch for c, s in enumerate(by_class) if s > 0}
    for axis in range(NUM_AXES):
        shares[AXIS_NAMES[axis]] = float(charges[Column.TENSOR + axis])
    shares["host"] = float(charges[Column.HOST])
    shares["wait"] = float(charges[Column.BUBBLE])
    whole = sum(shares.values())
    return {name: share / whole for name, share in shares.items() if share > 0}


def _optimizer_transfers(step: StepProgram, times: Times) -> tuple[dict[str, float], ...]:
    program = step.program
    ops = np.flatnonzero((program.copy >= step.layout.num_blocks) & np.isin(program.ops.charge, TRANSFERS))
    seconds = np.zeros((program.num_ranks, len(Axis)))
    np.add.at(seconds, (program.rank[ops], program.ops.axis[ops]), times.end_s[ops] - times.start_s[ops])
    return tuple({Axis(a).name.lower(): s for a, s in enumerate(row) if s > 0} for row in seconds.tolist())


def _bubble_splits(step: StepProgram, times: Times) -> tuple[BubbleSplit, ...]:
    """Of every rank class; where all forwards come first, what lies between them and backwards is of the warm-up."""
    layout, ranks = step.layout, range(step.program.num_ranks)
    is_forward = layout.phase == PassKind.FORWARD
    edges = np.zeros((4, len(ranks)))
    for rank in ranks:
        blocks = np.arange(layout.first[rank], layout.first[rank + 1])
        backwards, forwards = blocks[~is_forward[blocks]], blocks[is_forward[blocks]]
        first_backward = float(times.start_s[step.entry[backwards]].min())
        last_forward = float(times.end_s[step.exit[forwards]].max())
        finish = float(times.end_s[step.program.rank == rank].max())
        edges[1:, rank] = first_backward, max(first_backward, last_forward), finish
    ops = ran_ops(step.program, times, step.pool)
    waits = [
        charge_ranks(ops, step.pool.bodies, from_s=edges[i], to_s=edges[i + 1])[:, Column.BUBBLE].tolist()
        for i in range(3)
    ]
    return tuple(BubbleSplit(warm_up_s=a, steady_s=b, cool_down_s=c) for a, b, c in zip(*waits, strict=True))
