"""All ops of a step, linked and ordered, and their run through the engine."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from echo_explore.core import EchoError, SpecError
from echo_explore.core.jit import jit
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.timeline.charges import NUM_COLUMNS, RanOps
from echo_explore.timeline.engine import run_events
from echo_explore.timeline.exchange_groups import OF_EXCHANGES
from echo_explore.timeline.job import SharedLinks
from echo_explore.timeline.ops import AXIS_STREAM, NUM_STREAMS, OP_COLUMNS, Charge, Ops, Stream
from echo_explore.timeline.ports import InterferenceModel
from echo_explore.timeline.stuck import cycle_text, waiting_cycle
from echo_explore.timeline.templates import Template
from echo_explore.timeline.undisturbed import disturbs, run_undisturbed
from echo_explore.timeline.wiring import Wiring, ready_seconds, wire


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """A checked pair table.

    Attributes:
        compute: (num_kernel_classes, num_traffic_classes) factors on kernels.
        collective: factors on collectives, of the same shape.
        shared: (NUM_STREAMS, NUM_STREAMS) factors on a collective of one stream beside one of another.
    """

    compute: Floats
    collective: Floats
    shared: Floats = field(default_factory=lambda: np.ones((NUM_STREAMS, NUM_STREAMS)))

    @property
    def digest(self) -> bytes:
        """Of all factors."""
        digest = hashlib.blake2b(digest_size=16)
        for table in (self.compute, self.collective, self.shared):
            digest.update(str(table.shape).encode() + table.tobytes())
        return digest.digest()


def checked_pairs(model: InterferenceModel, sharing: Sequence[SharedLinks] = ()) -> Pairs:
    """The pair table of the model, and of axes whose collectives share links.

    Raises:
        SpecError: wrong shape, or a factor that is not finite or below 1.
    """
    table = model.pair_table()
    factors = {}
    for name, values in (("compute", table.compute), ("collective", table.collective)):
        array = np.ascontiguousarray(values, dtype=np.float64)
        if array.ndim != 2 or array.shape != np.shape(table.compute):
            raise SpecError(
                f"interference.{name}", array.shape, "needs a factor for each pair", "give both tables one shape"
            )
        if not (np.isfinite(array) & (array >= 1)).all():
            raise SpecError(
                f"interference.{name}", float(array.min()), "every factor must be 1 or more", "check the model"
            )
        factors[name] = array
    shared = np.ones((NUM_STREAMS, NUM_STREAMS))
    for links in sharing:
        one, other = AXIS_STREAM[links.first], AXIS_STREAM[links.second]
        if one != other:
            shared[one, other], shared[other, one] = links.first_slowdown, links.second_slowdown
    return Pairs(**factors, shared=shared)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Templates laid end to end, so that copies of many are gathered at once.

    Attributes:
        templates: the templates.
        ops: their ops.
        first: (num_templates + 1,) offsets of their ops.
        first_edge: (num_templates + 1,) offsets of their edges.
        bodies: (num_templates, NUM_COLUMNS) charges of those that are one body, 0 for others.
        template_of: (num_ops,) template of an op.
    """

    templates: tuple[Template, ...]
    ops: Ops
    first: Ints
    first_edge: Ints
    bodies: Floats
    template_of: Ints

    @classmethod
    def of(cls, templates: Sequence[Template]) -> "Pool":
        """The pool of at least one template."""
        sizes = [t.ops.num_ops for t in templates]
        edges = [t.ops.edge_source.shape[0] for t in templates]
        bodies = np.zeros((len(templates), NUM_COLUMNS))
        for i, template in enumerate(templates):
            if template.charges is not None:
                bodies[i] = template.charges
        return cls(
            templates=tuple(templates),
            ops=concatenate_ops([t.ops for t in templates]),
            first=np.cumsum([0, *sizes], dtype=np.int64),
            first_edge=np.cumsum([0, *edges], dtype=np.int64),
            bodies=bodies,
            template_of=np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
        )


