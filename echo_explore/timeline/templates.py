"""Timed graphs turned into ops: every row its own op, or the whole graph as one whose charges are known."""

from dataclasses import dataclass, replace

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph import Axis, OpKind, Phase, TimedGraph
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.timeline.host import launch_leads
from echo_explore.timeline.ops import AXIS_CHARGE, AXIS_STREAM, DATA_STREAMS, Charge, Ops, Stream, check_times


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Template:
    """Ops that a stage runs, to be copied into a program; the first op is its entry, the last its exit.

    Attributes:
        ops: op indices in edges count from the first op of the template.
        first_op: (num_rows,) op of a row, or of the next row that has one.
        done_op: (num_rows,) op of the compute stream that ends when all rows up to this one have been issued and, as
            far as the compute stream waits for them, are done.
        charges: of a `Charge.BODY` op, else None.
        source: the graph whose rows `ops.row` names.
    """

    ops: Ops
    first_op: Ints
    done_op: Ints
    charges: Floats | None = None
    source: TimedGraph

    @property
    def duration_s(self) -> float:
        """Seconds of all its ops one after the other: of one that is collapsed what it takes."""
        return float(self.ops.duration_s.sum())

    @property
    def uses_data_stream(self) -> bool:
        """Whether its rows queue with bucket reductions and gathers."""
        return bool(np.isin(self.ops.stream, DATA_STREAMS).any())


def expand(
    timed: TimedGraph,
    *,
    host_row_s: Floats | None = None,
    lead_s: Floats | None = None,
    model_charge: Charge = Charge.PIPELINE,
    launch_blocking: bool = False,
) -> Template:
    """Every row as ops.

    A kernel is an op of the compute stream; a collective is an op of its axis's stream, starting after what the compute
    stream ran before it; a synchronous one and a wait are followed by a mark on the compute stream that waits for it.
    The end waits for all collectives and for the host.

    The host launches rows in their order, ahead of the GPU, up to a row at which it waits for the GPU: what it launches
    behind that starts anew from there (the row in `awaits`, or all before), and no row behind it starts before all
    those ahead of it have been launched, or so early that one behind would wait for its own launch. With
    `launch_blocking` it launches a row only when the one before has ended, so that its time lies between them on the
    compute stream, and no collective runs beside a kernel.

    # Approximation: kernels of other streams than the first run in issue order on the compute stream, but collectives
    # of the compute stream do not wait for them (either direction).
    # Approximation: ahead of the first wait rows do not wait for their own launch, only all for all (under-estimates).
    # Approximation: a collective that no row waits for is waited for at the end of its graph (over-estimates).

    Args:
        timed: the rows; times alone.
        host_row_s: (num_rows,) what the host needs to launch each row, from the first row on; None: nothing.
        lead_s: (num_waits,) `launch_leads` of the rows before they were coalesced; None: of these.
        model_charge: what collectives over `Axis.MODEL` are charged to.
        launch_blocking: every launch waits for its kernel (CUDA_LAUNCH_BLOCKING=1).

    Raises:
        SpecError: bad times, a collective without axis, a wait for a later row.
    """
    graph = timed.graph
    check_times("time_s", timed.time_s)
    check_times("sigma_log", timed.sigma_log)
    num_rows = graph.num_ops
    row = np.arange(num_rows, dtype=np.int64)
    is_collective = graph.is_collective
    is_compute = graph.is_compute
    is_wait = (graph.kind == OpKind.WAIT) & (graph.awaits >= 0)
    is_sync = is_collective & (~graph.asynchronous | launch_blocking)
    between = (is_compute | is_collective) & (launch_blocking and host_row_s is not None)
    width = (is_compute | is_collective | is_wait).astype(np.int64) + is_sync + between
    at = 1 + np.cumsum(width) - width
    main_at = at + between
    waits = np.flatnonzero(graph.kind == OpKind.HOST_SYNC)
    if lead_s is None:
        lead_s = launch_leads(timed, host_row_s)
    launches = np.zeros(0) if launch_blocking else _launches(host_row_s, waits, lead_s)
    num_ops = int(width.sum()) + 2 + launches.shape[0]
    last = num_ops - 1
    ops = Ops.blank(num_ops)

    kernels = main_at[is_compute]
    ops.charge[kernels] = np.select(
        [graph.phase[is_compute] == Phase.RECOMPUTE, graph.phase[is_compute] == Phase.OPTIMIZER],
        [Charge.RECOMPUTE, Charge.OPTIMIZER],
        Charge.KERNEL,
    )
    ops.op_class[kernels] = graph.op_class[is_compute]
    ops.kernel_class[kernels] = timed.pair_class[is_compute]
    ops.straggler_fraction[kernels] = timed.straggler_fraction[is_compute]
    comms = main_at[is_collective]
    axis = graph.axis[is_collective].astype(np.int64)
    if (AXIS_STREAM[axis] < 0).any():
        bad = int(row[is_collective][AXIS_STREAM[axis] < 0][0])
        raise SpecError(f"axis[{bad}]", Axis(int(graph.axis[bad])).name, "a collective needs an axis", "set its axis")
    ops.stream[comms] = AXIS_STREAM[axis]
    ops.charge[comms] = np.where(axis == Axis.MODEL, int(model_charge), AXIS_CHARGE[axis])
    ops.traffic_class[comms] = timed.pair_class[is_collective]
    ops.axis[comms] = axis
    for ops_of_rows, rows in ((kernels, is_compute), (comms, is_collective)):
        ops.duration_s[ops_of_rows] = timed.time_s[rows]
        ops.sigma_log[ops_of_rows] = timed.sigma_log[rows]
        ops.row[ops_of_rows] = row[rows]
    if host_row_s is not None:
        ops.charge[at[between]] = Charge.LAUNCH
        ops.duration_s[at[between]] = host_row_s[between]
    host = np.arange(last - launches.shape[0], last, dtype=np.int64)
    ops.stream[host] = Stream.HOST
    ops.charge[host] = Charge.LAUNCH
    ops.duration_s[host] = launches

    on_compute = np.where(ops.stream == Stream.COMPUTE, np.arange(num_ops, dtype=np.int64), 0)
    latest = np.maximum.accumulate(on_compute)
    awaited = graph.awaits[is_wait].astype(np.int64)
    if (awaited >= row[is_wait]).any() or not is_collective[awaited].all():
        raise SpecError("awaits", awaited.tolist(), "a wait must name an earlier collective", "trace it again")
    joined = np.zeros(num_rows, dtype=np.bool_)
    joined[awaited] = True
    loose = main_at[is_collective & ~is_sync & ~joined]
    sync = main_at[is_sync]
    done_op = latest[at + width - 1]
    on_main = np.where((ops.stream == Stream.COMPUTE) & ~_aside(ops, main_at, width, graph.stream), latest, 0)
    main = np.maximum.accumulate(on_main)
    edges = [
        (np.where(graph.stream[is_collective] == 0, main[comms], latest[comms]), comms),
        (sync, sync + 1),
        (main_at[awaited], at[is_wait]),
        (loose, np.full(loose.shape, last)),
        (np.zeros_like(host[:1]), host[:1]),
        (host[-1:], np.full(host[-1:].shape, last)),
    ]
    if host.shape[0] > 1:
        awaited_row = np.where(graph.awaits[waits] >= 0, graph.awaits[waits], waits)
        behind = np.where(at[waits] < host[0], at[waits], last)
        edges += [(done_op[awaited_row], host[1::2]), (host[1::2], behind)]
    return Template(
        ops=replace(
            ops,
            edge_source=np.concatenate([source for source, _ in edges]),
            edge_target=np.concatenate([target for _, target in edges]),
        ),
        first_op=at,
        done_op=done_op,
        source=timed,
    )


