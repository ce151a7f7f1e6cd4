"""What ran when: named intervals of a step."""

from dataclasses import dataclass

import numpy as np

from echo_explore.graph import Collective
from echo_explore.specs.schedules import PassKind
from echo_explore.timeline.ops import Charge, Stream
from echo_explore.timeline.pipeline import StepProgram
from echo_explore.timeline.program import Times
from echo_explore.timeline.schedules import PASS_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval of a stream of a rank class.

    Attributes:
        rank_class: stage.
        stream: where it ran.
        name: what ran.
        charge: what its time is charged to, if nothing more important runs.
        phase: PassKind, -1 where it does not apply.
        micro_batch: -1 where it does not apply.
        chunk: -1 where it does not apply.
        start_s: from the start of the step.
        end_s: from the start of the step.
        model_chunk: chunk of the whole model, -1 where it does not apply.
    """

    rank_class: int
    stream: Stream
    name: str
    charge: Charge
    phase: int
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float
    model_chunk: int = -1


def spans_of(step: StepProgram, times: Times) -> tuple[Span, ...]:
    """All ops that took time, by rank class, stream and start."""
    program, layout = step.program, step.layout
    rows = np.flatnonzero(times.end_s > times.start_s)
    rows = rows[np.lexsort((times.start_s[rows], program.ops.stream[rows], program.rank[rows]))]
    names = _names_of_extras(step)
    spans = []
    for op in rows.tolist():
        copy = int(program.copy[op])
        in_block = 0 <= copy < layout.num_blocks
        block = copy if in_block else names.block_of.get(op, -1)
        spans.append(
            Span(
                rank_class=int(program.rank[op]),
                stream=Stream(int(program.ops.stream[op])),
                name=_name(step, op, names.text.get(op)),
                charge=Charge(int(program.ops.charge[op])),
                phase=int(layout.phase[block]) if block >= 0 else -1,
                micro_batch=int(layout.micro_batch[block]) if block >= 0 else -1,
                chunk=int(layout.chunk[block]) if block >= 0 else -1,
                start_s=float(times.start_s[op]),
                end_s=float(times.end_s[op]),
                model_chunk=int(layout.model_chunk[block]) if block >= 0 else -1,
            )
        )
    return tuple(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    text: dict[int, str]
    block_of: dict[int, int]


def _names_of_extras(step: StepProgram) -> _Names:
    text: dict[int, str] = {}
    block_of: dict[int, int] = {}
    for block in np.flatnonzero(step.send_of >= 0).tolist():
        op = int(step.send_of[block])
        text[op] = "send forward" if step.layout.phase[block] == PassKind.FORWARD else "send backward"
        block_of[op] = block
    for prefix, ops in (("parameter gather", step.gathers), ("gradient bucket", step.buckets)):
        for number, op in enumerate(ops.tolist()):
            text[op] = f"{prefix} {number}"
    return _Names(text=text, block_of=block_of)


def _name(step: StepProgram, op: int, known: str | None) -> str:
    if known is not None:
        return known
    program = step.program
    charge = int(program.ops.charge[op])
    if charge == Charge.BODY:
        return PASS_NAMES[PassKind(int(step.layout.phase[int(program.copy[op])]))]
    if charge in (Charge.HOST, Charge.LAUNCH):
        return "host"
    template = step.pool.templates[int(step.pool.template_of[program.source[op]])]
    graph, row = template.source.graph, int(program.ops.row[op])
    module = graph.strings[graph.module[row]]
    if graph.collective[row]:
        what = Collective(int(graph.collective[row])).name.lower()
    else:
        what = graph.strings[graph.name[row]]
    return f"{what} {module}" if module else what
