"""Which forward or backward runs on which stage, in which order."""

from dataclasses import dataclass

import numpy as np

from echo_explore.graph.execution_graph import Ints
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.schedules import stage_order


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
