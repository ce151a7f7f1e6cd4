"""The whole program in one line: trace, price, schedule, simulate, summarise."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from echo_explore.compute import flop
from echo_explore.core import MissingCalibration, SpecError
from echo_explore.core.hashing import content_hash
from echo_explore.core.versions import GRAPH_SCHEMA, MODEL_VERSION, PACKAGE_VERSION, TRACER_VERSION
from echo_explore.graph import Trace
from echo_explore.interference import Pairing, PairTable
from echo_explore.interference.pairing import scaled
from echo_explore.memory import MemoryProfile, cheapest_changes, memory_profile, saved_bytes, stage_details
from echo_explore.simulate.bounds import LowerBounds, lower_bounds
from echo_explore.simulate.expert_loads import ExpertLoads, expert_loads
from echo_explore.simulate.hardware import beside_other_gpu, on_other_hardware
from echo_explore.simulate.jobs import build_job, disturbed
from echo_explore.simulate.layer_bound import LayerProducts, layer_products
from echo_explore.simulate.no_effect import JobUnder, without_effect
from echo_explore.simulate.ports import CollectiveModel, ComputeModel, InterferenceModel, Tracer
from echo_explore.simulate.prediction import UNSEEN_SIGMA_LOG, Prediction
from echo_explore.simulate.pricing import UNPAIRED, Pricer
from echo_explore.simulate.unlike_replicas import other_gpus
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import Candidate
from echo_explore.timeline import PipelineJob, StepTimeline, perfectly_overlapped, simulate_step, write_perfetto
from echo_explore.timeline.recent import Key, Recent
from echo_explore.tracing.request import request_of

Fidelity = Literal["kernel", "block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How to simulate; none of it changes what is simulated.

    Attributes:
        fidelity: `kernel` simulates every op, `block` the runs of ops between communications.
        fold: use the symmetry of ranks and the periodicity of schedules; off: every op of every micro-batch.
        what_if: factors on the times of single causes, and other hardware.
        explain: also find the critical path and when stages wait.
    """

    fidelity: Fidelity = "kernel"
    fold: bool = True
    what_if: WhatIf = field(default_factory=WhatIf)
    explain: bool = False


DEFAULT_OPTIONS = SimulationOptions()


class Scaled:
    """What the timeline asks of a pairing, its slowdowns times the factor of `--what-if interference=`."""

    def __init__(self, pairing: Pairing, factor: float) -> None:
        self._pairing, self._factor = pairing, factor
        self.reference, self.version = pairing.reference, pairing.version

    def pair_table(self) -> PairTable:
        """The factors of all that the job runs."""
        table = self._pairing.pair_table()
        return table if self._factor == 1.0 else scaled(table, self._factor)


