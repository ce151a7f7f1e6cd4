"""Which pass runs on which stage, in which order."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from echo_explore.graph.execution_graph import Ints
from echo_explore.specs.schedules import (
    PassKind,
    PipelineSchedule,
    build_schedule,
    num_warm_up_forwards,
    posts_receives,
)
from echo_explore.timeline.job import PipelineJob

NUM_KINDS = len(PassKind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Which block runs where; columns of shape (num_blocks,), class by class in the order of the schedule.

    Attributes:
        schedule: where the order comes from, that of one kind of replica.
        rank: rank class, `variant * num_stages + stage`.
        phase: PassKind.
        micro_batch: micro-batch.
        chunk: chunk of the stage.
        model_chunk: place of the chunk, see `PipelineSchedule.placement`.
        at: (num_ranks, NUM_KINDS, num_chunks, num_micro_batches) number of a block, -1 where there is none.
        first: (num_ranks + 1,) offsets of the blocks of every rank class.
        partner: (num_blocks,) the backward that a forward runs together with, and the reverse; -1: it runs alone.
    """

    schedule: PipelineSchedule
    rank: Ints
    phase: Ints
    micro_batch: Ints
    chunk: Ints
    model_chunk: Ints
    at: Ints
    first: Ints
    partner: Ints

    @property
    def num_blocks(self) -> int:
        """Blocks of all stages."""
        return int(self.stage.shape[0])

    @property
    def num_variants(self) -> int:
        """Kinds of replicas; each has as many blocks."""
        return int(self.first.shape[0] - 1) // self.schedule.num_stages

    @property
    def stage(self) -> Ints:
        """(num_blocks,) Pipeline stage."""
        return self.rank % self.schedule.num_stages if self.num_variants > 1 else self.rank

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches laid out."""
        return int(self.at.shape[3])

    def last_block(self, rank: int) -> int:
        """The last block of a rank class."""
        return int(self.first[rank + 1]) - 1

    def last_gradient(self, rank: int, chunk: int) -> int:
        """The block after which all gradients of weights of a chunk are there."""
        kinds = (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT)
        return int(self.at[rank, kinds, chunk].max())


def schedule_of(job: PipelineJob, num_micro_batches: int) -> PipelineSchedule:
    """The schedule of the job for a number of micro-batches.

    Raises:
        SpecError: see `specs.schedules.build_schedule`.
    """
    return build_schedule(
        job.schedule,
        pipeline_parallel=len(job.stages),
        virtual_pipeline=len(job.stages[0].chunks),
        num_micro_batches=num_micro_batches,
        lines=job.schedule_lines,
        ahead=job.ahead,
    )


def lay_out(job: PipelineJob, num_micro_batches: int) -> Layout:
    """The blocks of all rank classes for a number of micro-batches.

    Raises:
        SpecError: see `schedule_of`.
    """
    layout = _laid_out(schedule_of(job, num_micro_batches), num_micro_batches, job.overlap_exchanges, job.ahead)
    return _repeated(layout, job.num_variants) if job.variants else layout


@lru_cache(maxsize=8)
def _repeated(layout: Layout, num_variants: int) -> Layout:
    """The blocks of several kinds of replicas, one behind the other."""
    shifts = layout.num_blocks * np.arange(num_variants, dtype=np.int64)

    def numbers(blocks: Ints) -> Ints:
        return np.concatenate([np.where(blocks >= 0, blocks + shift, -1) for shift in shifts])

    return Layout(
        schedule=layout.schedule,
        rank=np.concatenate([layout.rank + layout.schedule.num_stages * v for v in range(num_variants)]),
        phase=np.tile(layout.phase, num_variants),
        micro_batch=np.tile(layout.micro_batch, num_variants),
        chunk=np.tile(layout.chunk, num_variants),
        model_chunk=np.tile(layout.model_chunk, num_variants),
        at=numbers(layout.at),
        first=np.concatenate([layout.first[:1], *(layout.first[1:] + shift for shift in shifts)]),
        partner=numbers(layout.partner),
    )


@lru_cache(maxsize=32)
def _laid_out(schedule: PipelineSchedule, num_micro_batches: int, overlap_exchanges: bool, ahead: int) -> Layout:
    orders = schedule.orders
    counts = np.array([order.num_passes for order in orders], dtype=np.int64)
    stage = np.repeat(np.arange(len(orders), dtype=np.int64), counts)
    phase = np.concatenate([o.phase for o in orders])
    micro_batch = np.concatenate([o.micro_batch for o in orders])
    chunk = np.concatenate([o.chunk for o in orders])
    at = np.full((schedule.num_stages, NUM_KINDS, schedule.num_chunks, num_micro_batches), -1, dtype=np.int64)
    at[stage, phase, chunk, micro_batch] = np.arange(stage.shape[0])
    first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    partner = np.full(stage.shape[0], -1, dtype=np.int64)
    if overlap_exchanges:
        if posts_receives(schedule.name):
            forwards = joined_forwards(schedule, first)
        else:
            forwards = np.flatnonzero(starts_pair(phase, first, num_micro_batches, schedule.num_chunks, ahead))
        partner[forwards], partner[forwards + 1] = forwards + 1, forwards
    return Layout(
        schedule=schedule,
        rank=stage,
        phase=phase,
        micro_batch=micro_batch,
        chunk=chunk,
        model_chunk=schedule.placement[stage, chunk],
        at=at,
        first=first,
        partner=partner,
    )


def joined_forwards(schedule: PipelineSchedule, first: Ints) -> Ints:
    """Blocks of forwards that are one step with the backward behind them, see `StageOrder.joined`.

    Args:
        schedule: of the job.
        first: (num_ranks + 1,) offsets of the blocks of every rank class, the stages of each kind of replica in turn.
    """
    offsets = enumerate(first[:-1].tolist())
    return np.concatenate([start + schedule.orders[rank % schedule.num_stages].joined for rank, start in offsets])


def starts_pair(phase: Ints, first: Ints, num_micro_batches: int, num_chunks: int, ahead: int) -> npt.NDArray[np.bool_]:
    """(num_blocks,) forwards of the steady phase of Megatron's schedules, each with the backward behind it.

    Args:
        phase: (num_blocks,) PassKind.
        first: (num_stages + 1,) offsets of the blocks of every stage.
        num_micro_batches: of the step.
        num_chunks: of a stage.
        ahead: see `specs.schedules.num_warm_up_forwards`.
    """
    starts = np.zeros(phase.shape[0], dtype=np.bool_)
    starts[:-1] = (phase[:-1] == PassKind.FORWARD) & (phase[1:] == PassKind.BACKWARD)
    num_stages = first.shape[0] - 1
    for s in range(num_stages):
        warm_up = num_warm_up_forwards(
            pipeline_parallel=num_stages,
            virtual_pipeline=num_chunks,
            num_micro_batches=num_micro_batches,
            rank=s,
            ahead=ahead,
        )
        starts[first[s] : first[s] + warm_up] = False
        starts[first[s + 1] - 1] = False
    return starts
