"""A priced backward in two passes."""

import numpy as np
import numpy.typing as npt

from echo_explore.graph import TimedGraph, select_rows
from echo_explore.graph.execution_graph import Ints
from echo_explore.timeline.job import SplitBackward


def _selected(whole: TimedGraph, mask: npt.NDArray[np.bool_]) -> TimedGraph:
    chosen = select_rows(whole.graph, mask)
    return TimedGraph(
        graph=chosen.graph,
        time_s=whole.time_s[chosen.rows],
        sigma_log=whole.sigma_log[chosen.rows],
        pair_class=whole.pair_class[chosen.rows],
        straggler_fraction=whole.straggler_fraction[chosen.rows],
    )


def split_rows(whole: TimedGraph, leads: npt.NDArray[np.bool_]) -> SplitBackward:
    """The backward with the rows in `leads` in its first pass and the others in its second.

    Args:
        whole: all rows of the backward of a chunk.
        leads: (num_rows,) rows that lead to the gradient of the input; see `graph.input_rows`.
    """
    weight_row: Ints = np.cumsum(~leads, dtype=np.int64) - 1
    return SplitBackward(input=_selected(whole, leads), weight=_selected(whole, ~leads), weight_row=weight_row)
