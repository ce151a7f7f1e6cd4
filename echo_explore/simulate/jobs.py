"""Which builder makes the job of a candidate: by the framework of its stack."""

from dataclasses import replace

from echo_explore.graph import Trace
from echo_explore.simulate.fused_experts import with_fused_experts
from echo_explore.simulate.graph_scopes import with_graph_scopes
from echo_explore.simulate.job_builder import JobBuilder
from echo_explore.simulate.link_sharing import shared_links
from echo_explore.simulate.native_job import NativeJobBuilder
from echo_explore.simulate.offload import with_offload
from echo_explore.simulate.pricing import Pricer
from echo_explore.simulate.unlike_replicas import JobOn, with_disturbed_replicas
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import Candidate, ParallelConfig
from echo_explore.timeline import PipelineJob, with_slow_ranks

JOB_BUILDERS: dict[str, type[JobBuilder] | type[NativeJobBuilder]] = {
    "megatron": JobBuilder,
    "fsdp2": NativeJobBuilder,
    "torchtitan": NativeJobBuilder,
    "ddp": NativeJobBuilder,
}


def build_job(candidate: Candidate, trace: Trace, pricer: Pricer, what_if: WhatIf) -> PipelineJob:
    """The job that the timeline simulates."""
    trace = with_offload(candidate, with_graph_scopes(candidate.stack, with_fused_experts(candidate, trace)))
    job = JOB_BUILDERS[candidate.stack.framework](candidate, trace, pricer, what_if).job
    return replace(job, shared_links=shared_links(candidate))


def held_back(job: PipelineJob, what_if: WhatIf) -> PipelineJob:
    """The job with what a what-if does to all replicas: slow ranks and jitter.

    Raises:
        SpecError: a slow rank in a stage that the job does not have.
    """
    job = with_slow_ranks(job, dict(what_if.slow_ranks))
    return replace(job, jitter_sigma_log=what_if.jitter_sigma_log, jitter_seed=what_if.jitter_seed)


def disturbed(layout: ParallelConfig, job: PipelineJob, what_if: WhatIf, job_on: JobOn) -> PipelineJob:
    """The job as a what-if disturbs it: all of its replicas, and some.

    Args:
        layout: degrees of parallelism.
        job: the step of a healthy run.
        what_if: what disturbs it.
        job_on: the same on the GPUs of another cluster.

    Raises:
        SpecError: a stage or replica that the job does not have.
    """
    return with_disturbed_replicas(layout, held_back(job, what_if), what_if, job_on)
