"""How the ops of a program hang together, in the arrays that the engine reads."""

from dataclasses import dataclass

import numpy as np

from echo_explore.core.jit import jit
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.timeline.ops import NUM_STREAMS, Ops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wiring:
    """How ops hang together, as the engine reads it.

    Attributes:
        stream: (num_ops,) stream of all ranks.
        stream_first: offsets of every stream into ...
        stream_order: ... the ops of all streams in order.
        succ_offsets: offsets of every op into ...
        succ_index: ... ops that wait for it.
        num_preds: (num_ops,) ops that an op waits for.
        group_first: offsets of every rendezvous group into ...
        group_members: ... its ops.
        incoming_first: offsets of every rank class into ...
        incoming: ... transfers of others to it, by stream and in its order.
    """

    stream: Ints
    stream_first: Ints
    stream_order: Ints
    succ_offsets: Ints
    succ_index: Ints
    num_preds: Ints
    group_first: Ints
    group_members: Ints
    incoming_first: Ints
    incoming: Ints


@jit
def _csr(keys: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """Offsets of every key into the order that sorts `keys`, and that order; ties by index."""
    offsets = np.zeros(num_keys + 1, np.int64)
    for key in keys:
        offsets[key + 1] += 1
    for key in range(num_keys):
        offsets[key + 1] += offsets[key]
    at = offsets[:-1].copy()
    order = np.empty(keys.shape[0], np.int64)
    for i in range(keys.shape[0]):
        order[at[keys[i]]] = i
        at[keys[i]] += 1
    return offsets, order


def _in_streams(stream: Ints, order: Floats, num_streams: int) -> tuple[Ints, Ints]:
    """Offsets of every stream into the ops in the order of their streams, and these."""
    first, by_stream = _csr(stream, num_streams)
    keys = order[by_stream]
    falls = np.flatnonzero(keys[1:] < keys[:-1]) + 1
    for s in np.unique(np.searchsorted(first, falls, side="right") - 1).tolist():
        part = slice(first[s], first[s + 1])
        by_stream[part] = by_stream[part][np.argsort(keys[part], kind="stable")]
    return first, by_stream


def wire(ops: Ops, *, rank: Ints, peer: Ints, order: Floats, group: Ints, num_ranks: int) -> Wiring:
    """How these ops hang together; columns as in `program.Program`."""
    n = ops.num_ops
    stream = rank * NUM_STREAMS + ops.stream
    stream_first, stream_order = _in_streams(stream, order, num_ranks * NUM_STREAMS)
    succ_offsets, by_source = _csr(ops.edge_source, n)
    members = np.flatnonzero(group >= 0)
    group_first, in_group = _csr(group[members], int(group.max(initial=-1)) + 1)
    transfers = stream_order[peer[stream_order] >= 0]
    incoming_first, by_peer = _csr(peer[transfers], num_ranks)
    return Wiring(
        stream=stream,
        stream_first=stream_first,
        stream_order=stream_order,
        succ_offsets=succ_offsets,
        succ_index=ops.edge_target[by_source],
        num_preds=np.bincount(ops.edge_target, minlength=n).astype(np.int64),
        group_first=group_first,
        group_members=members[in_group].astype(np.int64),
        incoming_first=incoming_first,
        incoming=transfers[by_peer],
    )


@jit
def ready_seconds(
    succ_offsets: Ints, succ_index: Ints, stream_first: Ints, stream_order: Ints, end_s: Floats
) -> Floats:
    """(num_ops,) When the last of what an op waits for has ended: ops ahead of it, but not those that it meets.

    Args:
        succ_offsets: see `Wiring`.
        succ_index: see `Wiring`.
        stream_first: see `Wiring`.
        stream_order: see `Wiring`.
        end_s: (num_ops,) end of every op.
    """
    ready = np.zeros(end_s.shape[0])
    for s in range(stream_first.shape[0] - 1):
        for at in range(stream_first[s] + 1, stream_first[s + 1]):
            ready[stream_order[at]] = end_s[stream_order[at - 1]]
    for op in range(end_s.shape[0]):
        for j in range(succ_offsets[op], succ_offsets[op + 1]):
            ready[succ_index[j]] = max(ready[succ_index[j]], end_s[op])
    return ready
