"""What the timeline needs from others: how much a kernel and a collective slow each other down."""

from typing import Protocol

from echo_explore.graph.execution_graph import Floats

NUM_CODES = 32
"""Room for every OpClass and every Collective code."""


class PairTable(Protocol):
    """Slowdown of a kernel and a collective that run on one GPU at the same time; 1 means none.

    Attributes:
        compute: (num_kernel_classes, num_traffic_classes) factor on the time of a kernel of class [k, ...] beside
            traffic of class [..., c]; classes are OpClass and Collective codes unless the rows of the job name others
            (`TimedGraph.pair_class`). Class 0 is nothing at all.
        collective: of the same shape: factor on the time of that traffic beside that kernel.
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
