"""What the timeline needs from others: how much a kernel and a collective slow each other down."""

from typing import Protocol

from echo_explore.graph.execution_graph import Floats

NUM_CODES = 16
"""Rows and columns of a pair table: room for every OpClass and every Collective code."""


class PairTable(Protocol):
    """Slowdown of a kernel and a collective that run on one GPU at the same time; 1 means none.

    Attributes:
        compute: (16, 16) factor on the time of a kernel of class [op_class, ...] beside a collective [..., code].
        collective: (16, 16) factor on the time of the collective [..., code] beside a kernel [op_class, ...].
    """

    @property
    def compute(self) -> Floats:
        """Factors on kernels, all >= 1."""

    @property
    def collective(self) -> Floats:
        """Factors on collectives, all >= 1."""


class InterferenceModel(Protocol):
    """Gives the mutual slowdown of kernels and collectives as a table of pairs."""

    @property
    def reference(self) -> str:
        """Where its figures come from."""

    @property
    def version(self) -> int:
        """Raised with every change of a figure."""

    def pair_table(self) -> PairTable:
        """The factors, for every pair of kernel class and collective."""