class Simulator:
    """Predicts candidates; deterministic. Each part can be replaced by anything that satisfies its Protocol."""

    def __init__(
        self,
        *,
        tracer: Tracer,
        compute: ComputeModel,
        collective: CollectiveModel,
        interference: InterferenceModel,
        calibration: Mapping[str, Any] | None = None,
        allow_fallback: bool = True,
    ) -> None:
        self.tracer = tracer
        self.compute = compute
        self.collective = collective
        self.interference = interference
        self.calibration = dict(calibration or {})
        self.allow_fallback = allow_fallback
        self._products: Recent[tuple[Candidate, LayerProducts | None]] = Recent(256)

    def predict(
        self, candidate: Candidate, options: SimulationOptions = DEFAULT_OPTIONS, *, timeline: Path | None = None
    ) -> Prediction:
        """The prediction of a candidate; with `timeline`, its spans are written to that file.

        Raises:
            TraceError, MissingExtra: the program could not be traced.
            MissingCalibration: the device has no coefficients.
        """
        given, candidate = candidate, _with_hardware(candidate, options.what_if)
        self._check_calibrated(candidate)
        start = time.perf_counter()
        trace = self.tracer.trace(request_of(candidate))
        traced = time.perf_counter()
        pairing = self.interference.pairing(candidate.cluster.device)
        pricer = self._pricer(candidate, options.what_if, pairing)
        job = self._job(candidate, trace, pricer, options.what_if)
        interference = Scaled(pairing, options.what_if.interference_factor)
        memory = self._tightest_memory(candidate, trace, options.what_if)
        priced = time.perf_counter()
        step = simulate_step(
            job,
            interference=interference,
            fidelity=options.fidelity,
            fold=options.fold,
            record_spans=timeline is not None,
            explain=options.explain,
        )
        if step.step_time_s <= 0.0:
            raise SpecError(
                "what-if", str(options.what_if.factors), "leaves no cause that takes time", "keep one above 0"
            )
        written = None
        if timeline is not None:
            written = write_perfetto(timeline, step, saved_bytes=saved_bytes(candidate, trace) * job.num_variants)
        end = time.perf_counter()
        elapsed = {"trace_s": traced - start, "price_s": priced - traced, "simulate_s": end - priced}
        warnings = (*pricer.extrapolated, *length_warnings(candidate), *memory_warnings(memory))
        warnings += written.warnings if written else ()
        warnings += without_effect(
            options.what_if, JobUnder(job=job, interference=interference), lambda other: self._under(given, other)
        )
        return self._summary(candidate, trace, job, step, memory, options, elapsed, warnings)

    def _check_calibrated(self, candidate: Candidate) -> None:
        device = candidate.cluster.device
        if not self.allow_fallback and not self.compute.covers(device):
            raise MissingCalibration(
                f"device.calibration = {device.calibration!r}: no coefficients are known for it; fix: name a measured "
                "device in the cluster file or one of the catalogue (h20-96gb, l40s, ...), or give --allow-fallback to "
                "price it from its specification"
            )

    def timeline(self, candidate: Candidate, options: SimulationOptions = DEFAULT_OPTIONS) -> StepTimeline:
        """The simulated step with its spans: what ran when.

        Raises:
            TraceError, MissingExtra, MissingCalibration: see `predict`.
        """
        self._check_calibrated(_with_hardware(candidate, options.what_if))
        under = self._under(candidate, options.what_if)
        return simulate_step(
            under.job, interference=under.interference, fidelity=options.fidelity, fold=options.fold, record_spans=True
        )

    def _under(self, candidate: Candidate, what_if: WhatIf) -> JobUnder:
        """The job and its slowdowns under a what-if."""
        candidate = _with_hardware(candidate, what_if)
        pairing = self.interference.pairing(candidate.cluster.device)
        pricer = self._pricer(candidate, what_if, pairing)
        job = self._job(candidate, self.tracer.trace(request_of(candidate)), pricer, what_if)
        return JobUnder(job=job, interference=Scaled(pairing, what_if.interference_factor))

    def _job(self, candidate: Candidate, trace: Trace, pricer: Pricer, what_if: WhatIf) -> PipelineJob:
        """The job of the candidate as a what-if disturbs it.

        # Approximation: beside transfers, kernels of other GPUs slow down like those of the candidate's (either
        # direction).
        """

        def jobs_on(gpu: str) -> list[PipelineJob]:
            other = beside_other_gpu(candidate, what_if.factors, gpu)
            self._check_calibrated(other)
            return self._loaded_jobs(other, expert_loads(other), pricer, what_if)

        loads = expert_loads(candidate)
        jobs = [build_job(candidate, trace, pricer.with_imbalance(loads.shares[0]), what_if)]
        jobs += self._loaded_jobs(candidate, loads, pricer, what_if, first=1)
        job = disturbed(candidate.layout, jobs, loads, what_if, jobs_on)
        return perfectly_overlapped(job) if what_if.perfect_overlap else job

    def _loaded_jobs(
        self, candidate: Candidate, loads: ExpertLoads, pricer: Pricer, what_if: WhatIf, *, first: int = 0
    ) -> list[PipelineJob]:
        """The jobs of a candidate's classes of expert load from `first` on, each traced and priced by itself."""
        jobs = []
        for request, share in list(zip(loads.requests, loads.shares, strict=True))[first:]:
            own = pricer.beside(candidate).with_imbalance(share)
            jobs.append(build_job(candidate, self.tracer.trace(request), own, what_if))
            pricer.extrapolated |= own.extrapolated
        return jobs

    def _tightest_memory(self, candidate: Candidate, trace: Trace, what_if: WhatIf) -> MemoryProfile:
        """The memory profile on the GPU that has least room for what it holds."""
        profiles = [memory_profile(candidate=candidate, trace=trace)]
        for item in other_gpus(what_if):
            other = beside_other_gpu(candidate, what_if.factors, item.cluster)
            profiles.append(memory_profile(candidate=other, trace=self.tracer.trace(request_of(other))))
        return max(profiles, key=lambda profile: profile.peak_bytes / profile.capacity_bytes)

    def _pricer(self, candidate: Candidate, what_if: WhatIf, pairing: Pairing) -> Pricer:
        return Pricer(
            candidate,
            compute=self.compute,
            collective=self.collective,
            what_if=what_if,
            pairing=pairing,
        )

    def bounds(self, candidate: Candidate) -> LowerBounds:
        """What no prediction of the candidate is below; makes no trace."""
        key = _layer_key(candidate)
        known = self._products.get(key)
        if known is None:
            pricer = self._pricer(candidate, WhatIf(), UNPAIRED)
            known = candidate, layer_products(candidate, pricer)  # the candidate keeps what the key names by id
            self._products.keep(key, known)
        return lower_bounds(candidate, known[1])

    def memory_of(self, candidate: Candidate) -> MemoryProfile:
        """The memory profile alone."""
        return memory_profile(candidate=candidate, trace=self.tracer.trace(request_of(candidate)))

    def advice(self, candidate: Candidate) -> tuple[str, ...]:
        """The two cheapest changes that make a candidate fit into memory, a line each; fewer if there are fewer."""
        return tuple(change.description for change in cheapest_changes(candidate, self.memory_of))

    def _summary(
        self,
        candidate: Candidate,
        trace: Trace,
        job: PipelineJob,
        step: StepTimeline,
        memory: MemoryProfile,
        options: SimulationOptions,
        elapsed: Mapping[str, float],
        warnings: tuple[str, ...],
    ) -> Prediction:
        available = step.step_time_s * available_flop_per_s(candidate, options.what_if)
        counts = flop.step_flop(candidate)
        return Prediction(
            label=candidate.label(),
            step_time_s=step.step_time_s,
            step_sigma_log=math.hypot(step.step_sigma_log, UNSEEN_SIGMA_LOG),
            tokens_per_s=candidate.tokens_per_step / step.step_time_s,
            mfu=counts.model_flop / available,
            mfu_causal=counts.model_flop_causal / available,
            hfu=executed_flop(job) / available,
            peak_memory_bytes=memory.peak_bytes,
            reserved_memory_bytes=memory.reserved_bytes,
            memory_capacity_bytes=memory.capacity_bytes,
            memory=memory.to_rows(),
            memory_details=()
            if other_gpus(options.what_if)  # the profile may be another GPU's
            else tuple(asdict(stage_details(candidate, trace, stage)) for stage in memory.stages),
            breakdown=step.breakdown,
            num_ranks=candidate.num_gpus,
            num_rank_classes=step.num_rank_classes,
            num_simulated_ops=step.num_simulated_ops,
            num_micro_batches=candidate.num_micro_batches,
            fidelity=options.fidelity,
            elapsed=elapsed,
            versions=self._versions(candidate, trace),
            references=tuple(
                f"{part.reference} (version {part.version})"
                for part in (self.compute, self.collective, self.interference)
            ),
            warnings=warnings,
            explanation=explanation_rows(step),
        )

    def _versions(self, candidate: Candidate, trace: Trace) -> dict[str, Any]:
        return {
            "package": PACKAGE_VERSION,
            "model": MODEL_VERSION,
            "graph_schema": GRAPH_SCHEMA,
            "tracer": TRACER_VERSION,
            "trace_key": trace.key,
            "frameworks": dict(trace.facts.get("versions", {})),
            "cluster": candidate.cluster.name,
            "cluster_hash": content_hash(candidate.cluster.model_dump(mode="json")),
            "stack": candidate.stack.name,
            "calibration": self.calibration,
        }


