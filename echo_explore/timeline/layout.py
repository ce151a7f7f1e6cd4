"""Which pass runs on which stage, in which order."""

from dataclasses import dataclass

import numpy as np

from echo_explore.graph.execution_graph import Ints
from echo_explore.specs.schedules import PassKind, PipelineSchedule, build_schedule
from echo_explore.timeline.job import PipelineJob

NUM_KINDS = len(PassKind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Which block runs where; columns of shape (num_blocks,), stage by stage in the order of the schedule.

    Attributes:
        schedule: where the order comes from.
        stage: stage.
        phase: PassKind.
        micro_batch: micro-batch.
        chunk: chunk of the stage.
        model_chunk: chunk of the model.
        at: (num_stages, NUM_KINDS, num_chunks, num_micro_batches) number of a block, -1 where there is none.
        first: (num_stages + 1,) offsets of the blocks of every stage.
    """

    schedule: PipelineSchedule
    stage: Ints
    phase: Ints
    micro_batch: Ints
    chunk: Ints
    model_chunk: Ints
    at: Ints
    first: Ints

    @property
    def num_blocks(self) -> int:
        """Blocks of all stages."""
        return int(self.stage.shape[0])

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches laid out."""
        return int(self.at.shape[3])

    def last_block(self, stage: int) -> int:
        """The last block of a stage."""
        return int(self.first[stage + 1]) - 1

    def last_gradient(self, stage: int, chunk: int) -> int:
        """The block after which all gradients of weights of a chunk are there."""
        kinds = (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT)
        return int(self.at[stage, kinds, chunk].max())


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
    )


def lay_out(job: PipelineJob, num_micro_batches: int) -> Layout:
    """The blocks of all stages for a number of micro-batches.

    Raises:
        SpecError: see `schedule_of`.
    """
    schedule = schedule_of(job, num_micro_batches)
    orders = schedule.orders
    counts = np.array([order.num_passes for order in orders], dtype=np.int64)
    stage = np.repeat(np.arange(len(orders), dtype=np.int64), counts)
    phase = np.concatenate([o.phase for o in orders])
    micro_batch = np.concatenate([o.micro_batch for o in orders])
    chunk = np.concatenate([o.chunk for o in orders])
    at = np.full((schedule.num_stages, NUM_KINDS, schedule.num_chunks, num_micro_batches), -1, dtype=np.int64)
    at[stage, phase, chunk, micro_batch] = np.arange(stage.shape[0])
    return Layout(
        schedule=schedule,
        stage=stage,
        phase=phase,
        micro_batch=micro_batch,
        chunk=chunk,
        model_chunk=schedule.placement[stage, chunk],
        at=at,
        first=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]),
    )
