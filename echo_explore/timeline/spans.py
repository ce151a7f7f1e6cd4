"""What ran when: named intervals of a step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.comm.bandwidth import bus_factor
from echo_explore.graph import Axis, Collective
from echo_explore.specs.schedules import PassKind
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.ops import TRANSFERS, Charge, Stream
from echo_explore.timeline.pipeline import StepProgram
from echo_explore.timeline.program import Times
from echo_explore.timeline.schedules import PASS_NAMES

LEAST_SLOWDOWN = 1e-3
"""From which a kernel is said to be slowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval of a stream of a rank class.

    Attributes:
        rank_class: rank class.
        stream: where it ran.
        name: what ran.
        charge: what its time is charged to, if nothing more important runs.
        phase: PassKind, -1 where it does not apply.
        micro_batch: -1 where it does not apply.
        chunk: -1 where it does not apply.
        start_s: from the start of the step.
        end_s: from the start of the step.
        model_chunk: chunk of the whole model, -1 where it does not apply.
        message_bytes: of a transfer, as nccl-tests counts them; 0 for others.
        sent_bytes: of these, what a rank sends over its links without in-network reduction (nccl-tests' bus bytes).
        variant: kind of replica that it belongs to.
        alone_s: what a kernel takes with nothing beside it; 0 for others.
        beside: streams of the transfers of its rank beside a kernel that took longer than that.
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
    message_bytes: float = 0.0
    sent_bytes: float = 0.0
    variant: int = 0
    alone_s: float = 0.0
    beside: tuple[Stream, ...] = ()


def spans_of(step: StepProgram, times: Times, job: PipelineJob) -> tuple[Span, ...]:
    """All ops that took time, by rank class, stream and start."""
    program, layout = step.program, step.layout
    rows = np.flatnonzero(times.end_s > times.start_s)
    rows = rows[np.lexsort((times.start_s[rows], program.ops.stream[rows], program.rank[rows]))]
    names, extra_bytes = _names_of_extras(step), _bytes_of_extras(step, job)
    nothing = _Bytes(message=0.0, sent=0.0)
    beside = _beside_slowed(step, times, rows)
    spans = []
    for op in rows.tolist():
        copy = int(program.copy[op])
        in_block = 0 <= copy < layout.num_blocks
        block = copy if in_block else names.block_of.get(op, -1)
        moved = extra_bytes.get(op) or _row_bytes(step, job, op) or nothing
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
                message_bytes=moved.message,
                sent_bytes=moved.sent,
                variant=int(program.rank[op]) // layout.schedule.num_stages,
                alone_s=float(program.ops.duration_s[op]) if _is_kernel(int(program.ops.charge[op])) else 0.0,
                beside=beside.get(op, ()),
            )
        )
    return tuple(spans)


def _is_kernel(charge: int) -> bool:
    return charge <= Charge.OPTIMIZER and charge != Charge.BODY


def _beside_slowed(step: StepProgram, times: Times, rows: npt.NDArray[np.int64]) -> dict[int, tuple[Stream, ...]]:
    """Streams of the transfers of its rank during each kernel that took longer than alone."""
    ops, rank = step.program.ops, step.program.rank
    took = times.end_s[rows] - times.start_s[rows]
    kernel = np.array([_is_kernel(int(charge)) for charge in ops.charge[rows]], dtype=np.bool_)
    slowed = rows[kernel & (took > ops.duration_s[rows] * (1 + LEAST_SLOWDOWN))]
    transfers = rows[np.isin(ops.charge[rows], [int(charge) for charge in TRANSFERS])]
    found = {}
    for op in slowed.tolist():
        meets = (rank[transfers] == rank[op]) & (times.start_s[transfers] < times.end_s[op])
        meets &= times.end_s[transfers] > times.start_s[op]
        found[op] = tuple(Stream(int(stream)) for stream in np.unique(ops.stream[transfers[meets]]))
    return found


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bytes:
    message: float
    sent: float


def _moved(job: PipelineJob, collective: Collective, axis: Axis, message_bytes: float) -> _Bytes:
    """Bytes of a collective; of a group of unknown size a rank is taken to send the message."""
    ranks = job.group_ranks.get(axis, 0)
    factor = bus_factor(collective, ranks) if ranks else 1.0
    return _Bytes(message=message_bytes, sent=message_bytes * factor)


def _bytes_of_extras(step: StepProgram, job: PipelineJob) -> dict[int, _Bytes]:
    """Bytes of transfers between stages, parameter gathers and bucket reductions, by op."""
    chunks = [chunk for stage in job.classes for chunk in stage.chunks]
    buckets = [_moved(job, b.collective, b.axis, b.message_bytes) for chunk in chunks for b in chunk.buckets]
    found = dict(zip(step.buckets.tolist(), buckets, strict=True))
    if job.overlap_param_gather:
        gathers = [
            _moved(job, Collective.ALL_GATHER, g.axis, g.message_bytes) for chunk in chunks for g in chunk.gathers
        ]
        found |= zip(step.gathers.tolist(), gathers, strict=True)
    blocks = np.flatnonzero(step.send_of >= 0)
    sizes = [job.classes[rank].send_bytes for rank in step.layout.rank[blocks].tolist()]
    sends = [_Bytes(message=size, sent=size) for size in sizes]
    return found | dict(zip(step.send_of[blocks].tolist(), sends, strict=True))


def _row_bytes(step: StepProgram, job: PipelineJob, op: int) -> _Bytes | None:
    """Bytes of a traced collective, None for other ops."""
    if int(step.program.ops.charge[op]) not in TRANSFERS or int(step.program.ops.row[op]) < 0:
        return None
    graph = step.pool.templates[int(step.pool.template_of[step.program.source[op]])].source.graph
    row = int(step.program.ops.row[op])
    kind, axis = Collective(int(graph.collective[row])), Axis(int(graph.axis[row]))
    return _moved(job, kind, axis, float(graph.message_bytes[row]))


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
