"""When transfers between stages may start: where the programs of sender and receiver launch them.

Without overlap megatron-core (0.16.1, `schedules.py`) launches sends and receives together at exchange points, and its
compute stream waits for all of them: after every pass in 1F1B, after every pair of a forward and a backward in the
steady phase of interleaved 1F1B (`send_forward_backward_recv_forward_backward`). With overlap
(`send_forward_recv_forward(..., overlap_p2p_comm=True)`) it posts the next receive of a direction when it launches the
send of the last. Other schedules run on torch.distributed.pipelining (2.13, `_add_send_recv`), which posts receives as
soon as their sender has issued its pass. In DualPipe a forward and the backward behind it receive and send as one.
"""

from dataclasses import dataclass

import numpy as np

from echo_explore.graph.execution_graph import Ints
from echo_explore.specs.schedules import PassKind, posts_receives
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.layout import Layout, joined_forwards, starts_pair


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """Exchange points; every array has shape (num_blocks,).

    Attributes:
        sent_after: block after which the transfer of a block is launched.
        posted_after: block after which the receive that a block needs is posted, -1: early enough.
        awaited_by: block that waits for what a block receives.
        holds: whether the sender's compute stream waits for its transfers.
    """

    sent_after: Ints
    posted_after: Ints
    awaited_by: Ints
    holds: bool


def exchange_points(job: PipelineJob, layout: Layout) -> Exchange:
    """The exchange points of the job's schedule."""
    number = np.arange(layout.num_blocks, dtype=np.int64)
    if posts_receives(job.schedule):
        starts = _joined(layout)
        ends = np.concatenate([[False], starts[:-1]])
        early = np.full_like(number, -1)
        return Exchange(sent_after=number + starts, posted_after=early, awaited_by=number - ends, holds=False)
    first_of_rank = layout.first[layout.rank]
    if job.overlap_p2p:
        is_forward = layout.phase == PassKind.FORWARD
        latest = np.stack([np.maximum.accumulate(np.where(is_forward == side, number, -1)) for side in (False, True)])
        before = np.where(number > 0, latest[is_forward.astype(np.int64), np.maximum(number - 1, 0)], -1)
        posted = np.where(before >= first_of_rank, before, -1)
        return Exchange(sent_after=number, posted_after=posted, awaited_by=number, holds=False)
    starts = _pairs(job, layout)
    ends_pair = np.concatenate([[False], starts[:-1]])
    awaited_by = number - ends_pair
    before = awaited_by - 1
    return Exchange(
        sent_after=number + starts,
        posted_after=np.where(before >= first_of_rank, before, -1),
        awaited_by=awaited_by,
        holds=True,
    )


def _joined(layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(num_blocks,) forwards that are one step with the backward behind them, see `StageOrder.joined`."""
    starts = np.zeros(layout.num_blocks, dtype=np.bool_)
    starts[joined_forwards(layout.schedule, layout.first)] = True
    return starts


def _pairs(job: PipelineJob, layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(num_blocks,) forwards exchanged together with the backward behind them: the steady phase of interleaving."""
    num_chunks = len(job.stages[0].chunks)
    if num_chunks == 1:
        return np.zeros(layout.num_blocks, dtype=np.bool_)
    num_blocks, num_stages = layout.num_blocks // layout.num_variants, layout.schedule.num_stages
    phase, first = layout.phase[:num_blocks], layout.first[: num_stages + 1]
    return np.tile(starts_pair(phase, first, layout.num_micro_batches, num_chunks, job.ahead), layout.num_variants)
