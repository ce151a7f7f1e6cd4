"""Simulated steps: schedules, the event engine, breakdown, bounds and trace export."""

from echo_explore.timeline.blocks import Fidelity
from echo_explore.timeline.bound import cheap_bound, step_time_lower_bound
from echo_explore.timeline.breakdown import BREAKDOWN_KEYS, ClassTimes
from echo_explore.timeline.explain import BubbleSplit, StepExplanation
from echo_explore.timeline.host import HostModules, ModuleSeconds
from echo_explore.timeline.job import (
    ChunkJob,
    GradientBucket,
    ParameterGather,
    PipelineJob,
    ReplicaVariant,
    SharedLinks,
    SplitBackward,
    StageJob,
)
from echo_explore.timeline.perfect import perfectly_overlapped
from echo_explore.timeline.perfetto import TraceFile, check_ending, write_perfetto
from echo_explore.timeline.ports import InterferenceModel, PairTable
from echo_explore.timeline.replicas import (
    ReplicaKind,
    one_by_one,
    slowed_kernels,
    slowed_transfers,
    with_unlike_replicas,
)
from echo_explore.timeline.schedules import schedule_order
from echo_explore.timeline.slow_ranks import with_slow_ranks
from echo_explore.timeline.spans import Span
from echo_explore.timeline.split import split_rows
from echo_explore.timeline.step import StepTimeline, simulate_step

__all__ = [
    "BREAKDOWN_KEYS",
    "BubbleSplit",
    "ChunkJob",
    "ClassTimes",
    "Fidelity",
    "GradientBucket",
    "HostModules",
    "InterferenceModel",
    "ModuleSeconds",
    "PairTable",
    "ParameterGather",
    "PipelineJob",
    "ReplicaKind",
    "ReplicaVariant",
    "SharedLinks",
    "Span",
    "SplitBackward",
    "StageJob",
    "StepExplanation",
    "StepTimeline",
    "TraceFile",
    "cheap_bound",
    "check_ending",
    "one_by_one",
    "perfectly_overlapped",
    "schedule_order",
    "simulate_step",
    "slowed_kernels",
    "slowed_transfers",
    "split_rows",
    "step_time_lower_bound",
    "with_slow_ranks",
    "with_unlike_replicas",
    "write_perfetto",
]
