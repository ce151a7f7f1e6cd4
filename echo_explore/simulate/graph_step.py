"""The step time of a traced program: its own rows priced on a cluster, collectives beside kernels where it put them.

All ranks are taken to do what the traced one does, at the same time.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from echo_explore.core import SpecError
from echo_explore.core.hashing import content_hash, finite_or_none
from echo_explore.core.versions import GRAPH_SCHEMA, MODEL_VERSION, PACKAGE_VERSION, TRACER_VERSION
from echo_explore.graph import Axis, Collective, DType, ExecutionGraph, RankTrace, TimedGraph, build_graph
from echo_explore.simulate.hardware import other_cluster
from echo_explore.simulate.jobs import held_back
from echo_explore.simulate.no_effect import JobUnder, without_effect
from echo_explore.simulate.prediction import INTERVAL_LEVEL, UNSEEN_SIGMA_LOG, interval
from echo_explore.simulate.pricing import Pricer
from echo_explore.simulate.simulator import DEFAULT_OPTIONS, Scaled, SimulationOptions, Simulator
from echo_explore.simulate.slowest import at_the_slowest_pace
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import ClusterSpec, ParallelConfig, Placement, StackProfile
from echo_explore.specs.placement import DEFAULT_PLACEMENT
from echo_explore.timeline import (
    ChunkJob,
    PipelineJob,
    StageJob,
    StepTimeline,
    perfectly_overlapped,
    simulate_step,
    write_perfetto,
)
from echo_explore.topology import GroupShape, shape_of_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSite:
    """What a traced program runs on; satisfies `pricing.Site`."""

    cluster: ClusterSpec
    stack: StackProfile
    layout: ParallelConfig
    placement: Placement = DEFAULT_PLACEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPrediction:
    """The predicted step of a traced program.

    Attributes:
        step_time_s: predicted time of one step.
        step_sigma_log: standard deviation of its log.
        breakdown: seconds by cause, as in `Prediction`.
        busy_s: seconds of kernels and of transfers by axis, hidden or not.
        peak_memory_bytes: largest sum of live tensors, and what the CUDA context and a communicator take.
        flop: executed by matrix products, convolutions and attention of one rank.
    """

    label: str
    step_time_s: float
    step_sigma_log: float
    breakdown: Mapping[str, float]
    busy_s: Mapping[str, float]
    peak_memory_bytes: float
    memory_capacity_bytes: float
    flop: float
    num_ranks: int
    num_simulated_ops: int
    elapsed: Mapping[str, float]
    versions: Mapping[str, Any]
    references: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """The peak is within a GPU's memory."""
        return self.peak_memory_bytes <= self.memory_capacity_bytes

    def to_json(self) -> dict[str, Any]:
        """The object that `predict --json` prints."""
        low, high = interval(self.step_time_s, self.step_sigma_log)
        numbers = {
            "step_time_s": self.step_time_s,
            "step_time_low_s": low,
            "step_time_high_s": high,
            "interval_level": INTERVAL_LEVEL,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_capacity_bytes": self.memory_capacity_bytes,
            "executed_flop": self.flop,
        }
        return {"label": self.label, **{k: finite_or_none(v) for k, v in numbers.items()}} | {
            "fits": self.fits,
            "breakdown": dict(self.breakdown),
            "busy_s": dict(self.busy_s),
            "num_ranks": self.num_ranks,
            "num_simulated_ops": self.num_simulated_ops,
            "fidelity": "kernel",
            "elapsed_s": dict(self.elapsed),
            "versions": dict(self.versions),
            "references": list(self.references),
            "warnings": list(self.warnings),
        }


