"""The distinct forwards and backwards of a job, each with its ops and, when nothing disturbs it, as one op."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from echo_explore.graph import TimedGraph
from echo_explore.graph.coalesce import coalesce
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.graph.interleave import interleave
from echo_explore.specs.schedules import PassKind, StageOrder
from echo_explore.timeline.charges import charge_ranks
from echo_explore.timeline.exchange_groups import OF_EXCHANGES, exchanging_ranks
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
        body: of the same shape, number of its template of one body.
        in_step: of the same shape, whether kinds of replicas that exchange tokens inside the block and start it
            together end it together.
        expanded: templates with all rows, by distinct block.
        collapsed: templates of one body: of every distinct block alone, then of those that meet others inside.
        row_of: by distinct block, row of `expanded` that a row of the job's graph is in.
        num_simulated_ops: ops that the engine ran to measure them.
        pair: (num_ranks, num_chunks, num_chunks) number of the distinct pair of a forward and a backward that run
            together, by their chunks; empty where none do.
        halves: the share of a pair that its forward and its backward take, two templates of one body a pair.
    """

    which: Ints
    body: Ints
    in_step: npt.NDArray[np.bool_]
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
_BLOCKS: Recent[Blocks] = Recent(16)


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
    key = _content(job, pairs, fidelity)
    if key is not None and (known_blocks := _BLOCKS.get(key)) is not None:
        return known_blocks
    blocks = _blocks_of(job, pairs, fidelity)
    if key is not None:
        _BLOCKS.keep(key, blocks)
    return blocks


def _content(job: PipelineJob, pairs: Pairs, fidelity: Fidelity) -> Key | None:
    """What the blocks of a job whose replicas are all alike follow from; None for others, and for pairs of passes."""
    chunks = [chunk for stage in job.stages for chunk in stage.chunks]
    if job.variants or job.overlap_exchanges:
        return None
    broken: Key = ()
    if fidelity == "block":
        broken = tuple(
            _broken_rows(chunk, kind) if chunk.buckets or chunk.gathers else () for chunk in chunks for kind in PassKind
        )
    graphs = [timed for chunk in chunks for timed in (chunk.forward, chunk.backward)]
    graphs += [timed for chunk in chunks if chunk.split for timed in (chunk.split.input, chunk.split.weight)]
    schedule = (job.schedule, job.schedule_lines, job.num_micro_batches, len(job.stages))
    return (*schedule, fidelity, _host_key(job), pairs.digest, *broken, *(timed.digest for timed in graphs))


def _blocks_of(job: PipelineJob, pairs: Pairs, fidelity: Fidelity) -> Blocks:
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
    body, in_step, num_met_ops = _measured_together(job, which, expanded, collapsed, pairs)
    pair, halves, num_pair_ops = _pairs(job, which, collapsed, pairs, fidelity)
    return Blocks(
        which=which,
        body=body,
        in_step=in_step,
        expanded=tuple(expanded),
        collapsed=tuple(collapsed),
        row_of=tuple(block.row_of for block in prepared),
        num_simulated_ops=num_ops + num_met_ops + num_pair_ops,
        pair=pair,
        halves=halves,
    )


@lru_cache(maxsize=64)
def _module_bytes(modules: HostModules | None) -> bytes:
    return repr(modules).encode()


def _host_key(job: PipelineJob) -> bytes:
    """What the host's part of a block follows from; bytes, whose hash Python keeps."""
    own = (job.host_call_s, job.host_backward_call_s, job.host_expert_call_s, float(job.launch_blocking))
    calls = np.array([*own, *job.host_collective_s])
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
    for number, (body,) in zip(new, _measure([[prepared[i].expanded] for i in new], pairs), strict=True):
        known[keys[number]] = body
        _MEASURED.keep(keys[number], body)
    return [known[key] for key in keys], sum(block.expanded.ops.num_ops for block in prepared)


