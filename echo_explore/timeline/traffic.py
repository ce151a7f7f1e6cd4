"""Transfers outside of blocks: between stages, and of gradients and parameters over data-parallel ranks."""

import numpy as np

from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.timeline.blocks import Blocks
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.layout import Layout
from echo_explore.timeline.ops import Charge, Ops, Stream
from echo_explore.timeline.program import Copies
from echo_explore.timeline.schedules import BACKWARD, FORWARD


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
    ends_stage = (block + 1) % layout.per_stage == 0
    return copies.entry[np.where(ends_stage, layout.num_blocks + layout.stage[block], block + 1)]


def add_sends(job: PipelineJob, layout: Layout, copies: Copies, extras: Extras) -> Ints:
    """(num_blocks,) op of the transfer to the next or previous chunk of the model after each block, -1 for none."""
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


def add_gathers(job: PipelineJob, blocks: Blocks, layout: Layout, copies: Copies, extras: Extras) -> Ints:
    """Ops of the parameter gathers, which are issued at the start of the step and hold the row that needs them."""
    found: list[tuple[int, float, float, int, int]] = []
    for s, stage in enumerate(job.stages if job.overlap_param_gather else ()):
        for v, chunk in enumerate(stage.chunks):
            block = int(layout.at[s, FORWARD, v, 0])
            distinct = int(blocks.which[s, FORWARD, v])
            found += [
                (
                    s,
                    g.time_s,
                    g.sigma_log,
                    int(copies.entry[block]) + blocks.op_at(distinct, g.needed_before),
                    g.pair_class,
                )
                for g in chunk.gathers
            ]
    if not found:
        return np.zeros(0, dtype=np.int64)
    stage_of, time_s, sigma_log, needed, pair_class = (np.array(column) for column in zip(*found, strict=True))
    ops = extras.add(
        stream=Stream.DATA,
        charge=Charge.DATA,
        rank=stage_of.astype(np.int64),
        duration_s=time_s,
        sigma_log=sigma_log,
        order=np.full(stage_of.shape, -1.0),
        traffic_class=pair_class.astype(np.int64),
    )
    extras.link(ops, needed.astype(np.int64))
    return ops


def add_buckets(
    job: PipelineJob, blocks: Blocks, layout: Layout, copies: Copies, send_of: Ints, extras: Extras
) -> Ints:
    """Ops of the bucket reductions: beside the last backward of their chunk, or one by one after that of the stage."""
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
                    found.append((s, bucket.time_s, bucket.sigma_log, ready, ready, bucket.pair_class))
                else:
                    behind = int(copies.exit[last_block])
                    found.append((s, bucket.time_s, bucket.sigma_log, after_all, behind, bucket.pair_class))
    if not found:
        return np.zeros(0, dtype=np.int64)
    stage_of, time_s, sigma_log, after, behind_op, pair_class = (
        np.array(column) for column in zip(*found, strict=True)
    )
    ops = extras.add(
        stream=Stream.DATA,
        charge=Charge.DATA,
        rank=stage_of.astype(np.int64),
        duration_s=time_s,
        sigma_log=sigma_log,
        order=behind_op + 0.5,
        traffic_class=pair_class.astype(np.int64),
    )
    extras.link(after.astype(np.int64), ops)
    extras.link(ops, copies.entry[layout.num_blocks + stage_of.astype(np.int64)])
    return ops
