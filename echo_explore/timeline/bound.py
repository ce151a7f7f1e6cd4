"""Lower bounds of the step time in closed form: of a priced job, and of a candidate of which only FLOP are known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph import TimedGraph
from echo_explore.graph.execution_graph import Floats
from echo_explore.graph.interleave import exchanges
from echo_explore.specs.schedules import posts_receives
from echo_explore.timeline.checks import check_job
from echo_explore.timeline.host import host_seconds
from echo_explore.timeline.job import ChunkJob, PipelineJob, StageJob
from echo_explore.timeline.layout import schedule_of


def _serial_s(timed: TimedGraph, *, beside: bool = False) -> Floats:
    """(num_ops + 1,) least seconds of the compute stream before each row: kernels and synchronous collectives.

    With `beside`, exchanges of experts may run beside something else and hold nothing.
    """
    graph = timed.graph
    held = graph.is_compute | (graph.is_collective & ~graph.asynchronous)
    if beside:
        held &= ~exchanges(graph)
    return np.concatenate([[0.0], np.cumsum(np.where(held, timed.time_s, 0.0))])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StageBound:
    """Least seconds of the parts of a stage.

    Attributes:
        forward_s: a forward of its first chunk and the transfer to the next stage.
        backward_s: a backward of its first chunk.
        send_s: transfer of a gradient to the stage before; 0 on the first.
        busy_s: all forwards and backwards, and the transfers that hold the stage.
        tail_s: from the end of that to the end of its step.
    """

    forward_s: float
    backward_s: float
    send_s: float
    busy_s: float
    tail_s: float


def _block_s(job: PipelineJob, timed: TimedGraph) -> float:
    serial_s = float(_serial_s(timed, beside=job.overlap_exchanges)[-1])
    if job.overlap_exchanges:  # the host of one pass works beside the kernels of another
        return serial_s
    return max(serial_s, host_seconds(timed, call_s=job.host_call_s, backward_call_s=job.host_backward_call_s))


def _backward_s(job: PipelineJob, chunk: ChunkJob, *, split: bool) -> float:
    """Least seconds of the backward of a chunk, run in one pass or in two."""
    whole_s = _block_s(job, chunk.backward)
    if not split or chunk.split is None:
        return whole_s
    return min(whole_s, _block_s(job, chunk.split.input) + _block_s(job, chunk.split.weight))


def _stage_bound(job: PipelineJob, stage: StageJob, at: int) -> _StageBound:
    num_stages, num_chunks = len(job.stages), len(stage.chunks)
    m = job.num_micro_batches
    forwards = [_block_s(job, chunk.forward) for chunk in stage.chunks]
    backwards = [_block_s(job, chunk.backward) for chunk in stage.chunks]
    send_s = stage.send_backward_s if at > 0 else 0.0
    busy_s, held_s = m * (sum(forwards) + sum(backwards)), 0.0
    if not job.overlap_p2p:
        sends_forward = num_chunks - (at == num_stages - 1)
        sends_backward = num_chunks - (at == 0)
        directions = (sends_forward * stage.send_forward_s, sends_backward * stage.send_backward_s)
        busy_s += m * (sum(directions) if num_chunks == 1 else max(directions))  # interleaving sends both ways at once
        held_s = send_s
    epilogue_s = float(_serial_s(stage.epilogue)[-1]) + job.host_step_s
    return _StageBound(
        forward_s=forwards[0] + stage.send_forward_s,
        backward_s=backwards[0],
        send_s=send_s,
        busy_s=busy_s,
        tail_s=_buckets_s(job, stage, last_s=backwards[0] + held_s) + epilogue_s,
    )


def _buckets_s(job: PipelineJob, stage: StageJob, *, last_s: float) -> float:
    """Seconds from the end of the last backward, counted as `last_s` long, to the end of the bucket reductions.

    Bucket i of chunk 0 starts after the rows up to its own, and those of its axis behind it follow: they end no earlier
    than rows_i + sum_{j>=i} t_j after the start of the last backward.
    """
    if not job.overlap_grad_reduce:
        return sum(bucket.time_s for chunk in stage.chunks for bucket in chunk.buckets)
    chunk = stage.chunks[0]
    rows_s = _serial_s(chunk.backward)
    ends_s, behind_s = 0.0, dict.fromkeys((bucket.axis for bucket in chunk.buckets), 0.0)
    for bucket in reversed(chunk.buckets):
        behind_s[bucket.axis] += bucket.time_s
        ends_s = max(ends_s, float(rows_s[bucket.ready_after + 1]) + behind_s[bucket.axis])
    return max(0.0, ends_s - last_s)


def step_time_lower_bound(job: PipelineJob) -> float:
    """Seconds below which no simulated step of the job lies, at fidelity "kernel" and under any interference.

    With, on stage k, b_k the seconds that its compute stream is held by all forwards and backwards (and by sends,
    without overlap), f_k, g_k a forward and a backward of chunk 0, t_k transfers, e_k bucket reductions and epilogue:

        T >= max_s [ sum_{k<s} (f_k + t_k) + b_s + max_{j<=s} ( sum_{j<=k<s} (t_{k+1} + g_k) + e_j ) ]

    Stage s starts after the first forward has come through the stages before it, is held for b_s, and ends with a
    backward of chunk 0, after which the stages before it still have theirs to do. That holds for 1F1B and interleaved
    1F1B, which start with a forward and end with a backward of chunk 0. For other orders see `_bound_of_any_order`. A
    forward or backward counts with its kernels and synchronous collectives, or its launches if they take longer.

    Raises:
        SpecError: the job is not well formed.
    """
    check_job(job)
    return max(
        _bound_of(replace(job, stages=stages, variants=()))
        for stages in (job.stages, *(variant.stages for variant in job.variants))
    )


def _bound_of(job: PipelineJob) -> float:
    """Seconds below which no step of one kind of replica lies."""
    if posts_receives(job.schedule):
        return _bound_of_any_order(job)
    stages = [_stage_bound(job, stage, at) for at, stage in enumerate(job.stages)]
    best, fill_s = 0.0, 0.0
    for s, stage in enumerate(stages):
        rest_s = stage.tail_s
        drain_s = 0.0 if job.overlap_p2p else -stage.send_s  # busy_s already has the transfer that starts the drain
        for k in range(s - 1, -1, -1):
            drain_s += stages[k + 1].send_s + stages[k].backward_s
            held_s = 0.0 if job.overlap_p2p else stages[k].send_s
            rest_s = max(rest_s, drain_s + held_s + stages[k].tail_s)
        best = max(best, fill_s + stage.busy_s + rest_s)
        fill_s += stage.forward_s
    return best


def _bound_of_any_order(job: PipelineJob) -> float:
    """Seconds below which no step lies, whatever the order of its passes.

    T >= max_s [ sum_{c < c_s} (f_c + t_c) + b_s + w_s ]: stage s starts once the first forward has come through all
    chunks of a copy of the model before its own first chunk c_s there (transfers between stages included), is held for
    all its passes b_s, and by its epilogue; w_s has the bucket reductions too where they run behind the last backward.
    """
    schedule = schedule_of(job, job.num_micro_batches)
    stage_of, chunk_of = schedule.stage_and_chunk()
    reached_s = [0.0]
    for c in range(len(stage_of) - 1):
        stage = job.stages[int(stage_of[c])]
        send_s = stage.send_forward_s if stage_of[c] != stage_of[c + 1] else 0.0
        next_s = reached_s[-1] + _block_s(job, stage.chunks[int(chunk_of[c])].forward) + send_s
        reached_s.append(next_s if (c + 1) % schedule.num_model_chunks else 0.0)
    best = 0.0
    for s, stage in enumerate(job.stages):
        passes_s = sum(
            _block_s(job, chunk.forward) + _backward_s(job, chunk, split=schedule.splits_backward)
            for chunk in stage.chunks
        )
        after_s = float(_serial_s(stage.epilogue)[-1]) + job.host_step_s
        if not job.overlap_grad_reduce:
            after_s += sum(bucket.time_s for chunk in stage.chunks for bucket in chunk.buckets)
        fill_s = min(reached_s[place] for place in schedule.placement[s].tolist())
        best = max(best, fill_s + schedule.micro_batches_of_chunk * passes_s + after_s)
    return best


def cheap_bound(
    *,
    flop: Sequence[float],
    bytes_moved: Sequence[float],
    peak_flop_per_s: float,
    memory_bandwidth_bytes_per_s: float,
    num_micro_batches: int,
    virtual_pipeline: int = 1,
    equal_stages: bool = False,
) -> float:
    """Seconds below which no step lies that executes these FLOP on these stages; needs no graph.

    With w_s = max(flop_s / peak, bytes_s / bandwidth) the least work of stage s in a step, m micro-batches, p stages, v
    chunks: max_s w_s. If the stages are equal, all of them c a micro-batch, 1F1B can't do better than its bubble:
    T >= c (m + (p - 1) / v). If not and v = 1, stage s starts and ends with one micro-batch of those before it:
    T >= max_s ( m c_s + sum_{k<s} c_k ). Both of several stages hold for whole backwards only: where weights' gradients
    run apart, or passes enter at both ends, give the busiest stage alone.

    Args:
        flop: executed FLOP of one GPU of each stage in a step.
        bytes_moved: bytes that it must move to and from its memory at least; 0 if unknown.
        peak_flop_per_s: of one GPU.
        memory_bandwidth_bytes_per_s: of one GPU.
        num_micro_batches: m.
        virtual_pipeline: v.
        equal_stages: every chunk of every stage does the same work.

    Raises:
        SpecError: a count or rate that is not positive, lists of different length.
    """
    if not flop or len(flop) != len(bytes_moved):
        raise SpecError(
            "flop", len(flop), f"needs an entry a stage, as bytes_moved has {len(bytes_moved)}", "give both"
        )
    for field, value in (
        ("peak_flop_per_s", peak_flop_per_s),
        ("memory_bandwidth_bytes_per_s", memory_bandwidth_bytes_per_s),
        ("num_micro_batches", num_micro_batches),
        ("virtual_pipeline", virtual_pipeline),
    ):
        if not value > 0:
            raise SpecError(field, value, "must be positive", "give what the device and the layout have")
    work_s = [
        max(f / peak_flop_per_s, b / memory_bandwidth_bytes_per_s) for f, b in zip(flop, bytes_moved, strict=True)
    ]
    if equal_stages:
        share = min(work_s) / num_micro_batches
        return max(*work_s, share * (num_micro_batches + (len(flop) - 1) / virtual_pipeline))
    if virtual_pipeline > 1:
        return max(work_s)
    before_s = np.concatenate([[0.0], np.cumsum(work_s)[:-1]]) / num_micro_batches
    return float((np.array(work_s) + before_s).max())
