"""GPipe, and the schedules that split backwards to fill bubbles: ZB-H1 and ZBV.

References:
    Huang et al., "GPipe", arXiv 1811.06965; Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, sections
    3 (ZB-H1) and 6 (ZB-V). The orders equal those of torch.distributed.pipelining 2.13 (`ScheduleGPipe`,
    `ScheduleInterleavedZeroBubble` with one stage a rank, `ScheduleZBVZeroBubble`); a test compares them.
"""

from collections.abc import Iterator

from echo_explore.specs.schedules.passes import Pass, PassKind

_F, _B, _I, _W = PassKind.FORWARD, PassKind.BACKWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT


def gpipe(num_micro_batches: int) -> list[Pass]:
    """All forwards, then all backwards, the oldest first; the same on every stage."""
    return [(kind, i, 0) for kind in (_F, _B) for i in range(num_micro_batches)]


def zb_h1(*, pipeline_parallel: int, num_micro_batches: int, rank: int) -> list[Pass]:
    """1F1B in which the gradients of weights follow those of inputs by `rank` micro-batches, and fill the end.

    With equal stages and times f, b, w of the three passes the bubble is (p - 1) (f + b - w), valid for
    w <= f, b and enough micro-batches; memory as in 1F1B.
    """
    m = num_micro_batches
    warm_up = min(pipeline_parallel - 1 - rank, m)
    passes: list[Pass] = [(_F, i, 0) for i in range(warm_up)]
    weights = 0
    for number in range(m):
        if warm_up + number < m:
            passes.append((_F, warm_up + number, 0))
        passes.append((_I, number, 0))
        if number >= rank:
            passes.append((_W, weights, 0))
            weights += 1
    return passes + [(_W, i, 0) for i in range(weights, m)]


def _counted(kinds: Iterator[tuple[PassKind, int]], num_micro_batches: int) -> Iterator[Pass]:
    """Number the passes of every kind and chunk from 0; those beyond the last micro-batch fall out."""
    count: dict[tuple[PassKind, int], int] = {}
    for kind, chunk in kinds:
        number = count.get((kind, chunk), 0)
        count[kind, chunk] = number + 1
        if number < num_micro_batches:
            yield kind, number, chunk


def _zbv_kinds(p: int, m: int, rank: int) -> Iterator[tuple[PassKind, int]]:
    """The kinds and chunks of ZB-V on a stage, for at least 2 p - 1 micro-batches."""
    yield from [(_F, 0)] * (2 * (p - rank) - 1)
    yield from [(_F, 1), (_F, 0)] * rank
    yield from [(_F, 1), (_I, 1), (_W, 1)] * (p - rank)
    started = 2 * p - 1 - rank
    done = p  # forwards of chunk 1 so far
    while done < m:
        if started < m:
            yield _F, 0
            started += 1
        yield from ((_I, 0), (_W, 0), (_F, 1), (_I, 1), (_W, 1))
        done += 1
    yield from [(_I, 0), (_I, 1)] * rank
    yield from [(_I, 0), (_W, 0)] * (p - rank)
    yield from [(_W, 1)] * rank
    yield from [(_W, 0)] * rank


def zbv(*, pipeline_parallel: int, num_micro_batches: int, rank: int) -> list[Pass]:
    """Two chunks a stage in a V; no bubble between the first and the last pass of a stage if f = b = w, m >= 2 p."""
    enough = max(2 * pipeline_parallel - 1, num_micro_batches)
    return list(_counted(_zbv_kinds(pipeline_parallel, enough, rank), num_micro_batches))
