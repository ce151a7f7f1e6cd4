"""One step of one rank with the groups of its collectives: what can be priced without a description of the job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph.execution_graph import ExecutionGraph, Ints
from echo_explore.graph.storage import load_graph_and_facts, save_graph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTrace:
    """A step of one rank of a job.

    Attributes:
        graph: its rows in the order in which they can run.
        rank: that was played.
        world_size: ranks of the job.
        groups: global ranks of every group that the rank communicates in; of a transfer the sender and the receiver.
        group_of_row: (num_ops,) index into `groups` of a collective, else -1.
        peak_memory_bytes: largest sum of live tensors in the step, without fragmentation or what libraries hold.
        versions: of the frameworks.
        oracles: values that only a GPU knows, and what was assumed.
    """

    graph: ExecutionGraph
    rank: int
    world_size: int
    groups: tuple[tuple[int, ...], ...]
    group_of_row: Ints
    peak_memory_bytes: float
    versions: Mapping[str, str] = field(default_factory=dict)
    oracles: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Check that the rows fit."""
        if self.group_of_row.shape != (self.graph.num_ops,):
            raise ValueError(f"group_of_row has shape {self.group_of_row.shape}, not ({self.graph.num_ops},)")
        if (self.group_of_row >= len(self.groups)).any():
            raise ValueError("group_of_row names a group that does not exist")
        self.group_of_row.setflags(write=False)


def groups_of_rows(ranks_of_row: Sequence[tuple[int, ...] | None]) -> tuple[tuple[tuple[int, ...], ...], Ints]:
    """Every group once, and (num_ops,) the one of each row, -1 where a row has none."""
    known: dict[tuple[int, ...], int] = {}
    numbers = [known.setdefault(ranks, len(known)) if ranks else -1 for ranks in ranks_of_row]
    return tuple(known), np.array(numbers, dtype=np.int64)


def save_rank_trace(path: Path, trace: RankTrace, *, overwrite: bool = True) -> None:
    """Write the trace as a graph file whose facts say the rest; `load_graph` reads it too.

    Raises:
        FileExistsError: it is there, and `overwrite` is false.
    """
    save_graph(path, trace.graph, facts=facts_of(trace), overwrite=overwrite)


def load_rank_trace(path: Path) -> RankTrace:
    """The trace that `save_rank_trace` wrote.

    Raises:
        SpecError: the file is missing, damaged, or a graph without groups.
    """
    graph, facts = load_graph_and_facts(path)
    trace = trace_of(graph, facts)
    if trace is None:
        raise SpecError("graph", str(path), "does not name the groups of its collectives", "trace a --script again")
    return trace


def facts_of(trace: RankTrace) -> dict[str, Any]:
    """Everything but the graph, as plain JSON values."""
    rows = np.flatnonzero(trace.group_of_row >= 0)
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "groups": [_packed(group) for group in trace.groups],
        "group_rows": [[int(row), int(trace.group_of_row[row])] for row in rows],
        "peak_memory_bytes": trace.peak_memory_bytes,
        "versions": dict(trace.versions),
        "oracles": [dict(oracle) for oracle in trace.oracles],
    }


def trace_of(graph: ExecutionGraph, facts: Mapping[str, Any]) -> RankTrace | None:
    """The trace of a graph and what `facts_of` said of it; None if these are other facts."""
    if "groups" not in facts:
        return None
    group_of_row = np.full(graph.num_ops, -1, dtype=np.int64)
    for row, group in facts["group_rows"]:
        group_of_row[row] = group
    return RankTrace(
        graph=graph,
        rank=facts["rank"],
        world_size=facts["world_size"],
        groups=tuple(_unpacked(group) for group in facts["groups"]),
        group_of_row=group_of_row,
        peak_memory_bytes=facts["peak_memory_bytes"],
        versions=facts["versions"],
        oracles=tuple(facts["oracles"]),
    )


def _packed(ranks: tuple[int, ...]) -> list[int] | dict[str, int]:
    """Evenly spaced ranks as first, step and count, others as they are."""
    steps = np.diff(np.asarray(ranks, dtype=np.int64))
    if len(ranks) > 2 and (steps == steps[0]).all():
        return {"first": ranks[0], "step": int(steps[0]), "count": len(ranks)}
    return list(ranks)


def _unpacked(value: list[int] | dict[str, int]) -> tuple[int, ...]:
    if isinstance(value, dict):
        return tuple(value["first"] + value["step"] * i for i in range(value["count"]))
    return tuple(value)
