"""One training step simulated."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError
from echo_explore.graph.execution_graph import Floats
from echo_explore.timeline.blocks import Blocks, Fidelity, prepare_blocks
from echo_explore.timeline.breakdown import (
    ClassTimes,
    breakdown_of,
    busiest,
    class_times,
    critical_class,
    step_sigma_log,
)
from echo_explore.timeline.charges import charge_ranks
from echo_explore.timeline.checks import check_job
from echo_explore.timeline.explain import StepExplanation, explain_run
from echo_explore.timeline.folding import Period, find_period, trial_lengths
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.layout import lay_out
from echo_explore.timeline.meeting import blocks_in_step, coupled_blocks, out_of_step, with_peers, with_shared_times
from echo_explore.timeline.ops import NUM_STREAMS, Stream
from echo_explore.timeline.overlap import disturbed_blocks, first_guess, is_sensitive, paired_blocks
from echo_explore.timeline.pipeline import StepProgram, build_step
from echo_explore.timeline.ports import InterferenceModel
from echo_explore.timeline.program import Pairs, Times, checked_pairs, ran_ops, run_program, wiring_of
from echo_explore.timeline.spans import Span, spans_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """What a step takes, and where the time goes.

    Attributes:
        step_time_s: until the last rank class has finished.
        breakdown: seconds of the critical class by key; those of `breakdown.COMPUTE_PARTS` are parts of `compute_s`,
            the others add up to step_time_s.
        step_sigma_log: standard deviation of the log of step_time_s, from those of the parts.
        critical_class: the rank class that finishes last; of those that do at the same time the lowest, or of kinds of
            replicas that which waits least.
        classes: times of every rank class.
        num_simulated_ops: ops that the engine ran, all runs together.
        num_rank_classes: rank classes.
        num_stages: pipeline stages; class c is of stage c % num_stages.
        num_simulated_micro_batches: of the run that stands for the step; fewer than the job's if the rest is periodic.
        spans: what ran when, if asked for.
        explanation: critical path and bubbles, if asked for.
    """

    step_time_s: float
    breakdown: dict[str, float]
    step_sigma_log: float
    critical_class: int
    classes: tuple[ClassTimes, ...]
    num_simulated_ops: int
    num_rank_classes: int
    num_simulated_micro_batches: int
    num_stages: int
    spans: tuple[Span, ...] = ()
    explanation: StepExplanation | None = None

    @property
    def stage_finish_s(self) -> tuple[float, ...]:
        """When each rank class finishes its step."""
        return tuple(times.finish_s for times in self.classes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    step: StepProgram
    times: Times
    num_ops: int


def simulate_step(
    job: PipelineJob,
    *,
    interference: InterferenceModel,
    fidelity: Fidelity,
    fold: bool = True,
    record_spans: bool = False,
    explain: bool = False,
) -> StepTimeline:
    """The timeline of one step.

    With `fold`, forwards and backwards that no data-parallel traffic can disturb run as one op each, measured once, and
    micro-batches of a proven steady state are counted instead of run. Without it every op of every micro-batch runs.
    Both give the same numbers.

    Args:
        job: the step.
        interference: mutual slowdown of kernels and collectives.
        fidelity: "kernel": ops as traced; "block": kernels between communications as one op.
        fold: use the repetition in the step.
        record_spans: also keep what ran when, from a further run: all blocks and transfers of all micro-batches, and
            the rows of the first forward and backward of every chunk and of those beside data-parallel traffic.
        explain: also find the critical path and when stages wait, from a further run of all micro-batches.

    Raises:
        SpecError: the job or the interference table is not well formed.
    """
    if fidelity not in ("kernel", "block"):
        raise SpecError("fidelity", fidelity, "must be kernel or block", "use kernel")
    check_job(job)
    job = with_shared_times(job)
    pairs = checked_pairs(interference, job.shared_links)
    blocks = prepare_blocks(job, pairs, fidelity)
    run, period = _run_folded(job, blocks, pairs) if fold else (_run_all_rows(job, blocks, pairs), None)
    spans: tuple[Span, ...] = ()
    if record_spans:
        shown = _run_collapsed(job, blocks, pairs, job.num_micro_batches, detail_first=True)
        spans = spans_of(shown.step, shown.times, job)
    explanation = None
    if explain:
        whole = _run_collapsed(job, blocks, pairs, job.num_micro_batches)
        explanation = explain_run(whole.step, whole.times)
    return _summarise(job, run, period, blocks.num_simulated_ops, spans, explanation)


def _run_all_rows(job: PipelineJob, blocks: Blocks, pairs: Pairs) -> _Run:
    layout = lay_out(job, job.num_micro_batches)
    is_paired = paired_blocks(job, layout)
    step = build_step(job, blocks, layout, ~is_paired, is_paired)
    return _Run(step=step, times=run_program(step.program, pairs), num_ops=step.program.ops.num_ops)


def _run_folded(job: PipelineJob, blocks: Blocks, pairs: Pairs) -> tuple[_Run, Period | None]:
    num_ops = 0
    full = job.num_micro_batches
    for length in trial_lengths(job):
        run = _run_collapsed(job, blocks, pairs, length)
        num_ops += run.num_ops
        period = find_period(job, blocks, run.step, run.times) if length < full else None
        if period is not None and (rest := (full - length) % period.micro_batches):
            run = _run_collapsed(job, blocks, pairs, length + rest)
            num_ops += run.num_ops
            period = find_period(job, blocks, run.step, run.times)
            if period is not None and (full - length - rest) % period.micro_batches:
                continue
        if period is not None or length == full:
            return _Run(step=run.step, times=run.times, num_ops=num_ops), period
    raise AssertionError("the last trial length is the job's own")


def _run_collapsed(
    job: PipelineJob, blocks: Blocks, pairs: Pairs, num_micro_batches: int, *, detail_first: bool = False
) -> _Run:
    """A run in which every block that a data-parallel transfer touches has its rows, if that can make a difference.

    Blocks are given their rows until no body overlaps such a transfer, and those in which kinds of replicas exchange
    tokens until all bodies of them are started together: then bodies ran as their rows would have.
    """
    layout = lay_out(job, num_micro_batches)
    sensitive = is_sensitive(job, blocks, pairs)
    is_paired = paired_blocks(job, layout)
    coupled = coupled_blocks(job, blocks, layout) & ~is_paired
    in_step = coupled & blocks_in_step(job, blocks, layout) & (job.jitter_sigma_log == 0)
    is_expanded: npt.NDArray[np.bool_] = first_guess(job, layout) | (coupled & ~in_step)
    if detail_first:
        first = layout.at[..., 0]
        is_expanded[first[first >= 0]] = True
        is_expanded &= ~is_paired
    num_ops = 0
    while True:
        if in_step.any():
            is_expanded = is_expanded | (with_peers(job, layout, is_expanded) & coupled)
        step = build_step(job, blocks, layout, is_expanded, is_paired)
        times = run_program(step.program, pairs)
        num_ops += step.program.ops.num_ops
        missing = np.zeros(layout.num_blocks, dtype=np.bool_)
        if sensitive:
            missing[disturbed_blocks(step, times)] = True
        if in_step.any():
            missing |= out_of_step(job, layout, times.start_s[step.entry], in_step & ~is_expanded)
        if not missing.any():
            return _Run(step=step, times=times, num_ops=num_ops)
        is_expanded = is_expanded | missing


def _summarise(
    job: PipelineJob,
    run: _Run,
    period: Period | None,
    num_measured_ops: int,
    spans: tuple[Span, ...],
    explanation: StepExplanation | None,
) -> StepTimeline:
    program, times = run.step.program, run.times
    classes = job.classes
    num_run = int(run.step.layout.at.shape[3])
    ops = ran_ops(program, times, run.step.pool)
    finish = _ends_of_compute(run)
    charges = charge_ranks(ops, run.step.pool.bodies, from_s=np.zeros(len(classes)), to_s=finish)
    if period is not None:
        more = (job.num_micro_batches - num_run) / period.micro_batches
        charges += more * charge_ranks(ops, run.step.pool.bodies, from_s=period.from_s, to_s=period.to_s)
        finish += more * period.length_s
    critical = critical_class(finish)
    if job.variants:
        critical = busiest(np.arange(critical % len(job.stages), len(classes), len(job.stages)), finish, charges)
    return StepTimeline(
        step_time_s=float(finish[critical]),
        breakdown=breakdown_of(charges[critical]),
        step_sigma_log=step_sigma_log(charges[critical]),
        critical_class=critical,
        classes=tuple(
            class_times(stage.label, stage.multiplicity, float(finish[s]), charges[s])
            for s, stage in enumerate(classes)
        ),
        num_simulated_ops=run.num_ops + num_measured_ops,
        num_rank_classes=len(classes),
        num_simulated_micro_batches=num_run,
        num_stages=len(job.stages),
        spans=spans,
        explanation=explanation,
    )


def _ends_of_compute(run: _Run) -> Floats:
    """(num_ranks,) When the last op of the compute stream of each class ends: when the class has finished."""
    program = run.step.program
    wiring = program.wiring or wiring_of(program)
    last = wiring.stream_first[Stream.COMPUTE + 1 :: NUM_STREAMS] - 1
    return run.times.end_s[wiring.stream_order[last]]
