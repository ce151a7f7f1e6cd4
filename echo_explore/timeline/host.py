"""What the host needs for each row: the operators that it dispatches, and modules whose Python does more than that."""

from dataclasses import dataclass, fields

import numpy as np

from echo_explore.graph import DType, ExecutionGraph, OpClass, Phase, TimedGraph
from echo_explore.graph.execution_graph import Floats

NARROW = (DType.FP8, DType.MXFP8, DType.NVFP4)
"""Data types of products whose inputs were cast first."""
LAUNCH_LATENCY_S = 7.1e-6
"""An empty kernel launched and waited for, A100: PETSc (2026), src/sys/objects/device/tests/ex1k.kokkos.cxx, Perlmutter
7.13 us (2.31 us launched without waiting); Frontier 7.78 us, Summit's V100 12.83 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSeconds:
    """Host time of modules of one data type, in a forward and in a backward (of both products of a linear layer).

    Attributes:
        linear_s: a linear layer, its casts included.
        grouped_s: the linear layers of experts with one expert.
        expert_s: each further expert.
        attention_s: fused attention.
    """

    linear_s: float = 0.0
    linear_backward_s: float = 0.0
    grouped_s: float = 0.0
    grouped_backward_s: float = 0.0
    expert_s: float = 0.0
    expert_backward_s: float = 0.0
    attention_s: float = 0.0
    attention_backward_s: float = 0.0

    def times(self, factor: float) -> "ModuleSeconds":
        """All of them times a factor."""
        return ModuleSeconds(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModules:
    """Modules by the data type of their products: of 16 bits and more, and of less."""

    wide: ModuleSeconds = ModuleSeconds()
    narrow: ModuleSeconds = ModuleSeconds()

    def times(self, factor: float) -> "HostModules":
        """All of them times a factor."""
        return HostModules(wide=self.wide.times(factor), narrow=self.narrow.times(factor))


def host_row_seconds(
    timed: TimedGraph,
    *,
    call_s: float,
    backward_call_s: float,
    expert_call_s: float = 0.0,
    modules: HostModules | None = None,
    launch_blocking: bool = False,
) -> Floats:
    """(num_rows,) What the host needs for the calls of each row; autograd makes those of the backward.

    A grouped product, and the cast right ahead of it, stands for one of each expert: `expert_call_s` for each further.
    A product or attention takes at least what its module's Python does, whatever operators it dispatches. A row without
    calls is part of a CUDA graph: nothing of it costs the host.
    With `launch_blocking` also what the host waits for each kernel and collective beyond the time that runs on the GPU.
    """
    graph = timed.graph
    waits_s = LAUNCH_LATENCY_S * (graph.is_compute | graph.is_collective) if launch_blocking else 0.0
    each_s: Floats = np.where(graph.phase == Phase.BACKWARD, backward_call_s, call_s)
    row_s = graph.host_calls.astype(np.float64) * each_s
    if modules is not None:
        row_s = np.where(graph.host_calls > 0, np.maximum(row_s, _module_rows(graph, modules)), row_s)
    products = np.flatnonzero(graph.op_class == OpClass.GROUPED_GEMM)
    further_s = np.where(graph.host_calls[products] > 0, np.maximum(graph.dims[products, 0] - 1, 0), 0) * expert_call_s
    row_s[products] += further_s
    is_cast = (products > 0) & np.isin(graph.op_class[products - 1], (OpClass.COPY, OpClass.QUANTISE))
    row_s[products[is_cast] - 1] += further_s[is_cast]
    return row_s + waits_s


def _module_rows(graph: ExecutionGraph, modules: HostModules) -> Floats:
    """(num_rows,) Seconds of the module behind each row; a backward of a linear layer is two rows of half of it.

    # Approximation: every product that is not batched counts as a module of the stack; routers and the output layer
    # are Megatron's own, whose Python is as long (either direction, by less than 0.1 ms a layer).
    """
    backward = graph.phase == Phase.BACKWARD
    linear = (graph.op_class == OpClass.GEMM) & (graph.dims[:, 0] <= 1)
    grouped = graph.op_class == OpClass.GROUPED_GEMM
    attention = graph.op_class == OpClass.ATTENTION
    further = np.maximum(graph.dims[:, 0] - 1, 0)

    def rows_of(m: ModuleSeconds) -> Floats:
        kinds = [linear, grouped, attention]
        ahead_s = np.select(kinds, [m.linear_s, m.grouped_s + further * m.expert_s, m.attention_s], 0.0)
        experts_s = m.grouped_backward_s + further * m.expert_backward_s
        back_s = np.select(kinds, [m.linear_backward_s / 2, experts_s / 2, m.attention_backward_s], 0.0)
        result: Floats = np.where(backward, back_s, ahead_s)
        return result

    rows: Floats = np.where(np.isin(graph.dtype, NARROW), rows_of(modules.narrow), rows_of(modules.wide))
    return rows


def host_seconds(timed: TimedGraph, *, call_s: float, backward_call_s: float) -> float:
    """What the host needs at least for the calls of the graph."""
    return float(host_row_seconds(timed, call_s=call_s, backward_call_s=backward_call_s).sum())
