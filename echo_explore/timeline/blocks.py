"""The distinct forwards and backwards of a job, each with its ops and, when nothing disturbs it, as one op."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from echo_explore.graph import TimedGraph
from echo_explore.graph.coalesce import coalesce
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.graph.interleave import interleave
from echo_explore.specs.schedules import PassKind, StageOrder
from echo_explore.timeline.charges import charge_rank
from echo_explore.timeline.host import HostModules, host_row_seconds, launch_leads
from echo_explore.timeline.job import ChunkJob, PipelineJob
from echo_explore.timeline.layout import NUM_KINDS, schedule_of
from echo_explore.timeline.ops import Charge
from echo_explore.timeline.program import Pairs, Pool, Program, copy_templates, ran_ops, run_program
from echo_explore.timeline.recent import Key, Recent
from echo_explore.timeline.templates import Template, collapse, expand, scaled

Fidelity = Literal["kernel", "block"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Templates of all forwards and backwards.

    Attributes:
        which: (num_ranks, NUM_KINDS, num_chunks) number of the distinct block, by rank class, PassKind and chunk;
            -1 where the schedule has none.
        expanded: templates with all rows, by distinct block.
        collapsed: templates of one body, by distinct block.
        row_of: by distinct block, row of `expanded` that a row of the job's graph is in.
        num_simulated_ops: ops that the engine ran to measure them.
        pair: (num_ranks, num_chunks, num_chunks) number of the distinct pair of a forward and a backward that run
            together, by their chunks; empty where none do.
        halves: the share of a pair that its forward and its backward take, two templates of one body a pair.
    """

    which: Ints
    expanded: tuple[Template, ...]
    collapsed: tuple[Template, ...]
    row_of: tuple[Ints, ...]
    num_simulated_ops: int
    pair: Ints
    halves: tuple[Template, ...]

    def op_after(self, block: int, row: int) -> int:
        """Op of the expanded template that ends when row `row` of the job's graph and those before it are done."""
        return int(self.expanded[block].done_op[self.row_of[block][row]])

    def op_at(self, block: int, row: int) -> int:
        """Op of the expanded template that row `row` of the job's graph starts with."""
        return int(self.expanded[block].first_op[self.row_of[block][row]])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """A distinct block with its rows, and which of them a row of the job's graph is in."""

    key: Key
    expanded: Template
    row_of: Ints


_PREPARED: Recent[_Prepared] = Recent(64)
_MEASURED: Recent[Template] = Recent(256)


@lru_cache(maxsize=256)
def _kinds_of(order: StageOrder) -> tuple[PassKind, ...]:
    """The kinds of passes that a stage runs."""
    return tuple(PassKind(kind) for kind in np.unique(order.phase).tolist())


def _graphs(chunk: ChunkJob, kinds: Sequence[PassKind]) -> list[tuple[PassKind, TimedGraph]]:
    """The graph of every kind of pass that the chunk runs."""
    graphs = [chunk.forward, chunk.backward]  # by PassKind
    if chunk.split is not None:
        graphs += [chunk.split.input, chunk.split.weight]
    return [(kind, graphs[kind]) for kind in kinds]


def _broken_rows(chunk: ChunkJob, kind: PassKind) -> tuple[int, ...]:
    """Rows of a pass at which something outside waits or starts."""
    if kind == PassKind.FORWARD:
        return tuple(sorted({gather.needed_before for gather in chunk.gathers}))
    ready = sorted({bucket.ready_after for bucket in chunk.buckets})
    if kind == PassKind.BACKWARD:
        return tuple(ready)
    if kind == PassKind.BACKWARD_WEIGHT and chunk.split is not None:
        return tuple(sorted({int(row) for row in chunk.split.weight_row[ready] if row >= 0}))
    return ()


