"""Seconds of Muon's updates: the kernels that they are made of, each by the compute model."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from echo_explore.graph import ExecutionGraph, build_graph
from echo_explore.simulate.muon import MuonUpdate
from echo_explore.simulate.pricing import Pricer


def muon_seconds(
    graph: ExecutionGraph, updates: Sequence[MuonUpdate], pricer: Pricer, *, call_s: float
) -> npt.NDArray[np.float64] | None:
    """(num_ops,) seconds of the rows that stand for updates, NaN elsewhere; None without any.

    Args:
        graph: an epilogue with a row `muon` for each update, in their order.
        updates: by Muon.
        pricer: of the candidate.
        call_s: host time of one operator.
    """
    if not updates:
        return None
    known_s = np.full(graph.num_ops, np.nan)
    is_update = np.array([graph.strings[name] == "muon" for name in graph.name], dtype=np.bool_) & ~graph.is_collective
    known_s[is_update] = [update.count * _one_s(update, pricer, call_s) for update in updates]
    return known_s


def _one_s(update: MuonUpdate, pricer: Pricer, call_s: float) -> float:
    """Seconds of one parameter: its kernels back to back, or their launches where those take longer.

    # Approximation: launches run ahead inside the update of one parameter and not beyond it, and a collective of it
    # hides none of them (over-estimates where large matrices are followed by small ones).
    """
    kernels = update.kernels()
    time_s = pricer.price(build_graph([kernel.row for kernel in kernels])).time_s
    busy_s = float(np.dot(time_s, [kernel.times for kernel in kernels]))
    return max(busy_s, update.num_kernels * call_s)
