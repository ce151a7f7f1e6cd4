"""The program of a whole step: blocks in the order of the schedule, transfers between stages, data-parallel traffic."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.timeline.blocks import Blocks
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.ops import Charge, Ops, Stream
from echo_explore.timeline.program import Copies, Pool, Program, concatenate_ops, copy_templates
from echo_explore.timeline.schedules import BACKWARD, FORWARD, stage_order
from echo_explore.timeline.templates import Template, expand


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Which block runs where; columns of shape (num_blocks,), stage by stage in the order of the schedule.

    Attributes:
        stage: stage.
        phase: FORWARD or BACKWARD.
        micro_batch: micro-batch.
        chunk: chunk of the stage.
        at: (num_stages, 2, num_chunks, num_micro_batches) number of a block.
        per_stage: blocks of one stage.
    """

    stage: Ints
    phase: Ints
    micro_batch: Ints
    chunk: Ints
    at: Ints
    per_stage: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all stages."""
        return int(self.stage.shape[0])


def lay_out(job: PipelineJob, num_micro_batches: int) -> Layout:
    """The blocks of all stages for a number of micro-batches.

    Raises:
        SpecError: see `schedules.check_schedule`.
    """
    num_stages, num_chunks = len(job.stages), len(job.stages[0].chunks)
    orders = [
        stage_order(
            pipeline_parallel=num_stages,
            virtual_pipeline=num_chunks,
            num_micro_batches=num_micro_batches,
            rank=s,
        )
        for s in range(num_stages)
    ]
    per_stage = 2 * num_chunks * num_micro_batches
    phase = np.concatenate([o.phase for o in orders])
    micro_batch = np.concatenate([o.micro_batch for o in orders])
    chunk = np.concatenate([o.chunk for o in orders])
    stage = np.repeat(np.arange(num_stages, dtype=np.int64), per_stage)
    at = np.zeros((num_stages, 2, num_chunks, num_micro_batches), dtype=np.int64)
    at[stage, phase, chunk, micro_batch] = np.arange(stage.shape[0])
    return Layout(stage=stage, phase=phase, micro_batch=micro_batch, chunk=chunk, at=at, per_stage=per_stage)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepProgram:
    """A step ready to run.

    Attributes:
        program: all ops.
        pool: templates they were copied from.
        body_of_source: (num_pool_ops,) template of an op of the pool.
        layout: blocks.
        is_expanded: (num_blocks,) whether a block has all its rows.
        entry: (num_blocks,) first op of a block.
        exit: (num_blocks,) last op of a block.
        send_of: (num_blocks,) op of the transfer that a block ends with, -1 for none.
        gathers: ops of parameter gathers.
        buckets: ops of bucket reductions.
    """

    program: Program
    pool: Pool
    body_of_source: Ints
    layout: Layout
    is_expanded: npt.NDArray[np.bool_]
    entry: Ints
    exit: Ints
    send_of: Ints
    gathers: Ints
    buckets: Ints


class _Extras:
    """Ops that are no copies, and edges, collected while a program is built."""

    def __init__(self, first: int) -> None:
        self._next = first
        self.rank: list[Ints] = []
        self.peer: list[Ints] = []
        self.order: list[Floats] = []
        self.source: list[Ints] = []
        self.target: list[Ints] = []
        self.ops: list[Ops] = []

    def add(
        self,
        *,
        stream: Stream | Ints,
        charge: Charge,
        rank: Ints,
        duration_s: Floats,
        sigma_log: Floats,
        order: Floats,
        collective: Ints | None = None,
        peer: Ints | None = None,
    ) -> Ints:
        """Indices of new ops."""
        n = rank.shape[0]
        ops = Ops.blank(n)
        ops.stream[:] = stream
        ops.charge[:] = charge
        ops.duration_s[:] = duration_s
        ops.sigma_log[:] = sigma_log
        if collective is not None:
            ops.collective[:] = collective
        self.ops.append(ops)
        self.rank.append(rank)
        self.peer.append(np.full(n, -1, dtype=np.int64) if peer is None else peer)
        self.order.append(order)
        self._next += n
        return np.arange(self._next - n, self._next, dtype=np.int64)

    def link(self, source: Ints, target: Ints) -> None:
        """Edges from `source` to `target`."""
        self.source.append(source)
        self.target.append(target)


def build_step(job: PipelineJob, blocks: Blocks, layout: Layout, is_expanded: npt.NDArray[np.bool_]) -> StepProgram:
    """The program of the step.

    # Approximation: a transfer starts when its block ends, whether or not the peer already waits for it
    # (under-estimates where a send without buffer holds the sender back).
    # Approximation: transfers between stages slow no kernel (under-estimates).

    Args:
        job: the step.
        blocks: its templates.
        layout: its blocks; their number of micro-batches may differ from the job's.
        is_expanded: (num_blocks,) blocks to run row by row.
    """
    num_distinct = len(blocks.expanded)
    epilogues = _epilogue_templates(job)
    pool = Pool.of([*blocks.expanded, *blocks.collapsed, *epilogues])
    distinct = blocks.which[layout.stage, layout.phase, layout.chunk]
    num_stages = len(job.stages)
    which = np.concatenate(
        [np.where(is_expanded, distinct, distinct + num_distinct), 2 * num_distinct + np.arange(num_stages)]
    )
    copies = copy_templates(pool, which)
    rank_of_copy = np.concatenate([layout.stage, np.arange(num_stages)])
    extras = _Extras(copies.ops.num_ops)
    send_of = _add_sends(job, layout, copies, extras)
    gathers = _add_gathers(job, blocks, layout, copies, extras)
    buckets = _add_buckets(job, blocks, layout, copies, send_of, extras)
    n = layout.num_blocks
    extras.add(
        stream=Stream.COMPUTE,
        charge=Charge.HOST,
        rank=np.arange(num_stages, dtype=np.int64),
        duration_s=np.full(num_stages, job.host_step_s),
        sigma_log=np.zeros(num_stages),
        order=copies.exit[n:] + 0.5,
    )
    program = _join(copies, rank_of_copy, extras, _rendezvous(job, copies, n))
    return StepProgram(
        program=program,
        pool=pool,
        body_of_source=np.repeat(np.arange(len(pool.templates), dtype=np.int64), np.diff(pool.first)),
        layout=layout,
        is_expanded=is_expanded,
        entry=copies.entry[:n],
        exit=copies.exit[:n],
        send_of=send_of,
        gathers=gathers,
        buckets=buckets,
    )


def _epilogue_templates(job: PipelineJob) -> list[Template]:
    charge = Charge.PIPELINE if len(job.stages) > 1 else Charge.TENSOR
    return [expand(stage.epilogue, model_charge=charge) for stage in job.stages]


def _next_entry(layout: Layout, copies: Copies, block: Ints) -> Ints:
    """First op of what the stage runs after a block: its next block or its epilogue."""
    ends_stage = (block + 1) % layout.per_stage == 0
    return copies.entry[np.where(ends_stage, layout.num_blocks + layout.stage[block], block + 1)]


def _add_sends(job: PipelineJob, layout: Layout, copies: Copies, extras: _Extras) -> Ints:
    num_stages, num_chunks = len(job.stages), len(job.stages[0].chunks)
    send_of = np.full(layout.num_blocks, -1, dtype=np.int64)
    forward_s = np.array([stage.send_forward_s for stage in job.stages])
    backward_s = np.array([stage.send_backward_s for stage in job.stages])
    sigma = np.array([stage.send_sigma_log for stage in job.stages])
    model_chunk = layout.chunk * num_stages + layout.stage
    is_forward = layout.phase == FORWARD
    for stream, sends, seconds, turn in (
        (Stream.SEND_FORWARD, is_forward & (model_chunk < num_stages * num_chunks - 1), forward_s, 1),
        (Stream.SEND_BACKWARD, ~is_forward & (model_chunk > 0), backward_s, -1),
    ):
        block = np.flatnonzero(sends)
        stage = layout.stage[block]
        to_chunk = model_chunk[block] + turn
        to_stage = to_chunk % num_stages
        ops = extras.add(
            stream=stream,
            charge=Charge.PIPELINE,
            rank=stage,
            peer=to_stage,
            duration_s=seconds[stage],
            sigma_log=sigma[stage],
            order=block.astype(np.float64),
        )
        send_of[block] = ops
        receiver = layout.at[to_stage, layout.phase[block], to_chunk // num_stages, layout.micro_batch[block]]
        extras.link(copies.exit[block], ops)
        extras.link(ops, copies.entry[receiver])
        if not job.overlap_p2p:
            extras.link(ops, _next_entry(layout, copies, block))
    return send_of


def _add_gathers(job: PipelineJob, blocks: Blocks, layout: Layout, copies: Copies, extras: _Extras) -> Ints:
    found: list[tuple[int, float, float, int]] = []
    for s, stage in enumerate(job.stages if job.overlap_param_gather else ()):
        for v, chunk in enumerate(stage.chunks):
            block = int(layout.at[s, FORWARD, v, 0])
            distinct = int(blocks.which[s, FORWARD, v])
            found += [
                (s, g.time_s, g.sigma_log, int(copies.entry[block]) + blocks.op_at(distinct, g.needed_before))
                for g in chunk.gathers
            ]
    if not found:
        return np.zeros(0, dtype=np.int64)
    stage_of, time_s, sigma_log, needed = (np.array(column) for column in zip(*found, strict=True))
    ops = extras.add(
        stream=Stream.DATA,
        charge=Charge.DATA,
        rank=stage_of.astype(np.int64),
        duration_s=time_s,
        sigma_log=sigma_log,
        order=np.full(stage_of.shape, -1.0),
        collective=np.full(stage_of.shape, int(Collective.ALL_GATHER), dtype=np.int64),
    )
    extras.link(ops, needed.astype(np.int64))
    return ops


def _add_buckets(
    job: PipelineJob, blocks: Blocks, layout: Layout, copies: Copies, send_of: Ints, extras: _Extras
) -> Ints:
    found: list[tuple[int, float, float, int, int, int]] = []
    last_micro_batch = layout.at.shape[3] - 1
    for s, stage in enumerate(job.stages):
        last_block = (s + 1) * layout.per_stage - 1
        after_all = int(copies.exit[last_block])
        if not job.overlap_grad_reduce and not job.overlap_p2p and send_of[last_block] >= 0:
            after_all = int(send_of[last_block])
        for v, chunk in enumerate(stage.chunks):
            block = int(layout.at[s, BACKWARD, v, last_micro_batch])
            distinct = int(blocks.which[s, BACKWARD, v])
            ready = 0
            for bucket in chunk.buckets:
                if job.overlap_grad_reduce:
                    row_op = int(copies.entry[block]) + blocks.op_after(distinct, bucket.ready_after)
                    ready = max(ready, row_op)
                    found.append((s, bucket.time_s, bucket.sigma_log, ready, ready, int(bucket.collective)))
                else:
                    behind = int(copies.exit[last_block])
                    found.append((s, bucket.time_s, bucket.sigma_log, after_all, behind, int(bucket.collective)))
    if not found:
        return np.zeros(0, dtype=np.int64)
    stage_of, time_s, sigma_log, after, behind_op, collective = (
        np.array(column) for column in zip(*found, strict=True)
    )
    ops = extras.add(
        stream=Stream.DATA,
        charge=Charge.DATA,
        rank=stage_of.astype(np.int64),
        duration_s=time_s,
        sigma_log=sigma_log,
        order=behind_op + 0.5,
        collective=collective.astype(np.int64),
    )
    extras.link(after.astype(np.int64), ops)
    extras.link(ops, copies.entry[layout.num_blocks + stage_of.astype(np.int64)])
    return ops


def _rendezvous(job: PipelineJob, copies: Copies, num_blocks: int) -> Ints:
    """(num_ops of the copies,) rendezvous group of every op; collectives over stages in the epilogues meet in order."""
    group = np.full(copies.ops.num_ops, -1, dtype=np.int64)
    num_stages = len(job.stages)
    if num_stages == 1:
        return group
    in_epilogue = np.flatnonzero(copies.owner >= num_blocks)
    stage = copies.owner[in_epilogue] - num_blocks
    next_group = 0
    for axis, members in ((Axis.EMBEDDING, (0, num_stages - 1)), (Axis.MODEL, tuple(range(num_stages)))):
        on_axis = copies.ops.axis[in_epilogue] == axis
        ops_of = [in_epilogue[on_axis & (stage == s)] for s in range(num_stages)]
        counts = [len(ops_of[s]) for s in members]
        if len(set(counts)) > 1 or sum(counts) != sum(len(o) for o in ops_of):
            raise SpecError(
                "stages.epilogue",
                [len(o) for o in ops_of],
                f"collectives over {axis.name} must be as many on each of the stages {list(members)} and none elsewhere",
                "give these stages the same ones",
            )
        for s in members:
            group[ops_of[s]] = next_group + np.arange(counts[0])
        next_group += counts[0]
    return group


def _join(copies: Copies, rank_of_copy: Ints, extras: _Extras, group: Ints) -> Program:
    n = copies.ops.num_ops
    joined = concatenate_ops([copies.ops, *extras.ops])
    num_extras = joined.num_ops - n
    nothing = np.full(num_extras, -1, dtype=np.int64)
    return Program(
        ops=replace(
            joined,
            edge_source=np.concatenate([copies.ops.edge_source, *extras.source]),
            edge_target=np.concatenate([copies.ops.edge_target, *extras.target]),
        ),
        rank=np.concatenate([rank_of_copy[copies.owner], *extras.rank]),
        peer=np.concatenate([np.full(n, -1, dtype=np.int64), *extras.peer]),
        order=np.concatenate([np.arange(n, dtype=np.float64), *extras.order]),
        group=np.concatenate([group, nothing]),
        source=np.concatenate([copies.source, nothing]),
        copy=np.concatenate([copies.owner, nothing]),
        num_ranks=rank_of_copy.shape[0] and int(rank_of_copy.max()) + 1,
    )
