"""A job some of whose data-parallel replicas are disturbed."""

import math
from collections.abc import Callable

from echo_explore.core import SpecError
from echo_explore.simulate.disturbances import AXES, BrokenLinks, Disturbed, OtherGpus, SlowReplicas
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import ParallelConfig, load_cluster
from echo_explore.timeline import (
    PipelineJob,
    ReplicaKind,
    slowed_kernels,
    slowed_transfers,
    with_slow_ranks,
    with_unlike_replicas,
)

JobOn = Callable[[str], PipelineJob]
"""From the name of a cluster to the job on its GPUs."""


def with_disturbed_replicas(layout: ParallelConfig, job: PipelineJob, what_if: WhatIf, job_on: JobOn) -> PipelineJob:
    """The job with the replicas that a what-if disturbs, each set of them one behind the other from the first on.

    # Approximation: sets lie one behind the other, so that as few expert groups as can be have one of them
    # (under-estimates where several groups have one and exchanges are what a step waits for).

    Args:
        layout: degrees of parallelism.
        job: with all replicas alike.
        what_if: see `WhatIf.disturbed`.
        job_on: the same on other GPUs.

    Raises:
        SpecError: more replicas than there are, a stage that the job does not have.
    """
    if not what_if.disturbed:
        return job
    num_replicas = layout.data_parallel
    wanted = sum(item.num_replicas for item in what_if.disturbed)
    if wanted > num_replicas:
        rule = f"the job has {num_replicas} data-parallel replicas (dp={num_replicas})"
        raise SpecError("what-if", f"{wanted} replicas", rule, "name fewer, or raise dp")
    kinds = [_kind(item, job, what_if, job_on) for item in what_if.disturbed]
    kind_of = [number + 1 for number, item in enumerate(what_if.disturbed) for _ in range(item.num_replicas)]
    return with_unlike_replicas(
        job,
        kinds,
        kind_of + [0] * (num_replicas - wanted),
        replicas_per_exchange=_replicas_per_exchange(layout),
    )


def _replicas_per_exchange(layout: ParallelConfig) -> int:
    """Replicas that one expert group, or a chain of groups that share replicas, reaches over."""
    replica = layout.tensor_parallel * layout.context_parallel
    return math.lcm(layout.expert_gpus, replica) // replica


def _kind(item: Disturbed, job: PipelineJob, what_if: WhatIf, job_on: JobOn) -> ReplicaKind:
    if isinstance(item, SlowReplicas):
        num_stages = len(job.stages)
        if item.stage >= num_stages:
            rule = f"the job has stages 0..{num_stages - 1}"
            raise SpecError("slow_rank", item.stage, rule, "name one of them")
        return ReplicaKind(label="slow replica", stages=slowed_kernels(job.stages, {item.stage: item.factor}))
    if isinstance(item, BrokenLinks):
        axes = [axis for name in item.names for axis in AXES[name]]
        label = f"{'+'.join(item.names)} links {item.factor:g} x as slow"
        return ReplicaKind(label=label, stages=slowed_transfers(job.stages, axes, item.factor))
    other = with_slow_ranks(job_on(item.cluster), dict(what_if.slow_ranks))
    return ReplicaKind(label=f"on {load_cluster(item.cluster).device.name}", stages=other.stages)


def other_gpus(what_if: WhatIf) -> tuple[OtherGpus, ...]:
    """Replicas on other GPUs."""
    return tuple(item for item in what_if.disturbed if isinstance(item, OtherGpus))