def prepare_blocks(job: PipelineJob, pairs: Pairs, fidelity: Fidelity) -> Blocks:
    """The blocks of the job, each distinct one measured once alone on its rank.

    Args:
        job: the step.
        pairs: slowdowns, which act between the kernels and the collectives of one block too.
        fidelity: "kernel": rows as traced; "block": kernels between communications coalesced.
    """
    num_chunks = len(job.stages[0].chunks)
    which = np.full((len(job.classes), NUM_KINDS, num_chunks), -1, dtype=np.int64)
    orders = schedule_of(job, job.num_micro_batches).orders
    breaks, host_key = fidelity == "block", _host_key(job)
    known: dict[Key, int] = {}
    seen: dict[tuple[int, PassKind, tuple[int, ...]], int] = {}
    prepared: list[_Prepared] = []
    for s, stage in enumerate(job.classes):
        kinds = _kinds_of(orders[s % len(orders)])
        for v, chunk in enumerate(stage.chunks):
            for phase, timed in _graphs(chunk, kinds):
                broken = _broken_rows(chunk, phase) if breaks and (chunk.buckets or chunk.gathers) else ()
                number = seen.get((id(timed), phase, broken), -1)
                if number < 0:
                    key = (timed.digest, fidelity, phase == PassKind.FORWARD, broken, host_key)
                    number = seen[id(timed), phase, broken] = known.setdefault(key, len(prepared))
                    if number == len(prepared):
                        prepared.append(_prepared(job, timed, key, broken if breaks else None))
                which[s, phase, v] = number
    expanded = [block.expanded for block in prepared]
    collapsed, num_ops = _measured(prepared, pairs)
    pair, halves, num_pair_ops = _pairs(job, which, collapsed, pairs, fidelity)
    return Blocks(
        which=which,
        expanded=tuple(expanded),
        collapsed=tuple(collapsed),
        row_of=tuple(block.row_of for block in prepared),
        num_simulated_ops=num_ops + num_pair_ops,
        pair=pair,
        halves=halves,
    )


@lru_cache(maxsize=64)
def _module_bytes(modules: HostModules | None) -> bytes:
    return repr(modules).encode()


def _host_key(job: PipelineJob) -> bytes:
    """What the host's part of a block follows from; bytes, whose hash Python keeps."""
    calls = np.array([job.host_call_s, job.host_backward_call_s, job.host_expert_call_s, float(job.launch_blocking)])
    return calls.tobytes() + _module_bytes(job.host_modules)


def _prepared(job: PipelineJob, timed: TimedGraph, key: Key, broken: tuple[int, ...] | None) -> _Prepared:
    """A block with its rows; with `broken`, coalesced up to those."""
    if (known := _PREPARED.get(key)) is not None:
        return known
    rows = np.arange(timed.graph.num_ops, dtype=np.int64)
    host = _host(job, timed)
    leads = launch_leads(timed, host)
    if broken is not None:
        is_forward = bool(key[2])
        coarse = coalesce(timed, break_before=broken if is_forward else (), break_after=() if is_forward else broken)
        timed, rows = coarse.timed, coarse.row_of
        host = np.bincount(rows, weights=host, minlength=timed.graph.num_ops).astype(np.float64)
    block = _Prepared(
        key=key,
        expanded=expand(timed, host_row_s=host, lead_s=leads, launch_blocking=job.launch_blocking),
        row_of=rows,
    )
    _PREPARED.keep(key, block)
    return block


def _measured(prepared: Sequence[_Prepared], pairs: Pairs) -> tuple[list[Template], int]:
    """Each block as one body, and how many ops it takes to measure them all; those known already are not run again."""
    digest = pairs.digest
    keys = [(*block.key, digest) for block in prepared]
    known = {key: body for key in keys if (body := _MEASURED.get(key)) is not None}
    new = [number for number, key in enumerate(keys) if key not in known]
    for number, body in zip(new, _measure([prepared[i].expanded for i in new], pairs), strict=True):
        known[keys[number]] = body
        _MEASURED.keep(keys[number], body)
    return [known[key] for key in keys], sum(block.expanded.ops.num_ops for block in prepared)