def _layer_key(candidate: Candidate) -> Key:
    """What the bound of a layer depends on: one for all candidates that differ in stages and replicas only."""
    layout, recipe = candidate.layout, candidate.recipe
    files = (id(candidate.model), id(candidate.cluster), id(candidate.stack))
    sizes = (recipe.micro_batch_size, recipe.sequence_length, recipe.precision, recipe.lora_rank)
    degrees = (layout.tensor_parallel, layout.context_parallel, layout.sequence_parallel, candidate.overlaps_tensor)
    where = () if candidate.placement.is_default else (candidate.placement.label(), layout.label())
    return (*files, *sizes, *degrees, *where)


def _with_hardware(candidate: Candidate, what_if: WhatIf) -> Candidate:
    return on_other_hardware(candidate, what_if.factors, what_if.gpu)


def explanation_rows(step: StepTimeline) -> dict[str, Any] | None:
    """The explanation as JSON values; None if none was asked for."""
    if step.explanation is None:
        return None
    critical = step.classes[step.critical_class]
    return {
        "critical_path_s": dict(step.explanation.critical_path_s),
        "critical_path_stages_s": list(step.explanation.critical_path_stages_s),
        "exposed_s": dict(critical.exposed_s),
        "busy_s": dict(critical.busy_s),
        "optimizer_transfers_s": dict(step.explanation.optimizer_transfers_s[step.critical_class]),
        "slowed_s": dict(critical.slowed_s),
        "bubbles": [
            {
                "stage": s % step.num_stages,
                "label": times.label,
                "warm_up_s": b.warm_up_s,
                "steady_s": b.steady_s,
                "cool_down_s": b.cool_down_s,
            }
            for s, (times, b) in enumerate(zip(step.classes, step.explanation.bubbles, strict=True))
        ],
        "critical_class": step.critical_class,
    }


