"""What the host needs for each row: the operators that it dispatches, and modules whose Python does more than that."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from echo_explore.graph import DType, ExecutionGraph, OpClass, OpKind, Phase, TimedGraph
from echo_explore.graph.execution_graph import Floats, Ints

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
    collective_s: tuple[float, ...] = (),
    launch_blocking: bool = False,
) -> Floats:
    """(num_rows,) What the host needs for the calls of each row; autograd makes those of the backward.

    A grouped product, and the cast right ahead of it, stands for one of each expert: `expert_call_s` for each further.
    A product or attention takes at least what its module's Python does, whatever operators it dispatches. A row without
    calls is part of a CUDA graph: nothing of it costs the host. A collective takes `collective_s` of its axis on top.
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
    is_cast = _is_cast(graph, products)
    row_s[products[is_cast] - 1] += further_s[is_cast]
    if collective_s:
        launched = graph.is_collective & (graph.host_calls > 0)
        row_s[launched] += np.asarray(collective_s)[graph.axis[launched]]
    return row_s + waits_s


def _is_cast(graph: ExecutionGraph, products: Ints) -> npt.NDArray[np.bool_]:
    """(num_products,) Whether the row right ahead of each grouped product is its cast."""
    cast: npt.NDArray[np.bool_] = np.isin(graph.op_class[products - 1], (OpClass.COPY, OpClass.QUANTISE))
    return cast & (products > 0)


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


def launch_leads(timed: TimedGraph, host_row_s: Floats | None) -> Floats:
    """(num_waits,) How long after each wait of the host the first row behind it starts, so that none waits later.

    With L_i what the host needs from the wait up to row i and G_i what the compute stream runs ahead of it, rows that
    follow each other without gaps from max(L_i - G_i) on end when rows that wait for their own launches do. Of a row
    that stands for the launches of e experts only the last waits for L_i: less (1 - 1/e) of its time.
    """
    graph = timed.graph
    waits = np.flatnonzero(graph.kind == OpKind.HOST_SYNC)
    leads = np.zeros(waits.shape[0])
    if host_row_s is None or not waits.shape[0]:
        return leads
    runs = graph.is_compute | (graph.is_collective & ~graph.asynchronous)
    busy_s = np.where(runs, timed.time_s, 0.0)
    products = np.flatnonzero(graph.op_class == OpClass.GROUPED_GEMM)
    parts = np.ones(graph.num_ops)
    parts[products] = np.maximum(graph.dims[products, 0], 1)
    casts = products[_is_cast(graph, products)]
    parts[casts - 1] = parts[casts]
    spread_s = busy_s * (1.0 - 1.0 / parts)
    for number, (first, last) in enumerate(zip(waits + 1, [*waits[1:], graph.num_ops], strict=True)):
        here = runs[first:last]
        ahead_s = np.cumsum(busy_s[first:last]) - busy_s[first:last]
        late_s = (np.cumsum(host_row_s[first:last]) - ahead_s - spread_s[first:last])[here]
        leads[number] = max(0.0, float(late_s.max(initial=0.0)))
    return leads


def host_seconds(timed: TimedGraph, *, call_s: float, backward_call_s: float) -> float:
    """What the host needs at least for the calls of the graph."""
    return float(host_row_seconds(timed, call_s=call_s, backward_call_s=backward_call_s).sum())
