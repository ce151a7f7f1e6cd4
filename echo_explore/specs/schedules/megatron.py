"""1F1B, interleaved 1F1B and no pipelining, in megatron-core's order.

References:
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv
    2104.04473, section 2.2; megatron-core 0.16.1 `pipeline_parallel/schedules.py` (`get_pp_rank_microbatches`,
    `get_schedule_table`, with `microbatch_group_size_per_vp_stage` at its default, the number of stages).
"""

import numpy as np

from echo_explore.specs.schedules.passes import Ints, PassKind, StageOrder


def num_warm_up_forwards(
    *, pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int, rank: int, ahead: int = 0
) -> int:
    """Forwards that the stage runs before its first backward.

    With p stages, v chunks a stage, m micro-batches, on stage r: p - r - 1 for v = 1, else 2 (p - r - 1) + (v - 1) p;
    m v at most. `ahead` more where each forward runs together with a backward that must not need it (1 with
    overlap_moe_expert_parallel_comm). Valid for p >= 1.
    """
    behind = pipeline_parallel - rank - 1
    wanted = behind if virtual_pipeline == 1 else 2 * behind + (virtual_pipeline - 1) * pipeline_parallel
    return min(wanted + ahead, num_micro_batches * virtual_pipeline)


def stage_order(
    *, pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int, rank: int, ahead: int = 0
) -> StageOrder:
    """The order of stage `rank`.

    Forward number k runs micro-batch `group * p + k mod p` of chunk `(k div p) mod v`, in groups of p micro-batches;
    backward number k the same with the chunks counted from the last. After the warm-up forwards they alternate.
    """
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
        ahead=ahead,
    )
    # Forward k lies at k, at 2k - warm_up once backwards alternate with it; backward k behind forward k + warm_up.
    forward_at = np.where(number < warm_up, number, 2 * number - warm_up)
    backward_at = np.where(number < total - warm_up, warm_up + 2 * number + 1, total + number)

    def merged(forward: Ints, backward: Ints) -> Ints:
        column = np.empty(2 * total, dtype=np.int64)
        column[forward_at] = forward
        column[backward_at] = backward
        column.setflags(write=False)
        return column

    return StageOrder(
        phase=merged(np.full(total, PassKind.FORWARD), np.full(total, PassKind.BACKWARD)),
        micro_batch=merged(micro_batch, micro_batch),
        chunk=merged(chunk, virtual_pipeline - 1 - chunk),
    )