def available_flop_per_s(candidate: Candidate, what_if: WhatIf) -> float:
    """Peak FLOP/s of all GPUs of the job, in its precision."""
    precision = candidate.recipe.precision

    def rate(of: Candidate) -> float:
        peak = of.cluster.device.peak_flop_per_s
        return peak.get("tf32" if precision == "fp32" and "tf32" in peak else precision, max(peak.values()))

    more = 0.0
    for item in other_gpus(what_if):
        other = beside_other_gpu(candidate, what_if.factors, item.cluster)
        more += item.num_replicas * candidate.layout.model_gpus * (rate(other) - rate(candidate))
    return rate(candidate) * candidate.num_gpus + more


def executed_flop(job: PipelineJob) -> float:
    """FLOP that the kernels of all ranks execute in a step, the optimizer left out."""
    total = 0.0
    for stage in job.classes:
        per_rank = sum(float(c.forward.graph.flop.sum() + c.backward.graph.flop.sum()) for c in stage.chunks)
        total += per_rank * job.micro_batches_of_chunk * stage.multiplicity
    return total


def length_warnings(candidate: Candidate) -> tuple[str, ...]:
    """Lines where the sequence is far outside what the model and the kernel tables know."""
    length, longest = candidate.recipe.sequence_length, candidate.model.max_sequence_length
    if length <= longest:
        return ()
    return (
        f"sequence_length {length} is beyond the {longest} of {candidate.model.name}: attention is extrapolated, and "
        "mfu counts all of it without the causal mask (see mfu_causal)",
    )


def memory_warnings(memory: MemoryProfile) -> tuple[str, ...]:
    """A line where the peak is too near the capacity to be sure."""
    ratio = memory.peak_bytes / memory.capacity_bytes
    return (f"peak memory is {ratio:.0%} of a GPU: within the error of the estimate",) if 0.92 < ratio <= 1.08 else ()
