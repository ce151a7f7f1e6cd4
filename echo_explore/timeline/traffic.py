"""Transfers outside of blocks: between stages, and of gradients and parameters over data-parallel ranks."""

import numpy as np

from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.specs.schedules import PassKind, posts_receives
from echo_explore.timeline.blocks import Blocks
from echo_explore.timeline.exchange import exchange_points
from echo_explore.timeline.job import ChunkJob, PipelineJob
from echo_explore.timeline.layout import Layout
from echo_explore.timeline.ops import AXIS_STREAM, Charge, Ops, Stream
from echo_explore.timeline.program import Copies


class Extras:
    """Ops that are no copies of templates, and edges, collected while a program is built.

    Attributes:
        ops: parts in the order in which they were added.
        rank: of the ops of each part.
        peer: of the ops of each part.
        order: of the ops of each part.
        source: of edges.
        target: of edges.
    """

    def __init__(self, first: int) -> None:
        """Number the first op `first`."""
        self._next = first
        self.rank: list[Ints] = []
        self.peer: list[Ints] = []
        self.order: list[Floats] = []
        self.source: list[Ints] = []
        self.target: list[Ints] = []
        self.ops: list[Ops] = []

    @property
    def num_ops(self) -> int:
        """Ops so far, those before the first included."""
        return self._next

    def add(
        self,
        *,
        stream: Stream | Ints,
        charge: Charge,
        rank: Ints,
        duration_s: Floats,
        sigma_log: Floats,
        order: Floats,
        traffic_class: Ints | None = None,
        peer: Ints | None = None,
    ) -> Ints:
        """Indices of new ops."""
        n = rank.shape[0]
        ops = Ops.blank(n)
        ops.stream[:] = stream
        ops.charge[:] = charge
        ops.duration_s[:] = duration_s
        ops.sigma_log[:] = sigma_log
        if traffic_class is not None:
            ops.traffic_class[:] = traffic_class
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


def _next_entry(layout: Layout, copies: Copies, block: Ints) -> Ints:
    """First op of what the stage runs after a block: its next block or its epilogue."""
    ends_stage = block + 1 == layout.first[layout.rank[block] + 1]
    return copies.entry[np.where(ends_stage, layout.num_blocks + layout.rank[block], block + 1)]


def add_sends(job: PipelineJob, layout: Layout, copies: Copies, extras: Extras) -> Ints:
    """(num_blocks,) op of the transfer to the next or previous chunk of the model after each block, -1 for none.

    A transfer starts when sender and receiver have both launched it, and the receiver's block starts after it. A chunk
    that hands over to one of its own stage sends nothing.
    """
    num_chunks = layout.schedule.num_model_chunks
    send_of = np.full(layout.num_blocks, -1, dtype=np.int64)
    forward_s = np.array([stage.send_forward_s for stage in job.classes])
    backward_s = np.array([stage.send_backward_s for stage in job.classes])
    sigma = np.array([stage.send_sigma_log for stage in job.classes])
    stage_of, chunk_of = layout.schedule.stage_and_chunk()
    is_forward = layout.phase == PassKind.FORWARD
    is_gradient = (layout.phase == PassKind.BACKWARD) | (layout.phase == PassKind.BACKWARD_INPUT)
    points = exchange_points(job, layout)
    for stream, sends, seconds, turn in (
        (Stream.SEND_FORWARD, is_forward & ((layout.model_chunk + 1) % num_chunks > 0), forward_s, 1),
        (Stream.SEND_BACKWARD, is_gradient & (layout.model_chunk % num_chunks > 0), backward_s, -1),
    ):
        block = np.flatnonzero(sends)
        to_chunk = layout.model_chunk[block] + turn
        block, to_chunk = (column[stage_of[to_chunk] != layout.stage[block]] for column in (block, to_chunk))
        rank = layout.rank[block]
        to_rank = rank - layout.stage[block] + stage_of[to_chunk]
        ops = extras.add(
            stream=stream,
            charge=Charge.PIPELINE,
            rank=rank,
            peer=to_rank,
            duration_s=seconds[rank],
            sigma_log=sigma[rank],
            order=block.astype(np.float64),
        )
        send_of[block] = ops
        kinds = (PassKind.FORWARD,) if turn > 0 else (PassKind.BACKWARD, PassKind.BACKWARD_INPUT)
        micro_batch = layout.micro_batch[block]
        receiver = np.max([layout.at[to_rank, kind, chunk_of[to_chunk], micro_batch] for kind in kinds], axis=0)
        extras.link(copies.exit[points.sent_after[block]], ops)
        extras.link(ops, copies.entry[points.awaited_by[receiver]])
        posted = points.posted_after[receiver]
        extras.link(copies.exit[posted[posted >= 0]], ops[posted >= 0])
        if points.holds:
            extras.link(ops, _next_entry(layout, copies, points.sent_after[block]))
    return send_of


