"""Layers that run again together: their pieces from those of a layer that runs again alone and one that is kept.

Under Megatron's uniform recomputation of N layers a group keeps the input of its first layer only. Its backward first
runs all N forwards again, then N backwards from the last layer to the first. So the last layer of a group, the `lead`,
has the recomputation of all N before its own backward; the others, the `tail`, have their backward alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from echo_explore.graph.backward_split import select_rows
from echo_explore.graph.execution_graph import ExecutionGraph, concatenate
from echo_explore.graph.kinds import Phase
from echo_explore.graph.trace import Piece, Trace


def layer_names(kinds: Sequence[str], recomputed: Sequence[int]) -> tuple[str, ...]:
    """Names of the pieces of the layers of a chunk.

    Args:
        kinds: of the layers.
        recomputed: of each layer the size of the group that runs again together, 0 where it is kept; empty: every layer
            does as the trace does.
    """
    if not recomputed:
        return tuple(f"layer.{kind}" for kind in kinds)
    names: list[str] = []
    while len(names) < len(kinds):
        first, size = len(names), recomputed[len(names)]
        group = kinds[first : first + max(size, 1)]
        if size == 0:
            names.append(f"layer.{group[0]}")
        elif size == 1:
            names.append(f"again.{group[0]}")
        else:
            names += [*(f"tail.{kind}" for kind in group[:-1]), f"lead.{'+'.join(group)}"]
    return tuple(names)


def num_led(name: str) -> int:
    """Layers of the group whose last the piece is; 1 for any other piece."""
    return name.count("+") + 1 if name.startswith("lead.") else 1


def is_layer(name: str) -> bool:
    """Whether the piece is a transformer layer."""
    return name.startswith(("layer.", "again.", "tail.", "lead."))


def piece_of(trace: Trace, name: str) -> Piece:
    """The piece of a name of `layer_names`, `embedding` or `head`."""
    if name in trace.pieces:
        return trace.pieces[name]
    role, _, rest = name.partition(".")
    if role == "tail":
        return _tail(trace, rest)
    if role == "lead":
        return _lead(trace, rest.split("+"))
    return trace.pieces[name]


def with_pieces(trace: Trace, names: Iterable[str]) -> Trace:
    """The trace that also holds the named pieces of groups; itself where it has them all."""
    missing = sorted(set(names) - set(trace.pieces))
    return replace(trace, pieces={**trace.pieces, **{n: piece_of(trace, n) for n in missing}}) if missing else trace


def _tail(trace: Trace, kind: str) -> Piece:
    """A layer of a group but the last: its result is not kept, its backward peak counts with the group's."""
    again = trace.pieces[f"again.{kind}"]
    return replace(
        again,
        backward=_backward_rows(again, again_only=False),
        saved_bytes=max(0.0, again.saved_bytes - trace.boundary_bytes),
        # Its input is no one else's but for the first of the group, whose peak is below that of the others.
        forward_peak_bytes=again.forward_peak_bytes + trace.boundary_bytes,
        backward_peak_bytes=0.0,
    )


def _lead(trace: Trace, kinds: Sequence[str]) -> Piece:
    """The last layer of a group, with the recomputation of all; rows count layers from the group's first."""
    own, last = trace.pieces[f"again.{kinds[-1]}"], len(kinds) - 1
    parts = [_backward_rows(trace.pieces[f"again.{kind}"], again_only=True) for kind in kinds[:-1]]
    kept = peak = 0.0
    for kind in kinds:  # the group's layers as if they were kept, while it runs backward
        piece = trace.pieces[f"layer.{kind}"]
        peak = max(peak, kept + piece.forward_peak_bytes)
        kept += piece.saved_bytes
        peak = max(peak, kept + piece.backward_peak_bytes)
    return replace(
        own,
        forward=concatenate([own.forward], layers=[last]),
        backward=concatenate([*parts, own.backward], layers=range(last + 1)),
        forward_peak_bytes=own.forward_peak_bytes + trace.boundary_bytes,
        backward_peak_bytes=max(peak, own.backward_peak_bytes),
    )


def _backward_rows(piece: Piece, *, again_only: bool) -> ExecutionGraph:
    """The recomputation of a layer, or its backward behind it."""
    mask = piece.backward.phase == Phase.RECOMPUTE
    first = int(np.count_nonzero(mask))
    if mask[first:].any():
        raise ValueError("a layer's recomputation is not one run of rows ahead of its backward")
    return select_rows(piece.backward, mask if again_only else ~mask).graph
