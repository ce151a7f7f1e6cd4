"""What layers save for the backward, moved to the memory of the host and back beside the kernels."""

from dataclasses import replace

from echo_explore.graph import (
    Axis,
    Collective,
    ExecutionGraph,
    OpKind,
    OpRow,
    Phase,
    Trace,
    build_graph,
    concatenate,
    is_layer,
    reordered,
)
from echo_explore.specs import Candidate


def with_offload(candidate: Candidate, trace: Trace) -> Trace:
    """The trace whose layers copy their share of what is offloaded, out in the forward and back in the backward.

    Transformer Engine spreads the layers that it offloads evenly over all layers: n of L layers leave one every L / n
    layers, and the stream of kernels waits for them there (Transformer Engine 2 (2025), pytorch/cpu_offload.py,
    layer_window_map). Every layer here starts a copy of n / L of the bytes of an offloaded layer and waits for it at
    its end; copies run one after the other on a stream of their own.

    # Approximation: the first layers' forward has nothing to copy yet, and the last layers' backward nothing to fetch
    # (over-estimates where copies take longer than kernels, by less than L / n layers).
    """
    count = candidate.recipe.offload_layers
    if not count:
        return trace
    kinds = trace.layer_kinds
    share = sum(trace.pieces[f"layer.{kind}"].saved_bytes for kind in kinds[:count]) / len(kinds)
    pieces = dict(trace.pieces)
    for name, piece in trace.pieces.items():
        if is_layer(name):
            pieces[name] = replace(
                piece,
                forward=_beside(piece.forward, Collective.SEND, Phase.FORWARD, share),
                backward=_beside(piece.backward, Collective.RECV, Phase.BACKWARD, share),
            )
    return replace(trace, pieces=pieces)


def _beside(graph: ExecutionGraph, direction: Collective, phase: Phase, message_bytes: float) -> ExecutionGraph:
    """The rows of a layer between the start of a copy and the wait for it."""
    name = "offload" if direction is Collective.SEND else "reload"
    copy = OpRow(
        kind=OpKind.COLLECTIVE,
        phase=phase,
        name=f"echo.{name}",
        module="decoder.layers.N",
        layer=0,
        axis=Axis.HOST,
        collective=direction,
        message_bytes=message_bytes,
        asynchronous=True,
    )
    wait = OpRow(kind=OpKind.WAIT, phase=phase, name="wait", module="decoder.layers.N", layer=0, awaits=0)
    both = build_graph([copy, wait])
    order = [0, *range(2, graph.num_ops + 2), 1]
    return reordered(concatenate([both, graph]), order)