def _measured_together(
    job: PipelineJob, which: Ints, expanded: Sequence[Template], collapsed: list[Template], pairs: Pairs
) -> tuple[Ints, npt.NDArray[np.bool_], int]:
    """Bodies of blocks inside of which kinds of replicas exchange tokens, see `Blocks`; adds them to `collapsed`.

    All kinds of an exchange group run the block from one start. Where they end together too they are in step behind it
    as before it, whatever the pipeline does, and each may stand as one body; where not, `in_step` is False.
    """
    body, in_step = which.copy(), np.zeros(which.shape, dtype=np.bool_)
    exchanging = [bool(np.isin(template.ops.axis, OF_EXCHANGES).any()) for template in expanded]
    known: dict[tuple[int, ...], int] = {}
    companies: list[tuple[int, ...]] = []
    places: list[tuple[int, list[int], int, int]] = []
    for ranks in exchanging_ranks(job):
        for phase, chunk in np.ndindex(which.shape[1:]):
            company = tuple(which[ranks, phase, chunk].tolist())
            if min(company) < 0 or not any(exchanging[number] for number in company):
                continue
            turn = known.setdefault(company, len(companies))
            if turn == len(companies):
                companies.append(company)
            places.append((turn, ranks, phase, chunk))
    measured = _measure([[expanded[number] for number in company] for company in companies], pairs)
    first = np.cumsum([len(collapsed), *(len(company) for company in companies)])
    together = [_end_together(bodies) for bodies in measured]
    for bodies in measured:
        collapsed += bodies
    for turn, ranks, phase, chunk in places:
        if together[turn]:
            body[ranks, phase, chunk] = first[turn] + np.arange(len(ranks))
            in_step[ranks, phase, chunk] = True
    return body, in_step, sum(expanded[number].ops.num_ops for company in companies for number in company)


def _end_together(bodies: Sequence[Template]) -> bool:
    """Whether kinds that start a block together end it together, its host's part too."""
    columns = {len(template.ops.duration_s) for template in bodies}
    if len(columns) > 1:
        return False
    times_s = np.array([template.ops.duration_s for template in bodies])
    return bool((np.ptp(times_s, axis=0) <= _TOGETHER * times_s.max(initial=0.0)).all())


_TOGETHER = 1e-12
"""Of a block's time: rounding."""


def _pairs(
    job: PipelineJob, which: Ints, alone: Sequence[Template], pairs: Pairs, fidelity: Fidelity
) -> tuple[Ints, tuple[Template, ...], int]:
    """Numbers of pairs, the halves of each, and the ops that were run to measure them.

    # Approximation: what a pair takes together is split between its forward and its backward as they take alone
    # (either direction); data-parallel traffic beside a pair slows nothing (under-estimates); kinds of replicas that
    # exchange tokens start each pair together, not only each exchange (over-estimates where they take turns in being
    # late).
    """
    num_ranks, _, num_chunks = which.shape
    number = np.zeros((num_ranks, num_chunks, num_chunks), dtype=np.int64)
    if not job.overlap_exchanges:
        return number[:0], (), 0
    made: dict[tuple[int, int], Template] = {}
    known: dict[tuple[tuple[int, int], ...], int] = {}  # kinds that exchange tokens, by forward and backward: its first
    classes = job.classes
    meeting = exchanging_ranks(job)
    alone_in_pairs = sorted(set(range(num_ranks)) - {rank for ranks in meeting for rank in ranks})
    for ranks in [*meeting, *([rank] for rank in alone_in_pairs)]:
        for f, b in np.ndindex(num_chunks, num_chunks):
            company = tuple((int(which[r, PassKind.FORWARD, f]), int(which[r, PassKind.BACKWARD, b])) for r in ranks)
            for rank, key in zip(ranks, company, strict=True):
                if key not in made:
                    chunks = classes[rank].chunks
                    made[key] = _pair_template(job, interleave(chunks[b].backward, chunks[f].forward), fidelity)
            number[ranks, f, b] = known.setdefault(company, sum(map(len, known))) + np.arange(len(ranks))
    companies = [[made[key] for key in company] for company in known]
    halves: list[Template] = []
    for company, bodies in zip(known, _measure(companies, pairs), strict=True):
        alone_s = np.array([[alone[n].duration_s for n in key] for key in company]).max(axis=0)
        share = alone_s / alone_s.sum() if alone_s.sum() > 0 else np.full(2, 0.5)
        halves += [scaled(body, float(x)) for body in bodies for x in share]
    return number, tuple(halves), sum(template.ops.num_ops for company in companies for template in company)


