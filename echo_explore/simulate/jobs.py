"""Which builder makes the job of a candidate: by the framework of its stack."""

from collections.abc import Sequence
from dataclasses import replace

from echo_explore.core import SpecError
from echo_explore.graph import Axis, Trace
from echo_explore.simulate.expert_loads import ExpertLoads
from echo_explore.simulate.fused_experts import with_fused_experts
from echo_explore.simulate.graph_scopes import with_graph_scopes
from echo_explore.simulate.job_builder import JobBuilder
from echo_explore.simulate.link_sharing import shared_links
from echo_explore.simulate.native_job import NativeJobBuilder
from echo_explore.simulate.offload import with_offload
from echo_explore.simulate.pricing import Pricer
from echo_explore.simulate.slowest import at_the_slowest_pace
from echo_explore.simulate.transposed_weights import with_transposed_weights
from echo_explore.simulate.unlike_replicas import JobsOn, with_disturbed_replicas
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import Candidate, ParallelConfig
from echo_explore.timeline import PipelineJob, with_slow_ranks

JOB_BUILDERS: dict[str, type[JobBuilder] | type[NativeJobBuilder]] = {
    "megatron": JobBuilder,
    "fsdp2": NativeJobBuilder,
    "torchtitan": NativeJobBuilder,
    "ddp": NativeJobBuilder,
}


_WITH_GROUPS: tuple[Axis, ...] = tuple(axis for axis in Axis if axis not in (Axis.NONE, Axis.HOST))


def build_job(candidate: Candidate, trace: Trace, pricer: Pricer, what_if: WhatIf) -> PipelineJob:
    """The job that the timeline simulates."""
    trace = with_transposed_weights(candidate, with_fused_experts(candidate, trace))
    trace = with_offload(candidate, with_graph_scopes(candidate.stack, trace))
    job = JOB_BUILDERS[candidate.stack.framework](candidate, trace, pricer, what_if).job
    spread = candidate.cluster.device.clock_spread_fraction
    job = at_the_slowest_pace(job, spread, what_if.straggler_factor)
    group_ranks: dict[Axis, int] = {axis: pricer.shape(axis).num_ranks for axis in _WITH_GROUPS}
    return replace(job, shared_links=shared_links(candidate), group_ranks=group_ranks)


def held_back(job: PipelineJob, what_if: WhatIf) -> PipelineJob:
    """The job with what a what-if does to all replicas: slow ranks and jitter.

    Raises:
        SpecError: a slow rank in a stage that the job does not have.
    """
    last = max((stage for stage, _ in what_if.slow_ranks), default=0)
    if last >= len(job.stages):
        rule = f"the job has stages 0..{len(job.stages) - 1}"
        raise SpecError("what-if", what_if.texts_of("slow_rank"), rule, "name one of them")
    job = with_slow_ranks(job, dict(what_if.slow_ranks))
    seed = what_if.jitter_seed if what_if.jitter_sigma_log > 0 else 0
    return replace(job, jitter_sigma_log=what_if.jitter_sigma_log, jitter_seed=seed)


def disturbed(
    layout: ParallelConfig, jobs: Sequence[PipelineJob], loads: ExpertLoads, what_if: WhatIf, jobs_on: JobsOn
) -> PipelineJob:
    """The job of ranks that have these loads of experts, as a what-if disturbs it: all of its replicas, and some.

    Args:
        layout: degrees of parallelism.
        jobs: the step of a healthy run by class of load.
        loads: which rank of an expert group has which.
        what_if: what disturbs it.
        jobs_on: the same as `jobs` on the GPUs of another cluster.

    Raises:
        SpecError: a stage or replica that the job does not have.
    """
    held = [held_back(job, what_if) for job in jobs]
    return with_disturbed_replicas(layout, held, loads, what_if, jobs_on)
