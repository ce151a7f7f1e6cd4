"""The periodic steady state of a pipeline: a short run proves it, and stands for any number of micro-batches.

Theorem used. Up to the micro-batch c, a run with n micro-batches is the start of any longer run, if c is at least one
warm-up before its end. Say that all blocks and transfers of the last w micro-batches up to c, w covering the warm-up,
end one constant later than those of g micro-batches before, on all stages. What comes after c depends on what came
before only through them, by the same rules, so it is shifted by the same constant, and so on until the forwards run
out; a run with k g micro-batches more ends exactly k constants later. Where stages are uneven the steady state may
begin late; then a longer run is made, in the end the full one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.graph.execution_graph import Ints
from echo_explore.specs.schedules import SCHEDULES, PassKind
from echo_explore.timeline.blocks import Blocks
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.meeting import coupled_blocks
from echo_explore.timeline.pipeline import StepProgram
from echo_explore.timeline.program import Times

_EQUAL = 1e-9  # of the period: after any number of periods the error stays below this share of the step
_GROWTH = 2  # next try is that much longer: all tries together cost at most twice the last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Period:
    """A steady state.

    Attributes:
        micro_batches: of one period.
        length_s: of one period.
        from_s: (num_ranks,) start of one period by rank class, where no body is cut.
        to_s: (num_ranks,) its end.
    """

    micro_batches: int
    length_s: float
    from_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    to_s: np.ndarray[tuple[int], np.dtype[np.float64]]


def _is_interleaved(job: PipelineJob) -> bool:
    return len(job.stages[0].chunks) > 1


def _ahead(job: PipelineJob) -> int:
    """Micro-batches by which a schedule that runs ahead has a longer warm-up."""
    return job.ahead * (len(job.stages) if _is_interleaved(job) else 1)


def trial_lengths(job: PipelineJob) -> Iterator[int]:
    """Numbers of micro-batches to try, short first, the job's own last."""
    p = len(job.stages)
    if job.schedule not in SCHEDULES or not SCHEDULES[job.schedule].is_periodic or job.jitter_sigma_log > 0:
        yield job.num_micro_batches
        return
    length = (7 * p if _is_interleaved(job) else 3 * p + 4) + 2 * _ahead(job)
    while length + 2 * p < job.num_micro_batches:
        yield length
        length *= _GROWTH
    yield job.num_micro_batches


def find_period(job: PipelineJob, blocks: Blocks, step: StepProgram, times: Times) -> Period | None:
    """The steady state that the run has reached before its forwards run out; None if there is none to prove.

    Blocks in which kinds of replicas meet have their rows in any run, and so are no sign of a disturbance.
    """
    disturbed = step.is_expanded & ~coupled_blocks(job, blocks, step.layout)
    p, n = len(job.stages), step.layout.at.shape[3]
    if _is_interleaved(job):
        last, window, unit = n - 2 * p - 1, 2 * p, p
    else:
        last, window, unit = n - p - 1, p + 1, 1
    last, window = last - _ahead(job), window + _ahead(job)
    for count in range(1, p + 1):
        if found := _period(step, times, disturbed, last=last, window=window, micro_batches=count * unit):
            return found
    return None


def _period(
    step: StepProgram,
    times: Times,
    disturbed: npt.NDArray[np.bool_],
    *,
    last: int,
    window: int,
    micro_batches: int,
) -> Period | None:
    first = last - window + 1
    if first - micro_batches < 1:
        return None
    now = step.layout.at[:, : PassKind.BACKWARD + 1, :, first : last + 1]
    before = step.layout.at[:, : PassKind.BACKWARD + 1, :, first - micro_batches : last + 1 - micro_batches]
    if disturbed[now].any() or disturbed[before].any():
        return None
    early = times.start_s[step.entry[before]].min()
    if step.gathers.size and times.end_s[step.gathers].max() > early:
        return None
    shift = times.end_s[step.exit[now]] - times.end_s[step.exit[before]]
    sent_now, sent_before = step.send_of[now], step.send_of[before]
    sends = sent_now >= 0
    sent = times.end_s[sent_now[sends]] - times.end_s[sent_before[sends]]
    length = float(shift.flat[0])
    if length <= 0 or not (_near(shift, length) and _near(sent, length)):
        return None
    at: Ints = step.entry[step.layout.at[:, PassKind.BACKWARD, 0, [last - micro_batches, last]]]
    return Period(
        micro_batches=micro_batches, length_s=length, from_s=times.start_s[at[:, 0]], to_s=times.start_s[at[:, 1]]
    )


def _near(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], length: float) -> bool:
    return bool((np.abs(values - length) <= _EQUAL * length).all())
