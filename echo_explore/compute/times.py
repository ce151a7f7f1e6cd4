"""Prices of kernels."""

from dataclasses import dataclass

from echo_explore.graph.execution_graph import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTimes:
    """Seconds of every row of a graph alone, and the standard deviation of their log.

    Attributes:
        time_s: (num_ops,), 0 for rows that are not kernels.
        sigma_log: (num_ops,).
        num_fallbacks: rows that had no model and were priced by the roofline, because that was allowed.
        extrapolated: one line for each op class that was priced outside the domain of its coefficients.
    """

    time_s: Floats
    sigma_log: Floats
    num_fallbacks: int = 0
    extrapolated: tuple[str, ...] = ()