def add_gathers(job: PipelineJob, blocks: Blocks, layout: Layout, copies: Copies, extras: Extras) -> Ints:
    """Ops of the parameter gathers, which are issued at the start of the step and hold the row that needs them."""
    found: list[tuple[int, float, float, int, int, int]] = []
    for s, stage in enumerate(job.classes if job.overlap_param_gather else ()):
        for v, chunk in enumerate(stage.chunks):
            block = int(layout.at[s, PassKind.FORWARD, v, 0])
            distinct = int(blocks.which[s, PassKind.FORWARD, v])
            found += [
                (
                    s,
                    g.time_s,
                    g.sigma_log,
                    int(copies.entry[block]) + blocks.op_at(distinct, g.needed_before),
                    g.pair_class,
                    int(AXIS_STREAM[g.axis]),
                )
                for g in chunk.gathers
            ]
    if not found:
        return np.zeros(0, dtype=np.int64)
    stage_of, time_s, sigma_log, needed, pair_class, stream = (np.array(column) for column in zip(*found, strict=True))
    ops = extras.add(
        stream=stream.astype(np.int64),
        charge=Charge.DATA,
        rank=stage_of.astype(np.int64),
        duration_s=time_s,
        sigma_log=sigma_log,
        order=np.full(stage_of.shape, -1.0),
        traffic_class=pair_class.astype(np.int64),
    )
    extras.link(ops, needed.astype(np.int64))
    return ops


def _gradient_row(chunk: ChunkJob, kind: int, row: int) -> int:
    """Row of the pass of that kind after which the gradients up to row `row` of the backward are there, -1: at once."""
    if kind == PassKind.BACKWARD_WEIGHT and chunk.split is not None:
        return int(chunk.split.weight_row[row])
    return row


def add_buckets(
    job: PipelineJob, blocks: Blocks, layout: Layout, copies: Copies, send_of: Ints, extras: Extras
) -> Ints:
    """Ops of the bucket reductions: beside the last backward of their chunk, or one by one after that of the stage."""
    found: list[tuple[int, float, float, int, int, int, int]] = []
    for s, stage in enumerate(job.classes):
        last_block = layout.last_block(s)
        after_all = int(copies.exit[last_block])
        holds = not job.overlap_p2p and not posts_receives(job.schedule)
        if not job.overlap_grad_reduce and holds and send_of[last_block] >= 0:
            after_all = int(send_of[last_block])
        for v, chunk in enumerate(stage.chunks):
            block = layout.last_gradient(s, v)
            distinct = int(blocks.which[s, layout.phase[block], v])
            ready = 0
            for bucket in chunk.buckets:
                stream = int(AXIS_STREAM[bucket.axis])
                if job.overlap_grad_reduce:
                    row = _gradient_row(chunk, int(layout.phase[block]), bucket.ready_after)
                    row_op = int(copies.entry[block]) + (blocks.op_after(distinct, row) if row >= 0 else 0)
                    ready = max(ready, row_op)
                    found.append((s, bucket.time_s, bucket.sigma_log, ready, ready, bucket.pair_class, stream))
                else:
                    behind = int(copies.exit[last_block])
                    found.append((s, bucket.time_s, bucket.sigma_log, after_all, behind, bucket.pair_class, stream))
    if not found:
        return np.zeros(0, dtype=np.int64)
    stage_of, time_s, sigma_log, after, behind_op, pair_class, streams = (
        np.array(column) for column in zip(*found, strict=True)
    )
    ops = extras.add(
        stream=streams.astype(np.int64),
        charge=Charge.DATA,
        rank=stage_of.astype(np.int64),
        duration_s=time_s,
        sigma_log=sigma_log,
        order=behind_op + 0.5,
        traffic_class=pair_class.astype(np.int64),
    )
    extras.link(after.astype(np.int64), ops)
    if not job.overlap_grad_reduce:
        same_stage = np.flatnonzero(stage_of[1:] == stage_of[:-1])
        extras.link(ops[same_stage], ops[same_stage + 1])
    extras.link(ops, copies.entry[layout.num_blocks + stage_of.astype(np.int64)])
    return ops