def _pairs(
    job: PipelineJob, which: Ints, alone: Sequence[Template], pairs: Pairs, fidelity: Fidelity
) -> tuple[Ints, tuple[Template, ...], int]:
    """Numbers of pairs, the halves of each, and the ops that were run to measure them.

    # Approximation: what a pair takes together is split between its forward and its backward as they take alone
    # (either direction); data-parallel traffic beside a pair slows nothing (under-estimates).
    """
    num_ranks, _, num_chunks = which.shape
    number = np.zeros((num_ranks, num_chunks, num_chunks), dtype=np.int64)
    if not job.overlap_exchanges:
        return number[:0], (), 0
    known: dict[tuple[int, int], int] = {}
    together: list[Template] = []
    for s, stage in enumerate(job.classes):
        for f, ahead in enumerate(stage.chunks):
            for b, behind in enumerate(stage.chunks):
                key = int(which[s, PassKind.FORWARD, f]), int(which[s, PassKind.BACKWARD, b])
                number[s, f, b] = known.setdefault(key, len(known))
                if number[s, f, b] < len(together):
                    continue
                timed = interleave(behind.backward, ahead.forward)
                host = _host(job, timed)
                leads = launch_leads(timed, host)
                if fidelity == "block":
                    coarse = coalesce(timed)
                    timed = coarse.timed
                    host = np.add.reduceat(host, np.flatnonzero(np.diff(coarse.row_of, prepend=-1)))
                together.append(expand(timed, host_row_s=host, lead_s=leads, launch_blocking=job.launch_blocking))
    bodies = _measure(together, pairs)
    num_ops = sum(template.ops.num_ops for template in together)
    halves: list[Template] = []
    for (forward, backward), body in zip(known, bodies, strict=True):
        alone_s = np.array([alone[forward].duration_s, alone[backward].duration_s])
        share = alone_s / alone_s.sum() if alone_s.sum() > 0 else np.full(2, 0.5)
        halves += [scaled(body, float(x)) for x in share]
    return number, tuple(halves), num_ops


def _host(job: PipelineJob, timed: TimedGraph) -> Floats:
    """(num_rows,) seconds of the host for each row."""
    return host_row_seconds(
        timed,
        call_s=job.host_call_s,
        backward_call_s=job.host_backward_call_s,
        expert_call_s=job.host_expert_call_s,
        modules=job.host_modules,
        launch_blocking=job.launch_blocking,
    )


def _measure(templates: Sequence[Template], pairs: Pairs) -> list[Template]:
    """Each template as one body, from a run in which each has a rank for itself."""
    if not templates:
        return []
    pool = Pool.of(templates)
    copies = copy_templates(pool, np.arange(len(templates), dtype=np.int64))
    ops = copies.ops_with(())
    n = ops.num_ops
    program = Program(
        ops=ops,
        rank=copies.owner,
        peer=np.full(n, -1, dtype=np.int64),
        order=np.arange(n, dtype=np.float64),
        group=np.full(n, -1, dtype=np.int64),
        source=copies.source,
        copy=copies.owner,
        num_ranks=len(templates),
        pool=pool,
    )
    times = run_program(program, pairs)
    is_host = ops.charge == Charge.LAUNCH
    is_work = ops.charge < Charge.HOST
    ran = ran_ops(program, times, pool)
    collapsed = []
    for i, template in enumerate(templates):
        rows = slice(int(copies.entry[i]), int(copies.exit[i]) + 1)
        body_s = float(times.end_s[rows][is_work[rows]].max(initial=0.0))
        host_s = float(times.end_s[rows][is_host[rows]].max(initial=0.0))
        charges = charge_rank(ran, i, pool.bodies, from_s=0.0, to_s=body_s)
        collapsed.append(collapse(template, body_s=body_s, host_excess_s=max(0.0, host_s - body_s), charges=charges))
    return collapsed
