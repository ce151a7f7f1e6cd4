"""DualPipe: two copies of the model on one pipeline, micro-batches fed into both ends.

Stage s of p holds chunks s and p - 1 - s of the model's p chunks: of the copy whose micro-batches enter at stage 0, and
of the one whose enter at stage p - 1. Each copy takes half of the micro-batches. A stage and its mirror image p - 1 - s
do the same at the same time, each on the copy that enters at its own end as DualPipeV's stage min(s, p - 1 - s) of
p / 2 does on its first chunk: the order is that of DualPipeV for p / 2 stages and half the micro-batches.

A forward and the whole backward behind it are one step of the program, which receives before and sends after both; the
two stages in the middle run the first such pair apart.
# Approximation: in a pair the backward runs behind the forward, so that expert traffic of one is not hidden behind
kernels of the other (over-estimates with experts).

With equal stages and times f, i, w of a forward, a gradient of inputs and one of weights in a chunk, w <= i, the bubble
is (p / 2 - 1) (2 f + i - w): the paper's (p / 2 - 1) (F&B + B - 3 W) where F&B = F + B, B = I + W and I = F. Up to
p + 1 activations of a chunk are alive on a stage.

References:
    DeepSeek-V3 technical report, arXiv 2412.19437 (2024), section 3.2.1 and table 2; github.com/deepseek-ai/DualPipe
    (`dualpipe.py`, README, 2025).
"""

from echo_explore.specs.schedules.dualpipev import dualpipev
from echo_explore.specs.schedules.passes import PassKind, StageOrder


def dualpipe(*, pipeline_parallel: int, num_micro_batches: int, rank: int) -> StageOrder:
    """The order of stage `rank`; valid for p even, an even number of micro-batches, 2 p or more.

    Micro-batches are counted from 0 in each direction; chunk 0 of a stage is of the copy that enters at stage 0.
    """
    mirrored = pipeline_parallel - 1 - rank
    order = dualpipev(
        pipeline_parallel=pipeline_parallel // 2,
        num_micro_batches=num_micro_batches // 2,
        rank=min(rank, mirrored),
    )
    kinds = [kind for kind, _, _ in order]
    pairs = [i for i in range(len(order) - 1) if kinds[i : i + 2] == [PassKind.FORWARD, PassKind.BACKWARD]]
    in_middle = abs(rank - mirrored) == 1
    return StageOrder.of(
        [(kind, number, chunk if rank < mirrored else 1 - chunk) for kind, number, chunk in order],
        joined=pairs[in_middle:],
    )
