"""Which row and column of the pair table the kernels and collectives of one job have, and that table."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from echo_explore.graph import Collective, ExecutionGraph
from echo_explore.interference.loads import Traffic
from echo_explore.interference.pair_table import Factors, PairTable

Ints = npt.NDArray[np.int64]


class Pairing(Protocol):
    """Collects what a job runs while it is priced, then gives the factors of every pair."""

    @property
    def reference(self) -> str:
        """Where the factors come from."""

    @property
    def version(self) -> int:
        """Raised with every change of a factor."""

    def kernel_classes(self, graph: ExecutionGraph, time_s: npt.NDArray[np.float64]) -> Ints:
        """(num_ops,) row of the table that each kernel has; 0 for other rows."""

    def traffic_class(self, kind: Collective, traffic: Traffic) -> int:
        """Column of the table that a collective has."""

    def pair_table(self) -> PairTable:
        """The factors, of all rows and columns given so far."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodePairing:
    """Rows are OpClass codes and columns Collective codes: what models need that look at nothing else."""

    table: PairTable

    @property
    def reference(self) -> str:
        """Of the table."""
        return self.table.reference

    @property
    def version(self) -> int:
        """Of the table."""
        return self.table.version

    def kernel_classes(self, graph: ExecutionGraph, time_s: npt.NDArray[np.float64]) -> Ints:
        """The OpClass of kernels."""
        del time_s
        return np.where(graph.is_compute, graph.op_class, 0).astype(np.int64)

    def traffic_class(self, kind: Collective, traffic: Traffic) -> int:
        """The code of its kind."""
        del traffic
        return int(kind)

    def pair_table(self) -> PairTable:
        """The table."""
        return self.table


def scaled(table: PairTable, factor: float) -> PairTable:
    """The table with every slowdown beyond 1 times `factor`: 0 leaves none."""

    def scale(factors: Factors) -> Factors:
        return np.asarray(1.0 + factor * (factors - 1.0))

    return PairTable(
        compute=scale(table.compute),
        collective=scale(table.collective),
        reference=table.reference,
        version=table.version,
    )