def _pair_template(job: PipelineJob, timed: TimedGraph, fidelity: Fidelity) -> Template:
    """All rows of a forward and a backward that run together."""
    host = _host(job, timed)
    leads = launch_leads(timed, host)
    if fidelity == "block":
        coarse = coalesce(timed)
        timed = coarse.timed
        host = np.add.reduceat(host, np.flatnonzero(np.diff(coarse.row_of, prepend=-1)))
    return expand(timed, host_row_s=host, lead_s=leads, launch_blocking=job.launch_blocking)


def _host(job: PipelineJob, timed: TimedGraph) -> Floats:
    """(num_rows,) seconds of the host for each row."""
    return host_row_seconds(
        timed,
        call_s=job.host_call_s,
        backward_call_s=job.host_backward_call_s,
        expert_call_s=job.host_expert_call_s,
        modules=job.host_modules,
        collective_s=job.host_collective_s,
        launch_blocking=job.launch_blocking,
    )


def _measure(companies: Sequence[Sequence[Template]], pairs: Pairs) -> list[list[Template]]:
    """Each template as one body, from a run in which each has a rank for itself; those of a company meet at exchanges.

    Collectives on `OF_EXCHANGES` meet, the n-th of one template the n-th of the others.
    """
    templates = [template for company in companies for template in company]
    if not templates:
        return []
    pool = Pool.of(templates)
    copies = copy_templates(pool, np.arange(len(templates), dtype=np.int64))
    ops = copies.ops_with(())
    n = ops.num_ops
    company_of = np.repeat(np.arange(len(companies)), [len(company) for company in companies])
    program = Program(
        ops=ops,
        rank=copies.owner,
        peer=np.full(n, -1, dtype=np.int64),
        order=np.arange(n, dtype=np.float64),
        group=_meetings(ops.axis, copies.owner, company_of),
        source=copies.source,
        copy=copies.owner,
        num_ranks=len(templates),
        pool=pool,
    )
    times = run_program(program, pairs)
    is_host = ops.charge == Charge.LAUNCH
    is_work = ops.charge < Charge.HOST
    rows = [slice(int(first), int(last) + 1) for first, last in zip(copies.entry, copies.exit, strict=True)]
    body_s, host_s = (
        np.array([times.end_s[own][which[own]].max(initial=0.0) for own in rows]) for which in (is_work, is_host)
    )
    charges = charge_ranks(ran_ops(program, times, pool), pool.bodies, from_s=np.zeros(len(rows)), to_s=body_s)
    excess_s = np.maximum(host_s - body_s, 0.0)
    collapsed = [
        collapse(template, body_s=float(body_s[i]), host_excess_s=float(excess_s[i]), charges=charges[i])
        for i, template in enumerate(templates)
    ]
    bodies = iter(collapsed)
    return [[next(bodies) for _ in company] for company in companies]


def _meetings(axis: Ints, owner: Ints, company_of: Ints) -> Ints:
    """(num_ops,) rendezvous group of the exchanges of templates, -1 for none; `owner` is the template of an op."""
    group = np.full(axis.shape[0], -1, dtype=np.int64)
    shared = np.bincount(company_of)[company_of] > 1
    rows = np.flatnonzero(np.isin(axis, OF_EXCHANGES) & shared[owner])
    if rows.size:
        starts = np.flatnonzero(np.diff(owner[rows], prepend=-1))
        turn = np.arange(rows.shape[0]) - np.repeat(starts, np.diff(np.append(starts, rows.shape[0])))
        keys = np.stack([company_of[owner[rows]], turn], axis=1)
        group[rows] = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    return group
