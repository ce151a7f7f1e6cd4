"""Is a job well formed?"""

import math
from functools import lru_cache

from echo_explore.core import SpecError
from echo_explore.graph import Axis
from echo_explore.specs.schedules import PipelineSchedule
from echo_explore.timeline.job import ChunkJob, PipelineJob
from echo_explore.timeline.layout import schedule_of
from echo_explore.timeline.meeting import meets_over_replicas
from echo_explore.timeline.ops import AXIS_STREAM


def check_job(job: PipelineJob) -> None:
    """Refuse a job that cannot run.

    Raises:
        SpecError: no stage, stages with different numbers of chunks, a schedule that does not fit them, rows that do
            not exist, times that are negative or not finite.
    """
    if not job.stages or not job.stages[0].chunks:
        raise SpecError("stages", len(job.stages), "a job needs a stage with a chunk", "give at least one of each")
    num_chunks = {len(stage.chunks) for stage in job.classes}
    if len(num_chunks) > 1:
        raise SpecError("stages.chunks", sorted(num_chunks), "all stages need as many chunks", "split the layers alike")
    _check_variants(job)
    schedule = schedule_of(job, job.num_micro_batches)
    if _splits_backward(schedule) and any(chunk.split is None for stage in job.classes for chunk in stage.chunks):
        raise SpecError("schedule", job.schedule, "needs every backward in two passes", "give ChunkJob.split")
    _check_seconds("host_call_s", job.host_call_s)
    _check_seconds("host_backward_call_s", job.host_backward_call_s)
    _check_seconds("host_expert_call_s", job.host_expert_call_s)
    _check_seconds("host_collective_s", min(job.host_collective_s, default=0.0))
    _check_seconds("host_collective_s", max(job.host_collective_s, default=0.0))
    if len(job.host_collective_s) not in (0, len(Axis)):
        rule = f"needs a time for each of the {len(Axis)} axes, or none"
        raise SpecError("host_collective_s", len(job.host_collective_s), rule, "give one by code of Axis")
    _check_seconds("host_step_s", job.host_step_s)
    _check_seconds("host_update_s", job.host_update_s)
    _check_seconds("jitter_sigma_log", job.jitter_sigma_log)
    for links in job.shared_links:
        for axis, slowdown in ((links.first, links.first_slowdown), (links.second, links.second_slowdown)):
            if AXIS_STREAM[axis] < 0 or not 1.0 <= slowdown < math.inf:
                rule = "needs an axis with collectives and a factor of 1 or more"
                raise SpecError("shared_links", f"{axis.name}: {slowdown}", rule, "give 1 where nothing is shared")
    for s, stage in enumerate(job.classes):
        _check_seconds(f"stages[{s}].send_forward_s", stage.send_forward_s)
        _check_seconds(f"stages[{s}].send_backward_s", stage.send_backward_s)
        for v, chunk in enumerate(stage.chunks):
            _check_chunk(f"stages[{s}].chunks[{v}]", chunk)


def _check_variants(job: PipelineJob) -> None:
    for v, variant in enumerate(job.variants):
        if len(variant.stages) != len(job.stages):
            rule = f"every kind of replica needs the {len(job.stages)} stages of the job"
            raise SpecError(f"variants[{v}].stages", len(variant.stages), rule, "give it as many")
        if variant.num_replicas < 1:
            raise SpecError(f"variants[{v}].num_replicas", variant.num_replicas, "must be 1 or more", "leave it out")
    if job.variants and job.overlap_exchanges and meets_over_replicas(job):
        rule = "passes that run in pairs cannot gather parameters over replicas that differ"
        raise SpecError("variants", len(job.variants), rule, "give --set recipe.overlap_expert_exchange=false")


@lru_cache(maxsize=64)
def _splits_backward(schedule: PipelineSchedule) -> bool:
    return schedule.splits_backward


def _check_chunk(where: str, chunk: ChunkJob) -> None:
    for i, bucket in enumerate(chunk.buckets):
        _check_seconds(f"{where}.buckets[{i}].time_s", bucket.time_s)
        _check_row(f"{where}.buckets[{i}].ready_after", bucket.ready_after, chunk.backward.graph.num_ops)
    for i, gather in enumerate(chunk.gathers):
        _check_seconds(f"{where}.gathers[{i}].time_s", gather.time_s)
        _check_row(f"{where}.gathers[{i}].needed_before", gather.needed_before, chunk.forward.graph.num_ops)


def _check_seconds(field: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise SpecError(field, value, "must be finite and not negative", "price it again")


def _check_row(field: str, row: int, num_rows: int) -> None:
    if not 0 <= row < num_rows:
        raise SpecError(field, row, f"must be a row of its graph of {num_rows} rows", "count rows from 0")
