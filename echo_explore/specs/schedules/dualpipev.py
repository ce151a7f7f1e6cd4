"""DualPipeV: DualPipe folded into a V, without a second copy of the parameters.

# Approximation: a forward and a backward that DualPipeV overlaps run one after the other, the forward first, so that
# expert traffic of one is not hidden behind kernels of the other (over-estimates with experts).

References:
    DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe (`dualpipev.py`).
    The order equals that of torch.distributed.pipelining 2.13 `ScheduleDualPipeV`; a test compares them.
"""

from collections import deque

from echo_explore.specs.schedules.passes import Pass, PassKind

_F, _B, _I, _W = PassKind.FORWARD, PassKind.BACKWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT


class _Stage:
    """Passes of one stage as they are issued; every kind and chunk counts its own micro-batches."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self._next = {(kind, chunk): 0 for kind in (_F, _B) for chunk in (0, 1)}
        self._late: deque[tuple[int, int]] = deque()

    def run(self, kind: PassKind, chunk: int) -> None:
        key = (_F if kind == _F else _B, chunk)
        micro_batch = self._next[key]
        self._next[key] += 1
        self.passes.append((kind, micro_batch, chunk))
        if kind == _I:
            self._late.append((micro_batch, chunk))

    def weights(self) -> None:
        """The oldest gradients of weights that are due, if any."""
        if self._late:
            micro_batch, chunk = self._late.popleft()
            self.passes.append((_W, micro_batch, chunk))


def dualpipev(*, pipeline_parallel: int, num_micro_batches: int, rank: int) -> list[Pass]:
    """The order of stage `rank`; valid for num_micro_batches >= 2 p."""
    stage = _Stage()
    behind = pipeline_parallel - rank - 1
    for _ in range(2 * behind):
        stage.run(_F, 0)
    for _ in range(rank + 1):
        stage.run(_F, 0)
        stage.run(_F, 1)
    for _ in range(behind):
        stage.run(_I, 1)
        stage.weights()
        stage.run(_F, 1)
    for _ in range(num_micro_batches - 2 * pipeline_parallel + rank + 1):
        stage.run(_F, 0)
        stage.run(_B, 1)
        stage.run(_F, 1)
        stage.run(_B, 0)
    for _ in range(behind):
        stage.run(_B, 1)
        stage.run(_F, 1)
        stage.run(_B, 0)
    split = _drain(stage, rank)
    for _ in range(behind):
        stage.weights()
        stage.run(_I if split else _B, 0)
    for _ in range(rank + 1):
        stage.weights()
    return stage.passes


def _drain(stage: _Stage, rank: int) -> bool:
    """Backwards of both chunks, of which the second half is split; whether they are split at the end."""
    split = False
    for number in range(rank + 1):
        half = number == (rank + 1) // 2
        split = split or (half and rank % 2 == 1)
        stage.run(_I if split else _B, 1)
        split = split or (half and rank % 2 == 0)
        stage.run(_I if split else _B, 0)
    return split