def concatenate_ops(parts: Sequence[Ops]) -> Ops:
    """The ops one after the other; edges keep counting from the start of their part."""
    columns = {
        name: np.concatenate([getattr(p, name) for p in parts]) for name in (*OP_COLUMNS, "edge_source", "edge_target")
    }
    return Ops(**columns)


@jit
def _ragged(first: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Indices `first[i] .. first[i] + sizes[i] - 1` for all i, and the i of each."""
    total = sizes.sum()
    index, owner = np.empty(total, np.int64), np.empty(total, np.int64)
    at = 0
    for i in range(sizes.shape[0]):
        for j in range(sizes[i]):
            index[at] = first[i] + j
            owner[at] = i
            at += 1
    return index, owner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """Copies of templates, the ops of all counted from the first.

    Attributes:
        pool: what was copied.
        source: (num_ops,) op of the pool.
        owner: (num_ops,) copy that an op belongs to.
        entry: (num_copies,) first op of a copy.
        exit: (num_copies,) last op of a copy.
        edge_source: (num_edges,) op that must end ...
        edge_target: (num_edges,) ... before this one starts.
    """

    pool: Pool
    source: Ints
    owner: Ints
    entry: Ints
    exit: Ints
    edge_source: Ints
    edge_target: Ints

    @property
    def num_ops(self) -> int:
        """Ops of all copies."""
        return int(self.source.shape[0])

    def ops_with(self, further: Sequence[Ops], edges: Sequence[tuple[Ints, Ints]] = ()) -> Ops:
        """The ops of the copies, then these, with these edges (sources and targets) besides the copies' own."""
        n = self.num_ops
        total = n + sum(part.num_ops for part in further)
        columns = {}
        for name in OP_COLUMNS:
            table = getattr(self.pool.ops, name)
            column = np.empty(total, dtype=table.dtype)
            np.take(table, self.source, out=column[:n], mode="clip")
            if further:
                np.concatenate([getattr(part, name) for part in further], out=column[n:])
            columns[name] = column
        return Ops(
            **columns,
            edge_source=np.concatenate([self.edge_source, *(source for source, _ in edges)]),
            edge_target=np.concatenate([self.edge_target, *(target for _, target in edges)]),
        )


def copy_templates(pool: Pool, which: Ints) -> Copies:
    """Copies of the templates `which` of the pool, one after the other."""
    sizes = np.diff(pool.first)[which]
    source, owner = _ragged(pool.first[which], sizes)
    entry = np.cumsum(sizes) - sizes
    edges, edge_owner = _ragged(pool.first_edge[which], np.diff(pool.first_edge)[which])
    start = entry[edge_owner]
    return Copies(
        pool=pool,
        source=source,
        owner=owner,
        entry=entry,
        exit=entry + sizes - 1,
        edge_source=pool.ops.edge_source[edges] + start,
        edge_target=pool.ops.edge_target[edges] + start,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """Ops of all rank classes; columns of shape (num_ops,).

    Attributes:
        ops: with edges between any of them.
        rank: rank class that runs the op.
        peer: rank class that receives a transfer, else -1.
        order: key of the op within its stream; ties by index.
        group: rendezvous group, -1 for none; numbered from 0.
        source: op of the pool that it is a copy of, -1 for others.
        copy: block that it belongs to, -1 for others.
        num_ranks: rank classes.
        pool: what its ops were copied from, for messages; None: nothing.
        wiring: how they hang together, where that is known already.
    """

    ops: Ops
    rank: Ints
    peer: Ints
    order: Floats
    group: Ints
    source: Ints
    copy: Ints
    num_ranks: int
    pool: Pool | None = None
    wiring: Wiring | None = None

    def name_of(self, op: int) -> str:
        """An op in words: what it is, its row, stream and rank class."""
        what = Charge(int(self.ops.charge[op])).name.lower()
        source, row = int(self.source[op]), int(self.ops.row[op])
        if self.pool is not None and source >= 0 and row >= 0:
            graph = self.pool.templates[int(self.pool.template_of[source])].source.graph
            what = f"row {row} ({graph.text(row).strip()})"
        to = f" to rank class {int(self.peer[op])}" if self.peer[op] >= 0 else ""
        return f"{what}{to} on {Stream(int(self.ops.stream[op])).name.lower()} of rank class {int(self.rank[op])}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """When every op of a program ran, in seconds from the start of the step."""

    start_s: Floats
    end_s: Floats


def _check_classes(ops: Ops, pairs: Pairs) -> None:
    for axis, name in enumerate(("kernel_class", "traffic_class")):
        largest, size = int(getattr(ops, name).max(initial=0)), pairs.compute.shape[axis]
        if largest >= size:
            raise SpecError(
                name, largest, f"the interference table has classes 0..{size - 1}", "give it a factor for every class"
            )


def wiring_of(program: Program) -> Wiring:
    """How the ops of a program hang together."""
    return wire(
        program.ops,
        rank=program.rank,
        peer=program.peer,
        order=program.order,
        group=program.group,
        num_ranks=program.num_ranks,
    )


def run_program(program: Program, pairs: Pairs) -> Times:
    """Start and end of every op.

    Raises:
        EchoError: ops wait for each other; names those of a cycle.
        SpecError: an op of a class that the pair table does not have.
    """
    ops = program.ops
    n = ops.num_ops
    _check_classes(ops, pairs)
    wiring = program.wiring or wiring_of(program)
    start, end = np.zeros(n), np.full(n, np.nan)
    links = (wiring.succ_offsets, wiring.succ_index, wiring.num_preds, wiring.stream_first, wiring.stream_order)
    groups, tables = (wiring.group_first, wiring.group_members), (pairs.compute, pairs.collective, pairs.shared)
    done = run_undisturbed(ops.duration_s, program.group, *links, *groups, start, end)
    streams = (wiring.stream_first, wiring.stream_order, NUM_STREAMS)
    if done == n and disturbs(ops.kernel_class, ops.traffic_class, *streams, *tables, start, end):
        classes = (ops.kernel_class, ops.traffic_class, program.group)
        done = run_events(ops.duration_s, wiring.stream, *classes, *links, NUM_STREAMS, *groups, *tables, start, end)
    if done != n:
        cycle = waiting_cycle(
            np.isfinite(end),
            stream=wiring.stream,
            order=wiring.stream_order,
            edge_source=ops.edge_source,
            edge_target=ops.edge_target,
            group=program.group,
        )
        text = cycle_text(cycle, program.name_of)
        raise EchoError(f"timeline: {n - done} of {n} ops wait for each other: {text}; fix: correct their order")
    return Times(start_s=start, end_s=end)


def ran_ops(program: Program, times: Times, pool: Pool) -> RanOps:
    """The ops of all rank classes as they ran.

    Args:
        program: the program.
        times: its run.
        pool: what its ops were copied from.
    """
    wiring = program.wiring or wiring_of(program)
    ops = program.ops
    return RanOps(
        start_s=times.start_s,
        end_s=times.end_s,
        charge=ops.charge,
        op_class=ops.op_class,
        duration_s=ops.duration_s,
        sigma_log=ops.sigma_log,
        straggler_fraction=ops.straggler_fraction,
        source=program.source,
        body_of_source=pool.template_of,
        alone_s=pool.ops.duration_s,
        ready_s=_ready(program, wiring, times),
        stream_first=wiring.stream_first,
        stream_order=wiring.stream_order,
        incoming_first=wiring.incoming_first,
        incoming=wiring.incoming,
        stream=wiring.stream,
    )


def _ready(program: Program, wiring: Wiring, times: Times) -> Floats:
    """(num_ops,) When exchanges that meet others could have started, had these been as far; the start of other ops."""
    members = wiring.group_members
    meets = members[np.isin(program.ops.axis[members], OF_EXCHANGES)]
    if not meets.size:
        return times.start_s
    ready = ready_seconds(wiring.succ_offsets, wiring.succ_index, wiring.stream_first, wiring.stream_order, times.end_s)
    at_s = times.start_s.copy()
    at_s[meets] = np.minimum(ready[meets], at_s[meets])
    return at_s
