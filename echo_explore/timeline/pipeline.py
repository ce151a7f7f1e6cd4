"""The program of a whole step: blocks in the order of the schedule, transfers between stages, data-parallel traffic."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError
from echo_explore.graph import Axis, OpKind
from echo_explore.graph.execution_graph import Ints
from echo_explore.specs.schedules import PassKind
from echo_explore.timeline.blocks import Blocks
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.layout import Layout
from echo_explore.timeline.meeting import meeting_groups, pair_groups
from echo_explore.timeline.ops import Charge, Stream
from echo_explore.timeline.program import Copies, Pool, Program, copy_templates, wiring_of
from echo_explore.timeline.recent import Key, Recent
from echo_explore.timeline.slow_ranks import jitter_factors
from echo_explore.timeline.templates import Template, expand
from echo_explore.timeline.traffic import Extras, add_buckets, add_gathers, add_sends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepProgram:
    """A step ready to run.

    Attributes:
        program: all ops.
        pool: templates they were copied from.
        layout: blocks.
        is_expanded: (num_blocks,) whether a block has all its rows.
        is_paired: (num_blocks,) whether it runs together with its partner.
        entry: (num_blocks,) first op of a block.
        exit: (num_blocks,) last op of a block.
        send_of: (num_blocks,) op of the transfer that a block ends with, -1 for none.
        gathers: ops of parameter gathers.
        buckets: ops of bucket reductions.
        num_copied: ops that are copies of templates, which come first.
        blocks: where the templates come from.
    """

    program: Program
    pool: Pool
    layout: Layout
    is_expanded: npt.NDArray[np.bool_]
    is_paired: npt.NDArray[np.bool_]
    entry: Ints
    exit: Ints
    send_of: Ints
    gathers: Ints
    buckets: Ints
    num_copied: int
    blocks: Blocks


def build_step(
    job: PipelineJob,
    blocks: Blocks,
    layout: Layout,
    is_expanded: npt.NDArray[np.bool_],
    is_paired: npt.NDArray[np.bool_],
) -> StepProgram:
    """The program of the step.

    # Approximation: transfers between stages slow no kernel (under-estimates).

    Args:
        job: the step.
        blocks: its templates.
        layout: its blocks; their number of micro-batches may differ from the job's.
        is_expanded: (num_blocks,) blocks to run row by row.
        is_paired: (num_blocks,) blocks that run together with their partner.
    """
    epilogues, which_epilogue = _epilogue_templates(job)
    rows = blocks.expanded if is_expanded.any() else ()
    pool = _pool_of((*rows, *blocks.collapsed, *blocks.halves, *epilogues))
    passes = (is_expanded.tobytes(), is_paired.tobytes(), which_epilogue.tobytes())
    same: Key = (id(blocks), id(layout), id(pool), *passes, *_outside_passes(job))  # a step keeps what is named by id
    is_kept = not job.variants and job.jitter_sigma_log == 0
    if is_kept and (known := _SAME.get(same)) is not None:
        return known
    of_halves = len(rows) + len(blocks.collapsed)
    distinct = blocks.which[layout.rank, layout.phase, layout.chunk]
    of_blocks = np.where(is_expanded, distinct, blocks.body[layout.rank, layout.phase, layout.chunk] + len(rows))
    paired = np.flatnonzero(is_paired)
    if paired.size:
        of_blocks[paired] = of_halves + _halves(blocks, layout, paired)
    which = np.concatenate([of_blocks, of_halves + len(blocks.halves) + which_epilogue])
    if rows or _has_traffic(job):
        step = _assembled(job, blocks, layout, pool, which, is_expanded, is_paired)
        if is_kept and step.program.ops.num_ops <= _MOST_KEPT_OPS:
            _SAME.keep(same, step)
        return step
    schedule = (job.schedule, job.schedule_lines, len(job.stages), len(job.stages[0].chunks), layout.num_micro_batches)
    key = (*schedule, job.ahead, job.overlap_p2p, which.tobytes(), *_structure_of(pool))
    alike = _ALIKE.get(key)
    if alike is None:
        alike = _assembled(job, blocks, layout, pool, which, is_expanded, is_paired)
        _ALIKE.keep(key, alike)
    step = replace(_with_times_of(alike, job, pool), blocks=blocks, layout=layout)
    _SAME.keep(same, step)
    return step


def _outside_passes(job: PipelineJob) -> Key:
    """What a step has outside of its passes, chunk by chunk, and what it follows there."""
    sends = tuple((stage.send_forward_s, stage.send_backward_s, stage.send_sigma_log) for stage in job.stages)
    traffic = tuple(
        (
            tuple((b.axis, b.time_s, b.sigma_log, b.ready_after, b.pair_class) for b in chunk.buckets),
            tuple((g.axis, g.time_s, g.sigma_log, g.needed_before, g.pair_class) for g in chunk.gathers),
        )
        if chunk.buckets or chunk.gathers
        else ()
        for stage in job.stages
        for chunk in stage.chunks
    )
    how = (job.schedule, job.overlap_p2p, job.overlap_grad_reduce, job.overlap_param_gather, job.ahead)
    return (*how, sends, job.host_step_s, traffic)


_MOST_KEPT_OPS = 32_768
"""Of a program: a larger one takes long to run, and megabytes to keep."""
_SAME: Recent[StepProgram] = Recent(16)
_ALIKE: Recent[StepProgram] = Recent(16)
_POOLS: Recent[Pool] = Recent(16)
_EPILOGUES: Recent[Template] = Recent(64)


def _pool_of(templates: tuple[Template, ...]) -> Pool:
    """The pool of these templates; the last pools are kept, each with the templates that its key names by id."""
    key = tuple(id(template) for template in templates)
    pool = _POOLS.get(key)
    if pool is None:
        pool = Pool.of(templates)
        _POOLS.keep(key, pool)
    return pool


def _has_traffic(job: PipelineJob) -> bool:
    """Whether a step has more in it than passes and transfers between stages, all replicas alike."""
    has_traffic = any(chunk.buckets or chunk.gathers for stage in job.stages for chunk in stage.chunks)
    return bool(job.variants) or job.jitter_sigma_log > 0 or has_traffic


def _structure_of(pool: Pool) -> Key:
    """What of the ops of a step without data-parallel traffic, and of what waits for what, follows from its pool."""
    ops = pool.ops
    columns = (ops.stream, ops.charge, ops.axis, ops.row, ops.edge_source, ops.edge_target, pool.first, pool.first_edge)
    return tuple(column.tobytes() for column in columns)


def _with_times_of(step: StepProgram, job: PipelineJob, pool: Pool) -> StepProgram:
    """A step of the same structure with the times and classes of this job."""
    program = step.program
    copied = program.source[: step.num_copied]
    columns = {}
    for name in ("op_class", "kernel_class", "traffic_class", "duration_s", "sigma_log", "straggler_fraction"):
        column = getattr(program.ops, name).copy()
        np.take(getattr(pool.ops, name), copied, out=column[: step.num_copied], mode="clip")
        columns[name] = column
    sends = np.flatnonzero(program.peer >= 0)
    stage, forward = program.rank[sends], program.ops.stream[sends] == Stream.SEND_FORWARD
    times_s = np.array([(s.send_forward_s, s.send_backward_s, s.send_sigma_log) for s in job.stages])
    columns["duration_s"][sends] = np.where(forward, times_s[stage, 0], times_s[stage, 1])
    columns["sigma_log"][sends] = times_s[stage, 2]
    columns["duration_s"][program.ops.num_ops - len(job.stages) :] = job.host_step_s
    return replace(step, program=replace(program, ops=replace(program.ops, **columns), pool=pool), pool=pool)


def _assembled(
    job: PipelineJob,
    blocks: Blocks,
    layout: Layout,
    pool: Pool,
    which: Ints,
    is_expanded: npt.NDArray[np.bool_],
    is_paired: npt.NDArray[np.bool_],
) -> StepProgram:
    num_ranks = len(job.classes)
    copies = copy_templates(pool, which)
    rank_of_copy = np.concatenate([layout.rank, np.arange(num_ranks)])
    extras = Extras(copies.num_ops)
    send_of = add_sends(job, layout, copies, extras)
    gathers = add_gathers(job, blocks, layout, copies, extras)
    buckets = add_buckets(job, blocks, layout, copies, send_of, extras)
    n = layout.num_blocks
    extras.add(
        stream=Stream.COMPUTE,
        charge=Charge.HOST,
        rank=np.arange(num_ranks, dtype=np.int64),
        duration_s=np.full(num_ranks, job.host_step_s),
        sigma_log=np.zeros(num_ranks),
        order=copies.exit[n:].astype(np.float64) + 0.5,
    )
    program = _join(
        copies, rank_of_copy, extras, _rendezvous(job, layout, copies, extras, is_paired, (gathers, buckets))
    )
    if job.jitter_sigma_log > 0:
        longer = jitter_factors(job)[layout.rank, layout.phase, layout.chunk, layout.micro_batch]
        in_blocks = slice(0, int(copies.entry[n]))
        program.ops.duration_s[in_blocks] *= longer[copies.owner[in_blocks]]
    return StepProgram(
        program=program,
        pool=pool,
        layout=layout,
        is_expanded=is_expanded,
        is_paired=is_paired,
        entry=copies.entry[:n],
        exit=copies.exit[:n],
        send_of=send_of,
        gathers=gathers,
        buckets=buckets,
        num_copied=copies.num_ops,
        blocks=blocks,
    )


def _halves(blocks: Blocks, layout: Layout, paired: Ints) -> Ints:
    """Which of `Blocks.halves` stands for each of these blocks."""
    own, other = layout.chunk[paired], layout.chunk[layout.partner[paired]]
    is_forward = layout.phase[paired] == PassKind.FORWARD
    forward, backward = np.where(is_forward, own, other), np.where(is_forward, other, own)
    return 2 * blocks.pair[layout.rank[paired], forward, backward] + np.where(is_forward, 0, 1)


def _epilogue_templates(job: PipelineJob) -> tuple[list[Template], Ints]:
    """The distinct epilogues, and which of them each rank class has."""
    classes = job.classes
    charge = Charge.PIPELINE if len(job.stages) > 1 else Charge.TENSOR
    known: dict[bytes, int] = {}
    which = [known.setdefault(stage.epilogue.digest, len(known)) for stage in classes]
    first = [which.index(number) for number in range(len(known))]
    templates = []
    for s in first:
        epilogue = classes[s].epilogue
        key = (epilogue.digest, job.host_update_s, charge)
        template = _EPILOGUES.get(key)
        if template is None:
            row_s = epilogue.graph.host_calls.astype(np.float64) * job.host_update_s
            # The host's loop launches as it goes: a row stands for all kernels of the loop, none waits for its end.
            no_lead = np.zeros(int((epilogue.graph.kind == OpKind.HOST_SYNC).sum()))
            template = expand(epilogue, host_row_s=row_s, lead_s=no_lead, model_charge=charge)
            _EPILOGUES.keep(key, template)
        templates.append(template)
    return templates, np.array(which, dtype=np.int64)


def _rendezvous(
    job: PipelineJob,
    layout: Layout,
    copies: Copies,
    extras: Extras,
    is_paired: npt.NDArray[np.bool_],
    traffic: tuple[Ints, Ints],
) -> Ints:
    """(num_ops,) rendezvous group of every op, -1 for none.

    Collectives over the stages of a replica in the epilogues meet in order, and all that kinds of replicas share.
    """
    group = np.full(extras.num_ops, -1, dtype=np.int64)
    next_group = 0
    in_epilogue = np.arange(copies.entry[layout.num_blocks], copies.num_ops, dtype=np.int64)
    rank = copies.owner[in_epilogue] - layout.num_blocks
    for variant in range(layout.num_variants if layout.schedule.num_stages > 1 else 0):
        of_variant = rank // layout.schedule.num_stages == variant
        next_group = _meet_over_stages(job, copies, in_epilogue[of_variant], layout.num_blocks, group, next_group)
    if job.variants:
        groups = meeting_groups(job, layout, copies, next_group)
        group[: copies.num_ops] = np.maximum(group[: copies.num_ops], groups)
        next_group = int(group.max(initial=-1)) + 1
        for ops in traffic:
            number = ops.shape[0] // layout.num_variants
            group[ops] = next_group + np.tile(np.arange(number), layout.num_variants)
            next_group += number
        starts = pair_groups(job, layout, is_paired, next_group)
        entry = copies.entry[: layout.num_blocks]
        group[entry[starts >= 0]] = starts[starts >= 0]
    return group


def _meet_over_stages(
    job: PipelineJob, copies: Copies, in_epilogue: Ints, num_blocks: int, group: Ints, next_group: int
) -> int:
    """The number of the next free group; fills `group` at the collectives over stages of one kind of replica."""
    num_stages = len(job.stages)
    stage = (copies.owner[in_epilogue] - num_blocks) % num_stages
    axis_of = copies.pool.ops.axis[copies.source[in_epilogue]]
    for axis, members in ((Axis.EMBEDDING, (0, num_stages - 1)), (Axis.MODEL, tuple(range(num_stages)))):
        on_axis = axis_of == axis
        ops_of = [in_epilogue[on_axis & (stage == s)] for s in range(num_stages)]
        counts = [len(ops_of[s]) for s in members]
        if len(set(counts)) > 1 or sum(counts) != sum(len(o) for o in ops_of):
            raise SpecError(
                "stages.epilogue",
                [len(o) for o in ops_of],
                f"collectives over {axis.name} must be as many on each of stages {list(members)} and none elsewhere",
                "give these stages the same ones",
            )
        for s in members:
            group[ops_of[s]] = next_group + np.arange(counts[0])
        next_group += counts[0]
    return next_group


def _join(copies: Copies, rank_of_copy: Ints, extras: Extras, group: Ints) -> Program:
    n = copies.num_ops
    ops = copies.ops_with(extras.ops, list(zip(extras.source, extras.target, strict=True)))
    nothing = np.full(ops.num_ops - n, -1, dtype=np.int64)
    program = Program(
        ops=ops,
        rank=np.concatenate([rank_of_copy[copies.owner], *extras.rank]),
        peer=np.concatenate([np.full(n, -1, dtype=np.int64), *extras.peer]),
        order=np.concatenate([np.arange(n, dtype=np.float64), *extras.order]),
        group=group,
        source=np.concatenate([copies.source, nothing]),
        copy=np.concatenate([copies.owner, nothing]),
        num_ranks=rank_of_copy.shape[0] and int(rank_of_copy.max()) + 1,
        pool=copies.pool,
    )
    return replace(program, wiring=wiring_of(program))
