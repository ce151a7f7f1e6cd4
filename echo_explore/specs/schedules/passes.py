"""What a schedule is made of: passes of micro-batches through chunks, in an order for every stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
        joined: (num_joined,) places in the order of forwards that are one with the backward behind them: both start
            when what both receive is there, and send when both are done.
    """

    phase: Ints
    micro_batch: Ints
    chunk: Ints
    joined: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def of(cls, passes: Iterable[Pass], joined: Sequence[int] = ()) -> Self:
        """The order of a list of passes."""
        table = np.array(list(passes), dtype=np.int64).reshape(-1, 3)
        together = np.array(joined, dtype=np.int64)
        for array in (table, together):
            array.setflags(write=False)
        return cls(phase=table[:, 0], micro_batch=table[:, 1], chunk=table[:, 2], joined=together)

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
        placement: (num_stages, num_chunks) place of a chunk, from 0 in forward order: its chunk of the model; where
            there are several copies of the model, those of each copy follow those of the copy before.
        orders: one a stage.
        is_periodic: with more micro-batches the start stays the same and a steady state repeats, as in 1F1B; such a
            schedule may be simulated shorter than it is.
        num_copies: of the model on one pipeline, each with as many of the micro-batches, counted from 0 in each.
    """

    name: str
    num_micro_batches: int
    placement: Ints
    orders: tuple[StageOrder, ...]
    is_periodic: bool
    num_copies: int = 1

    @property
    def num_model_chunks(self) -> int:
        """Chunks of one copy of the model; place c is chunk c % num_model_chunks."""
        return self.num_stages * self.num_chunks // self.num_copies

    @property
    def micro_batches_of_chunk(self) -> int:
        """Micro-batches that come through a chunk of one copy."""
        return self.num_micro_batches // self.num_copies

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
        """(num_places,) stage of a place, and the number that its chunk has there."""
        flat = np.argsort(self.placement.ravel(), kind="stable").astype(np.int64)
        return flat // self.num_chunks, flat % self.num_chunks


def orders_of(passes: Sequence[Iterable[Pass]]) -> tuple[StageOrder, ...]:
    """The orders of all stages."""
    return tuple(StageOrder.of(stage) for stage in passes)
