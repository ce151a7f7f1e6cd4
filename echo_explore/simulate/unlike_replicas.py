"""A job some of whose data-parallel replicas are disturbed, or whose experts have unequal loads."""

import math
from collections.abc import Callable, Sequence

from echo_explore.core import SpecError
from echo_explore.simulate.disturbances import AXES, Disturbed, OtherGpus, SlowReplicas
from echo_explore.simulate.expert_loads import ExpertLoads
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

JobsOn = Callable[[str], Sequence[PipelineJob]]
"""From the name of a cluster to the jobs on its GPUs, by class of load."""


def with_disturbed_replicas(
    layout: ParallelConfig, jobs: Sequence[PipelineJob], loads: ExpertLoads, what_if: WhatIf, jobs_on: JobsOn
) -> PipelineJob:
    """The job with a kind for each load of experts, and of the replicas that a what-if disturbs.

    Disturbed replicas lie one behind the other from the first on.
    # Approximation: sets lie one behind the other, so that as few expert groups as can be have one of them
    # (under-estimates where several groups have one and exchanges are what a step waits for).

    Args:
        layout: degrees of parallelism.
        jobs: with all replicas alike, by class of load.
        loads: which rank of an expert group has which.
        what_if: see `WhatIf.disturbed`.
        jobs_on: the same on other GPUs.

    Raises:
        SpecError: more replicas than there are, a stage that the job does not have.
    """
    if not what_if.disturbed and loads.num_classes == 1:
        return jobs[0]
    num_replicas = layout.data_parallel
    wanted = sum(item.num_replicas for item in what_if.disturbed)
    if wanted > num_replicas:
        rule = f"disturbs {wanted} data-parallel replicas (the last numbers), but the job has {num_replicas}"
        fix = f"name {num_replicas} at most, or raise dp"
        raise SpecError("what-if", what_if.texts_of("slow_rank", "broken_link", "mixed_gpu"), rule, fix)
    kinds = [
        ReplicaKind(label=_load_label(loads, number), stages=job.stages, is_usual=True)
        for number, job in enumerate(jobs)
    ]
    for item in what_if.disturbed:
        kinds += _kinds(item, jobs, loads, what_if, jobs_on)
    set_of = [number + 1 for number, item in enumerate(what_if.disturbed) for _ in range(item.num_replicas)]
    set_of += [0] * (num_replicas - wanted)
    if not what_if.disturbed:  # every expert group is as every other
        kind_of, per_exchange = list(loads.class_of), len(loads.class_of)
    elif loads.num_classes == 1:
        kind_of, per_exchange = set_of, _replicas_per_exchange(layout)
    else:  # rank by rank of a stage
        of_replica, split = layout.tensor_parallel * layout.context_parallel, layout.expert_tensor_ranks
        kind_of = [
            loads.num_classes * set_of[rank // of_replica] + loads.class_of[rank // split % len(loads.class_of)]
            for rank in range(num_replicas * of_replica)
        ]
        per_exchange = _replicas_per_exchange(layout) * of_replica
    return with_unlike_replicas(jobs[0], kinds[1:], kind_of, replicas_per_exchange=per_exchange, own=kinds[0])


def _load_label(loads: ExpertLoads, number: int) -> str:
    return f"experts at {loads.shares[number]:.3g} x the mean load" if loads.num_classes > 1 else ""


def _replicas_per_exchange(layout: ParallelConfig) -> int:
    """Replicas that one expert group, or a chain of groups that share replicas, reaches over."""
    replica = layout.tensor_parallel * layout.context_parallel
    return math.lcm(layout.expert_gpus, replica) // replica


def _kinds(
    item: Disturbed, jobs: Sequence[PipelineJob], loads: ExpertLoads, what_if: WhatIf, jobs_on: JobsOn
) -> list[ReplicaKind]:
    """The kind of a set of disturbed replicas for each load."""
    if isinstance(item, OtherGpus):
        others = [with_slow_ranks(job, dict(what_if.slow_ranks)) for job in jobs_on(item.cluster)]
        label, stages = f"on {load_cluster(item.cluster).device.name}", [job.stages for job in others]
    elif isinstance(item, SlowReplicas):
        num_stages = len(jobs[0].stages)
        if item.stage >= num_stages:
            rule = f"the job has stages 0..{num_stages - 1}"
            raise SpecError("what-if", what_if.texts_of("slow_rank"), rule, "name one of them")
        label, stages = "slow replica", [slowed_kernels(job.stages, {item.stage: item.factor}) for job in jobs]
    else:
        axes = [axis for name in item.names for axis in AXES[name]]
        label = f"{'+'.join(item.names)} links {item.factor:g} x as slow"
        stages = [slowed_transfers(job.stages, axes, item.factor) for job in jobs]
    labels = [", ".join(filter(None, (label, _load_label(loads, number)))) for number in range(len(jobs))]
    return [ReplicaKind(label=name, stages=own) for name, own in zip(labels, stages, strict=True)]


def other_gpus(what_if: WhatIf) -> tuple[OtherGpus, ...]:
    """Replicas on other GPUs."""
    return tuple(item for item in what_if.disturbed if isinstance(item, OtherGpus))
