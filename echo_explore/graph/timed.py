"""A graph with the time of each row."""

from dataclasses import dataclass, field

import numpy as np

from echo_explore.graph.execution_graph import ExecutionGraph, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedGraph:
    """A graph and what each row takes when nothing else runs.

    Attributes:
        graph: the rows.
        time_s: (num_ops,) seconds alone; 0 for waits and host syncs.
        sigma_log: (num_ops,) standard deviation of the log of each time, from residuals of the model that priced it.
        pair_class: (num_ops,) what of the interference model's table the row has: a kernel its row, a collective its
            column, others 0; left out: OpClass and Collective codes.
    """

    graph: ExecutionGraph
    time_s: Floats
    sigma_log: Floats
    pair_class: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        """Check shapes and lock the arrays."""
        n = self.graph.num_ops
        if self.time_s.shape != (n,) or self.sigma_log.shape != (n,):
            raise ValueError(f"time_s {self.time_s.shape} and sigma_log {self.sigma_log.shape} must be ({n},)")
        if not self.pair_class.shape[0]:
            codes = np.where(self.graph.is_compute, self.graph.op_class, self.graph.collective)
            object.__setattr__(self, "pair_class", codes.astype(np.int64))
        if self.pair_class.shape != (n,):
            raise ValueError(f"pair_class has shape {self.pair_class.shape}, not ({n},)")
        self.pair_class.setflags(write=False)
        self.time_s.setflags(write=False)
        self.sigma_log.setflags(write=False)
