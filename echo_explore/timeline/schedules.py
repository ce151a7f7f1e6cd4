"""The order in which each pipeline stage runs its forwards and backwards: no pipelining, 1F1B, interleaved 1F1B.

References:
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv
    2104.04473, section 2.2; megatron-core 0.16.1 `pipeline_parallel/schedules.py` (`get_pp_rank_microbatches`,
    `get_schedule_table`, with `microbatch_group_size_per_vp_stage` at its default, the number of stages).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph.execution_graph import Ints

FORWARD, BACKWARD = 0, 1
"""Codes of the two phases in `StageOrder.phase`."""

PhaseName = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageOrder:
    """What one stage runs, in order; every array has shape (2 * num_micro_batches * virtual_pipeline,).

    Attributes:
        phase: FORWARD or BACKWARD.
        micro_batch: from 0.
        chunk: model chunk of the stage, from 0.
    """

    phase: Ints
    micro_batch: Ints
    chunk: Ints


def num_warm_up_forwards(*, pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int, rank: int) -> int:
    """Forwards that the stage runs before its first backward.

    With p stages, v chunks a stage, m micro-batches, on stage r: p - r - 1 for v = 1, else 2 (p - r - 1) + (v - 1) p;
    m v at most. Valid for p >= 1.
    """
    behind = pipeline_parallel - rank - 1
    wanted = behind if virtual_pipeline == 1 else 2 * behind + (virtual_pipeline - 1) * pipeline_parallel
    return min(wanted, num_micro_batches * virtual_pipeline)


def check_schedule(*, pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int) -> None:
    """Refuse what megatron-core refuses.

    Raises:
        SpecError: a count below 1, chunks without stages, micro-batches that interleaving cannot group.
    """
    for field, value in (
        ("pipeline_parallel", pipeline_parallel),
        ("virtual_pipeline", virtual_pipeline),
        ("num_micro_batches", num_micro_batches),
    ):
        if value < 1:
            raise SpecError(field, value, "must be 1 or more", f"set {field}=1")
    if virtual_pipeline > 1 and pipeline_parallel == 1:
        raise SpecError(
            "virtual_pipeline", virtual_pipeline, "needs pipeline_parallel above 1", "set virtual_pipeline=1"
        )
    if virtual_pipeline > 1 and num_micro_batches % pipeline_parallel:
        near = max(1, round(num_micro_batches / pipeline_parallel)) * pipeline_parallel
        raise SpecError(
            "num_micro_batches",
            num_micro_batches,
            f"interleaving needs a multiple of pipeline_parallel = {pipeline_parallel}",
            f"use {near} micro-batches, or virtual_pipeline=1",
        )


def stage_order(*, pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int, rank: int) -> StageOrder:
    """The order of stage `rank` as arrays.

    Forward number k runs micro-batch `group * p + k mod p` of chunk `(k div p) mod v`, in groups of p micro-batches;
    backward number k the same with the chunks counted from the last. After the warm-up forwards they alternate.

    Raises:
        SpecError: see `check_schedule`.
    """
    check_schedule(
        pipeline_parallel=pipeline_parallel, virtual_pipeline=virtual_pipeline, num_micro_batches=num_micro_batches
    )
    total = num_micro_batches * virtual_pipeline
    number = np.arange(total, dtype=np.int64)
    if virtual_pipeline == 1:
        micro_batch, chunk = number, np.zeros(total, dtype=np.int64)
    else:
        per_group = pipeline_parallel * virtual_pipeline
        micro_batch = number // per_group * pipeline_parallel + number % pipeline_parallel
        chunk = number % per_group // pipeline_parallel
    warm_up = num_warm_up_forwards(
        pipeline_parallel=pipeline_parallel,
        virtual_pipeline=virtual_pipeline,
        num_micro_batches=num_micro_batches,
        rank=rank,
    )
    # Forward k lies at k, at 2k - warm_up once backwards alternate with it; backward k behind forward k + warm_up.
    forward_at = np.where(number < warm_up, number, 2 * number - warm_up)
    backward_at = np.where(number < total - warm_up, warm_up + 2 * number + 1, total + number)

    def merged(forward: Ints, backward: Ints) -> Ints:
        column = np.empty(2 * total, dtype=np.int64)
        column[forward_at] = forward
        column[backward_at] = backward
        return column

    return StageOrder(
        phase=merged(np.full(total, FORWARD), np.full(total, BACKWARD)),
        micro_batch=merged(micro_batch, micro_batch),
        chunk=merged(chunk, virtual_pipeline - 1 - chunk),
    )


def schedule_order(
    pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int, rank: int
) -> list[tuple[PhaseName, int, int]]:
    """(phase, micro-batch, chunk) of everything that pipeline stage `rank` runs in a step, in order.

    Raises:
        SpecError: see `check_schedule`.
    """
    order = stage_order(
        pipeline_parallel=pipeline_parallel,
        virtual_pipeline=virtual_pipeline,
        num_micro_batches=num_micro_batches,
        rank=rank,
    )
    names: tuple[PhaseName, PhaseName] = ("forward", "backward")
    return [(names[p], int(m), int(c)) for p, m, c in zip(order.phase, order.micro_batch, order.chunk, strict=True)]
