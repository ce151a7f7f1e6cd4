"""Ops that wait for each other, in words."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from echo_explore.graph.execution_graph import Ints

MOST = 6
"""Ops of a cycle that are written out."""


def waiting_cycle(
    has_ended: npt.NDArray[np.bool_],
    *,
    stream: Ints,
    order: Ints,
    edge_source: Ints,
    edge_target: Ints,
    group: Ints,
) -> list[int]:
    """Ops of a program that has come to a halt, of which each waits for the next and the last for the first.

    Args:
        has_ended: (num_ops,) ops that ran; not all.
        stream: (num_ops,) stream of an op.
        order: (num_ops,) ops, stream by stream in the order of each.
        edge_source: (num_edges,) op that must end ...
        edge_target: (num_edges,) ... before this one starts.
        group: (num_ops,) rendezvous group, -1 for none.
    """
    ahead = np.full(stream.shape[0], -1, dtype=np.int64)
    same = stream[order[1:]] == stream[order[:-1]]
    ahead[order[1:][same]] = order[:-1][same]
    is_held = ~has_ended[edge_source]
    source, target = edge_source[is_held], edge_target[is_held]

    def holds(op: int) -> int:
        """An op that holds this one back, -1: none."""
        if ahead[op] >= 0 and not has_ended[ahead[op]]:
            return int(ahead[op])
        before = source[target == op]
        return int(before[0]) if before.size else -1

    def awaited(op: int) -> int:
        """What an op waits for: what holds it back, or another member of its group that is held back."""
        if (own := holds(op)) >= 0 or group[op] < 0:
            return own
        members = np.flatnonzero(group == group[op]).tolist()
        return next((member for member in members if member != op and holds(member) >= 0), -1)

    path: list[int] = []
    seen: dict[int, int] = {}
    op = int(np.flatnonzero(~has_ended)[0])
    while op >= 0 and op not in seen:
        seen[op] = len(path)
        path.append(op)
        op = awaited(op)
    return path[seen.get(op, 0) :]


def cycle_text(cycle: list[int], name: Callable[[int], str]) -> str:
    """`a waits for b, which waits for c, which waits for a`."""
    shown = [name(op) for op in cycle[:MOST]]
    rest = f", and so on over {len(cycle) - MOST} more," if len(cycle) > MOST else ","
    return (
        f"{shown[0]} waits for "
        + "".join(f"{text}, which waits for " for text in shown[1:]).removesuffix(", which waits for ")
        + (f"{rest} which waits for {shown[0]}" if len(cycle) > 1 else "itself")
    )