def predict_trace(
    trace: RankTrace,
    *,
    cluster: ClusterSpec,
    stack: StackProfile,
    simulator: Simulator,
    options: SimulationOptions = DEFAULT_OPTIONS,
    label: str = "script",
    timeline: Path | None = None,
) -> GraphPrediction:
    """The prediction of a traced step.

    Args:
        trace: of one rank, as `TraceService.script_step` gives it.
        cluster: what it runs on; rank r on device r.
        stack: host costs, NCCL version and kernels.
        simulator: whose models price it.
        options: what-if factors.
        label: what it is called.
        timeline: file to write a Perfetto trace to.

    Raises:
        SpecError: more ranks than the cluster has GPUs, or transfers between stages, which one rank can't show.
        MissingCalibration: the device has no coefficients.
    """
    start = time.perf_counter()
    given, cluster = cluster, other_cluster(cluster, options.what_if.factors, options.what_if.gpu)
    run = graph_timeline(
        trace, cluster=given, stack=stack, simulator=simulator, options=options, record_spans=timeline is not None
    )
    warnings = run.warnings
    if timeline is not None:
        warnings += write_perfetto(timeline, run.step).warnings
    simulate_s = time.perf_counter() - start - run.price_s
    return _summary(
        trace, cluster, stack, simulator, run.step, label,
        {"price_s": run.price_s, "simulate_s": simulate_s}, warnings,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTimeline:
    """A simulated step of a traced program.

    Attributes:
        timed: its rows, each with its time alone.
        step: what ran when.
        price_s: seconds that pricing took.
    """

    timed: TimedGraph
    step: StepTimeline
    warnings: tuple[str, ...]
    price_s: float


def graph_timeline(
    trace: RankTrace,
    *,
    cluster: ClusterSpec,
    stack: StackProfile,
    simulator: Simulator,
    options: SimulationOptions = DEFAULT_OPTIONS,
    record_spans: bool = True,
) -> GraphTimeline:
    """The priced rows of a traced step and its timeline; see `predict_trace`."""
    start = time.perf_counter()
    _check(trace, cluster)
    if options.what_if.disturbed:
        rule = "the ranks of a traced program are one class"
        fix = "leave numbers of replicas, broken_link and mixed_gpu out"
        raise SpecError("what-if", options.what_if.texts_of("slow_rank", "broken_link", "mixed_gpu"), rule, fix)
    warnings: list[str] = []

    def under(what_if: WhatIf) -> JobUnder:
        other = _priced(trace, cluster, stack, simulator, what_if, [])
        return JobUnder(job=other.job, interference=other.interference)

    run = _priced(trace, cluster, stack, simulator, options.what_if, warnings)
    priced = time.perf_counter()
    step = simulate_step(
        run.job, interference=run.interference, fidelity="kernel", fold=not record_spans, record_spans=record_spans
    )
    warnings += without_effect(options.what_if, JobUnder(job=run.job, interference=run.interference), under)
    return GraphTimeline(timed=run.timed, step=step, warnings=tuple(dict.fromkeys(warnings)), price_s=priced - start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Priced:
    timed: TimedGraph
    job: PipelineJob
    interference: Scaled


def _priced(
    trace: RankTrace,
    cluster: ClusterSpec,
    stack: StackProfile,
    simulator: Simulator,
    what_if: WhatIf,
    warnings: list[str],
) -> _Priced:
    """The step under a what-if; adds to the warnings."""
    cluster = other_cluster(cluster, what_if.factors, what_if.gpu)
    graph = _placed(_in_rates_of(trace.graph, cluster), warnings)
    pairing = simulator.interference.pairing(cluster.device)
    site = GraphSite(cluster=cluster, stack=stack, layout=ParallelConfig(data_parallel=trace.world_size))
    pricer = Pricer(site, compute=simulator.compute, collective=simulator.collective, what_if=what_if, pairing=pairing)
    timed = pricer.price(graph, shapes=_shapes(trace, cluster))
    job = _job(timed, stack.on_host(cluster.node), trace.world_size, host_factor=what_if.host_factor)
    job = held_back(at_the_slowest_pace(job, cluster.device.clock_spread_fraction, what_if.straggler_factor), what_if)
    if what_if.perfect_overlap:
        job = perfectly_overlapped(job)
    warnings += pricer.extrapolated
    return _Priced(timed=timed, job=job, interference=Scaled(pairing, what_if.interference_factor))


def _check(trace: RankTrace, cluster: ClusterSpec) -> None:
    if trace.world_size > cluster.max_gpus:
        raise SpecError(
            "world", trace.world_size, f"is more than the {cluster.max_gpus} GPUs of {cluster.name}", "use fewer ranks"
        )
    groupless = trace.graph.is_collective & (trace.group_of_row < 0)
    if groupless.any():
        raise SpecError(
            "graph", f"{int(groupless.sum())} collectives", "do not say which ranks they join",
            "trace it with --script, or convert a file that names its groups",
        )  # fmt: skip
    transfers = np.isin(trace.graph.collective, (Collective.SEND, Collective.RECV))
    transfers &= trace.graph.axis != Axis.CONTEXT  # a ring, whose ranks all do the same
    if transfers.any():
        row = int(np.flatnonzero(transfers)[0])
        what, other = ("send", "receive") if trace.graph.collective[row] == Collective.SEND else ("receive", "send")
        ranks = trace.groups[int(trace.group_of_row[row])]
        rule = (
            f"ranks {ranks[0]} and {ranks[-1]} do it together, and the trace is of rank {trace.rank} alone: nothing in "
            f"it is the {other} of this {what}"
        )
        more = int(transfers.sum()) - 1
        name = f"{what} {trace.graph.strings[int(trace.graph.name[row])]}".strip()
        fix = "describe the job with --model, --layout and --schedule, which plays every stage"
        raise SpecError(f"graph: row {row}", f"{name} (and {more} more)" if more else name, rule, fix)


def _in_rates_of(graph: ExecutionGraph, cluster: ClusterSpec) -> ExecutionGraph:
    """TF32 products in fp32 where the device has no TF32."""
    if "tf32" in cluster.device.peak_flop_per_s:
        return graph
    return replace(graph, dtype=np.where(graph.dtype == DType.TF32, DType.FP32, graph.dtype).astype(np.int8))


def _placed(graph: ExecutionGraph, warnings: list[str]) -> ExecutionGraph:
    """Collectives of groups without a name count as data parallelism."""
    nameless = graph.is_collective & (graph.axis == Axis.NONE)
    if not nameless.any():
        return graph
    warnings.append(
        f"{int(nameless.sum())} collectives run in groups whose mesh dimension has no known name: charged to data"
    )
    return replace(graph, axis=np.where(nameless, Axis.DATA, graph.axis).astype(np.int8))


def _shapes(trace: RankTrace, cluster: ClusterSpec) -> dict[int, GroupShape]:
    shapes = [shape_of_ranks(group, cluster, world_size=trace.world_size) for group in trace.groups]
    rows = np.flatnonzero(trace.group_of_row >= 0)
    return {int(row): shapes[int(trace.group_of_row[row])] for row in rows}


def _job(timed: TimedGraph, stack: StackProfile, world_size: int, *, host_factor: float) -> PipelineJob:
    """The whole step as one pass of one stage."""
    empty = build_graph([])
    nothing = TimedGraph(graph=empty, time_s=np.zeros(0), sigma_log=np.zeros(0))
    factor = 0.0 if stack.cuda_graphs else host_factor
    stage = StageJob(
        label="every rank",
        multiplicity=world_size,
        chunks=(ChunkJob(forward=timed, backward=nothing),),
        send_forward_s=0.0,
        send_backward_s=0.0,
        send_sigma_log=0.0,
        epilogue=nothing,
    )
    return PipelineJob(
        stages=(stage,),
        schedule="no-pipelining",
        num_micro_batches=1,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        overlap_p2p=False,
        host_call_s=stack.host_call_s * factor,
        host_backward_call_s=stack.host_backward_call_s * factor,
        host_step_s=0.0,  # what a script does once a step is among its rows
    )


def _summary(
    trace: RankTrace, cluster: ClusterSpec, stack: StackProfile, simulator: Simulator, step: StepTimeline, label: str,
    elapsed: Mapping[str, float], warnings: tuple[str, ...],
) -> GraphPrediction:  # fmt: skip
    parts = (simulator.compute, simulator.collective, simulator.interference)
    return GraphPrediction(
        label=label,
        step_time_s=step.step_time_s,
        step_sigma_log=math.hypot(step.step_sigma_log, UNSEEN_SIGMA_LOG),
        breakdown=step.breakdown,
        busy_s=step.classes[0].busy_s,
        peak_memory_bytes=trace.peak_memory_bytes + stack.memory.context_bytes + stack.memory.communicator_bytes,
        memory_capacity_bytes=cluster.device.memory_bytes,
        flop=float(trace.graph.flop.sum()),
        num_ranks=trace.world_size,
        num_simulated_ops=step.num_simulated_ops,
        elapsed=elapsed,
        versions={
            "package": PACKAGE_VERSION,
            "model": MODEL_VERSION,
            "graph_schema": GRAPH_SCHEMA,
            "tracer": TRACER_VERSION,
            "frameworks": dict(trace.versions),
            "cluster": cluster.name,
            "cluster_hash": content_hash(cluster.model_dump(mode="json")),
            "stack": stack.name,
            "calibration": simulator.calibration,
        },
        references=tuple(f"{part.reference} (version {part.version})" for part in parts),
        warnings=warnings,
    )