def scaled(template: Template, share: float) -> Template:
    """A share of a collapsed template, of its charges too."""
    assert template.charges is not None
    ops = replace(template.ops, duration_s=template.ops.duration_s * share)
    return replace(template, ops=ops, charges=template.charges * share)


def _launches(host_row_s: Floats | None, waits: Ints, lead_s: Floats) -> Floats:
    """(2 num_waits + 1,) Seconds of the host up to the first wait, then of each wait's lead and of the rest behind it.

    Empty where the host costs nothing.
    """
    if host_row_s is None or not host_row_s.any():
        return np.zeros(0)
    so_far = np.concatenate([[0.0], np.cumsum(host_row_s)])
    segments = np.diff(so_far[np.concatenate([[0], waits + 1, [host_row_s.shape[0]]])])
    launches = np.zeros(2 * waits.shape[0] + 1)
    launches[0], launches[1::2], launches[2::2] = segments[0], lead_s, np.maximum(segments[1:] - lead_s, 0.0)
    return launches


def _aside(ops: Ops, at: Ints, width: Ints, stream: np.ndarray[tuple[int], np.dtype[np.int16]]) -> np.ndarray:
    """(num_ops,) Ops of rows that the program put on another stream than the first."""
    aside = np.zeros(ops.num_ops, dtype=np.bool_)
    aside[at[(stream != 0) & (width > 0)]] = True
    return aside


def collapse(template: Template, *, body_s: float, host_excess_s: float, charges: Floats) -> Template:
    """The template as one op of `body_s` with known charges, followed by what the host takes longer.

    Args:
        template: as `expand` made it.
        body_s: from its start to the end of its last row, when nothing else runs on the rank.
        host_excess_s: from there to the end of the host's launches; 0 if the host is ahead.
        charges: see `charges.Column`.
    """
    ops = Ops.blank(2 if host_excess_s > 0 else 1)
    ops.charge[0] = Charge.BODY
    ops.duration_s[0] = body_s
    if host_excess_s > 0:
        ops.charge[1] = Charge.LAUNCH
        ops.duration_s[1] = host_excess_s
    return Template(
        ops=ops,
        first_op=np.zeros_like(template.first_op),
        done_op=np.zeros_like(template.done_op),
        charges=charges,
        source=template.source,
    )
