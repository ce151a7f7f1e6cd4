"""How a sampler sees the space: one small whole number per axis, and the nearest legal point to whatever it proposes.

Ordered axes (degrees, sizes, recomputation) are numbered in increasing order, which for powers of two is their
logarithm. data_parallel is derived, so it is no axis. Samplers know nothing of legality: three of four combinations are
illegal in a typical space. A proposal is moved to the nearest open point before anyone learns of it: a legal one that
was not tried and that its bounds do not rule out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from echo_explore.search.point import SearchPoint

AXES = (
    "num_gpus",
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "context_parallel",
    "expert_parallel",
    "micro_batch_size",
    "recompute",
    "sequence_parallel",
    "placement",
    "schedule",
)
_CHOICES = ("sequence_parallel", "placement", "schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One axis with more than one choice among the legal points.

    Attributes:
        kind: `ordered`: neighbouring numbers are alike; `choice`: they are not.
        num_choices: numbers 0 to num_choices - 1.
    """

    name: str
    kind: Literal["ordered", "choice"]
    num_choices: int


class Encoding:
    """Legal points as rows of small whole numbers."""

    def __init__(self, points: Sequence[SearchPoint]) -> None:
        self.points = tuple(points)
        orders = np.array([point.order for point in self.points], dtype=np.int64)
        columns, dimensions = [], []
        for column, name in enumerate(AXES):
            choices, codes = np.unique(orders[:, column], return_inverse=True)
            if len(choices) > 1:
                kind: Literal["ordered", "choice"] = "choice" if name in _CHOICES else "ordered"
                dimensions.append(Dimension(name=name, kind=kind, num_choices=len(choices)))
                columns.append(codes)
        self.dimensions = tuple(dimensions)
        self.codes: NDArray[np.int64] = np.column_stack(columns) if columns else np.zeros((len(points), 0), np.int64)
        self._index = {point: index for index, point in enumerate(self.points)}
        self._open = np.ones(len(self.points), dtype=bool)

    def index_of(self, point: SearchPoint) -> int:
        """Row of a legal point."""
        return self._index[point]

    def code(self, index: int) -> dict[str, int]:
        """Dimension name to number of a row."""
        return {d.name: int(v) for d, v in zip(self.dimensions, self.codes[index], strict=True)}

    def nearest_open(self, code: dict[str, int]) -> int | None:
        """The open row nearest to `code` in steps along the axes, the first of equals; None if none is open.

        Args:
            code: number of every dimension; any combination.
        """
        rows = np.flatnonzero(self._open)
        if not len(rows):
            return None
        wanted = np.array([code[d.name] for d in self.dimensions], dtype=np.int64)
        distance = np.abs(self.codes[rows] - wanted).sum(axis=1)
        return int(rows[distance.argmin()])

    def close(self, indices: NDArray[np.bool_] | int) -> None:
        """Leave these rows out of `nearest_open` from now on."""
        self._open[indices if isinstance(indices, int) else np.asarray(indices)] = False

    @property
    def num_open(self) -> int:
        """Rows that may still be proposed."""
        return int(self._open.sum())
