"""A graph with the time of each row."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from echo_explore.graph.execution_graph import ExecutionGraph, Floats, Ints

_IDENTITY = (
    "kind",
    "op_class",
    "phase",
    "collective",
    "axis",
    "asynchronous",
    "awaits",
    "stream",
    "host_calls",
    "dims",
    "dtype",
    "name",
)
"""Columns of a graph that decide what the timeline makes of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedGraph:
    """A graph and what each row takes when nothing else runs.

    Attributes:
        graph: the rows.
        time_s: (num_ops,) seconds alone; 0 for waits and host syncs.
        sigma_log: (num_ops,) standard deviation of the log of each time, from residuals of the model that priced it.
        pair_class: (num_ops,) what of the interference model's table the row has: a kernel its row, a collective its
            column, others 0; left out: OpClass and Collective codes.
        straggler_fraction: (num_ops,) share of each time that the slowest GPU of the job takes longer than the mean
            one; left out: 0.
    """

    graph: ExecutionGraph
    time_s: Floats
    sigma_log: Floats
    pair_class: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    straggler_fraction: Floats = field(default_factory=lambda: np.zeros(0))
    _digest: bytes = field(default=b"", init=False, repr=False)

    @classmethod
    def joined(cls, parts: Sequence[Self], graph: ExecutionGraph) -> Self:
        """The rows of several graphs one after another, with `graph`, which has them all."""
        return cls(
            graph=graph,
            time_s=np.concatenate([np.zeros(0), *(p.time_s for p in parts)]),
            sigma_log=np.concatenate([np.zeros(0), *(p.sigma_log for p in parts)]),
            pair_class=np.concatenate([np.zeros(0, dtype=np.int64), *(p.pair_class for p in parts)]),
            straggler_fraction=np.concatenate([np.zeros(0), *(p.straggler_fraction for p in parts)]),
        )

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
        if not self.straggler_fraction.shape[0]:
            object.__setattr__(self, "straggler_fraction", np.zeros(n))
        if self.straggler_fraction.shape != (n,):
            raise ValueError(f"straggler_fraction has shape {self.straggler_fraction.shape}, not ({n},)")
        self.straggler_fraction.setflags(write=False)
        self.pair_class.setflags(write=False)
        self.time_s.setflags(write=False)
        self.sigma_log.setflags(write=False)

    @property
    def digest(self) -> bytes:
        """Of the rows as far as the timeline looks at them, their names for messages too; made once."""
        if not self._digest:
            digest = hashlib.blake2b(digest_size=16)
            for column in (self.time_s, self.sigma_log, self.pair_class, self.straggler_fraction):
                digest.update(column.tobytes())
            for name in _IDENTITY:
                digest.update(getattr(self.graph, name).tobytes())
            digest.update("\0".join(self.graph.strings).encode())
            object.__setattr__(self, "_digest", digest.digest())
        return self._digest
