"""A graph with the time of each row."""

from dataclasses import dataclass

from echo_explore.graph.execution_graph import ExecutionGraph, Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedGraph:
    """A graph and what each row takes when nothing else runs.

    Attributes:
        graph: the rows.
        time_s: (num_ops,) seconds alone; 0 for waits and host syncs.
        sigma_log: (num_ops,) standard deviation of the log of each time, from residuals of the model that priced it.
    """

    graph: ExecutionGraph
    time_s: Floats
    sigma_log: Floats

    def __post_init__(self) -> None:
        """Check shapes and lock the arrays."""
        n = self.graph.num_ops
        if self.time_s.shape != (n,) or self.sigma_log.shape != (n,):
            raise ValueError(f"time_s {self.time_s.shape} and sigma_log {self.sigma_log.shape} must be ({n},)")
        self.time_s.setflags(write=False)
        self.sigma_log.setflags(write=False)
