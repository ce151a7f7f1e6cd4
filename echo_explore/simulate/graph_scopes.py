"""CUDA graphs of parts of layers: what the host does not launch row by row."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from echo_explore.graph import ExecutionGraph, Phase, Trace, is_layer
from echo_explore.specs import StackProfile

_LAYER = "decoder.layers.N"
_PARTS = {
    "attn": ("input_layernorm", "self_attention"),
    "mlp": ("pre_mlp_layernorm", "mlp"),
    "moe": ("pre_mlp_layernorm", "mlp"),
    "moe_router": ("pre_mlp_layernorm", "mlp.router", "mlp.shared_experts"),
}
"""Modules of a layer that a scope captures [megatron-core 0.16.1, transformer_layer.py, 2026-12-01]."""
_OF_DENSE, _OF_MIXTURES = ("attn", "mlp"), ("attn", "moe", "moe_router")


def with_graph_scopes(stack: StackProfile, trace: Trace) -> Trace:
    """The trace whose captured parts of layers cost the host one call each, forward and backward.

    `mlp` captures dense layers only, `moe` and `moe_router` mixtures only. Kernels stay as they are. Where the stack
    captures everything (`cuda_graphs`) or nothing the trace is returned itself.

    # Approximation: a replay costs the host what one operator costs, copies of its inputs included (under-estimates);
    # what `moe_preprocess` captures beside the router launches no kernel of its own and stays (over-estimates).
    """
    if not stack.graph_scopes or stack.cuda_graphs:
        return trace
    pieces = dict(trace.pieces)
    for name, piece in trace.pieces.items():
        if is_layer(name):
            scopes = _OF_MIXTURES if name.partition(".")[2].startswith("moe") else _OF_DENSE
            parts = [part for scope in scopes if scope in stack.graph_scopes for part in _PARTS[scope]]
            pieces[name] = replace(
                piece, forward=_captured(piece.forward, parts), backward=_captured(piece.backward, parts)
            )
    return replace(trace, pieces=pieces)


def _captured(graph: ExecutionGraph, parts: Sequence[str]) -> ExecutionGraph:
    """The graph with one host call for each run of captured rows."""
    inside = _rows_of(graph, parts)
    first = inside & ~np.concatenate([[False], inside[:-1]])
    calls = np.where(inside, first.astype(graph.host_calls.dtype), graph.host_calls)
    return replace(graph, host_calls=calls)


def _rows_of(graph: ExecutionGraph, parts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """(num_ops,) Rows of the named modules, and those of the layer itself that end a part (residual and dropout)."""
    paths = [graph.strings[index] for index in graph.module]
    prefixes = tuple(f"{_LAYER}.{part}" for part in parts)
    inside = np.array([any(p == x or p.startswith(f"{x}.") for x in prefixes) for p in paths], dtype=np.bool_)
    own = np.array([path == _LAYER for path in paths], dtype=np.bool_)
    ahead = graph.phase != Phase.BACKWARD  # forwards, run again or not: behind the part that they end
    for row in np.flatnonzero(own & ahead):
        inside[row] = row > 0 and inside[row - 1]
    for row in np.flatnonzero(own & ~ahead)[::-1]:
        inside[row] = row + 1 < graph.num_ops and inside[row + 1]
    return inside
