"""What a schedule is made of: passes of micro-batches through chunks, in an order for every stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class PassKind(IntEnum):
    """What a pass does."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of inputs and of weights."""
    BACKWARD_INPUT = 2
    """Gradients of inputs only; what the stage before waits for."""
    BACKWARD_WEIGHT = 3
    """Gradients of weights, some time after the `BACKWARD_INPUT` of the same micro-batch and chunk."""


NUM_KINDS = len(PassKind)

Pass = tuple[int, int, int]
"""(PassKind, micro-batch, chunk of the stage)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageOrder:
    """What one stage runs, in order; every array has shape (num_passes,).

    Attributes:
        phase: PassKind.
        micro_batch: from 0.
        chunk: chunk of the stage, from 0.
    """

    phase: Ints
    micro_batch: Ints
    chunk: Ints

    @classmethod
    def of(cls, passes: Iterable[Pass]) -> Self:
        """The order of a list of passes."""
        table = np.array(list(passes), dtype=np.int64).reshape(-1, 3)
        table.setflags(write=False)
        return cls(phase=table[:, 0], micro_batch=table[:, 1], chunk=table[:, 2])

    @property
    def num_passes(self) -> int:
        """Passes of the stage."""
        return int(self.phase.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSchedule:
    """The order of every stage, and which chunk of the model each of its chunks is.

    Attributes:
        name: of `build.SCHEDULES`.
        num_micro_batches: micro-batches of a step.
        placement: (num_stages, num_chunks) chunk of the model, from 0 in forward order.
        orders: one a stage.
        is_periodic: with more micro-batches the start stays the same and a steady state repeats, as in 1F1B; such a
            schedule may be simulated shorter than it is.
    """

    name: str
    num_micro_batches: int
    placement: Ints
    orders: tuple[StageOrder, ...]
    is_periodic: bool

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return int(self.placement.shape[0])

    @property
    def num_chunks(self) -> int:
        """Chunks of one stage."""
        return int(self.placement.shape[1])

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into gradients of inputs and of weights."""
        return any(bool((order.phase == PassKind.BACKWARD_WEIGHT).any()) for order in self.orders)

    def stage_and_chunk(self) -> tuple[Ints, Ints]:
        """(num_model_chunks,) stage of a chunk of the model, and the number it has there."""
        flat = np.argsort(self.placement.ravel(), kind="stable").astype(np.int64)
        return flat // self.num_chunks, flat % self.num_chunks


def orders_of(passes: Sequence[Iterable[Pass]]) -> tuple[StageOrder, ...]:
    """The orders of all stages."""
    return tuple(StageOrder.of(stage) for stage in passes)
