"""A job whose transfers all run beside compute: what better overlap could gain at most."""

from dataclasses import replace

import numpy as np

from echo_explore.graph import OpKind, TimedGraph
from echo_explore.timeline.job import ChunkJob, PipelineJob, StageJob


def perfectly_overlapped(job: PipelineJob) -> PipelineJob:
    """The job with every collective of a forward or backward beside its kernels, waited for at its end only.

    A pass then lasts as long as its kernels, or its transfers on one axis. Transfers between stages and of gradients
    and parameters run beside compute too, where they are part of passes or can start before the last one ends; what is
    in the epilogue stays there.
    """
    chunks = [chunk for stage in job.classes for chunk in stage.chunks]
    return replace(
        job,
        stages=_stages(job.stages),
        variants=tuple(replace(variant, stages=_stages(variant.stages)) for variant in job.variants),
        overlap_grad_reduce=job.overlap_grad_reduce or any(chunk.buckets for chunk in chunks),
        overlap_param_gather=job.overlap_param_gather or any(chunk.gathers for chunk in chunks),
        overlap_p2p=job.overlap_p2p or len(job.stages) > 1,
        launch_blocking=False,
    )


def _stages(stages: tuple[StageJob, ...]) -> tuple[StageJob, ...]:
    return tuple(replace(stage, chunks=tuple(_chunk(chunk) for chunk in stage.chunks)) for stage in stages)


def _chunk(chunk: ChunkJob) -> ChunkJob:
    split = chunk.split
    if split is not None:
        split = replace(split, input=_loose(split.input), weight=_loose(split.weight))
    return replace(chunk, forward=_loose(chunk.forward), backward=_loose(chunk.backward), split=split)


def _loose(timed: TimedGraph) -> TimedGraph:
    graph = timed.graph
    waits = (graph.kind == OpKind.WAIT).astype(np.bool_)
    return replace(
        timed,
        graph=replace(
            graph,
            asynchronous=graph.is_collective.astype(np.bool_),
            awaits=np.where(waits, -1, graph.awaits).astype(np.int32),
        ),
    )
