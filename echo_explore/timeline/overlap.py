"""Which forwards and backwards data-parallel traffic may disturb, and so must run row by row."""

import numpy as np
import numpy.typing as npt

from echo_explore.graph.execution_graph import Ints
from echo_explore.specs.schedules import PassKind
from echo_explore.timeline.blocks import Blocks
from echo_explore.timeline.job import PipelineJob
from echo_explore.timeline.layout import Layout
from echo_explore.timeline.ops import DATA_STREAMS, NUM_STREAMS
from echo_explore.timeline.pipeline import StepProgram
from echo_explore.timeline.program import Pairs, Times


def is_sensitive(job: PipelineJob, blocks: Blocks, pairs: Pairs) -> bool:
    """Whether a bucket reduction or a parameter gather beside a block can change either of them."""
    codes: set[int] = set()
    for stage in job.classes:
        for chunk in stage.chunks:
            codes |= {bucket.pair_class for bucket in chunk.buckets if job.overlap_grad_reduce}
            codes |= {gather.pair_class for gather in chunk.gathers if job.overlap_param_gather}
    if not codes:
        return False
    columns = sorted(codes)
    slows = (pairs.compute[:, columns] > 1).any() or (pairs.collective[:, columns] > 1).any()
    streams = list(DATA_STREAMS)
    slows = slows or (pairs.shared[streams] > 1).any() or (pairs.shared[:, streams] > 1).any()
    return bool(slows) or any(template.uses_data_stream for template in blocks.expanded)


def first_guess(job: PipelineJob, layout: Layout) -> npt.NDArray[np.bool_]:
    """(num_blocks,) blocks to run row by row at first: those that start or await data-parallel traffic."""
    is_expanded = np.zeros(layout.num_blocks, dtype=np.bool_)
    for s, stage in enumerate(job.classes):
        for v, chunk in enumerate(stage.chunks):
            if chunk.gathers and job.overlap_param_gather:
                is_expanded[layout.at[s, PassKind.FORWARD, v, 0]] = True
            if chunk.buckets and job.overlap_grad_reduce:
                is_expanded[layout.last_gradient(s, v)] = True
    return is_expanded


def paired_blocks(job: PipelineJob, layout: Layout) -> npt.NDArray[np.bool_]:
    """(num_blocks,) blocks that run together with another of their stage; never row by row.

    Those that start or await data-parallel traffic, and their partners, run one after the other.
    """
    paired = layout.partner >= 0
    alone = np.flatnonzero(first_guess(job, layout))
    paired[alone] = False
    with_partner = alone[layout.partner[alone] >= 0]
    paired[layout.partner[with_partner]] = False
    return paired


def disturbed_blocks(step: StepProgram, times: Times) -> Ints:
    """Blocks that ran as one body while a bucket reduction or a gather of their rank was under way."""
    found: list[Ints] = []
    traffic = np.concatenate([step.gathers, step.buckets])
    program = step.program
    queue = program.rank[traffic] * NUM_STREAMS + program.ops.stream[traffic]
    bodies = np.flatnonzero(~step.is_expanded & ~step.is_paired)
    for q in np.unique(queue):
        mine = traffic[queue == q]
        mine = mine[np.argsort(times.start_s[mine], kind="stable")]
        blocks = bodies[step.layout.rank[bodies] == q // NUM_STREAMS]
        begin, finish = times.start_s[step.entry[blocks]], times.end_s[step.exit[blocks]]
        # Transfers of a stream never overlap: the last one to start before the block ends is the one to look at.
        before = np.searchsorted(times.start_s[mine], finish, side="left") - 1
        touches = (before >= 0) & (times.end_s[mine[np.maximum(before, 0)]] > begin)
        found.append(blocks[touches])
    return np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)
