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
        own: by rank class, its ops.
        incoming: by rank class, transfers of others to it.
    """

    stream: Ints
    stream_first: Ints
    stream_order: Ints
    succ_offsets: Ints
    succ_index: Ints
    num_preds: Ints
    group_first: Ints
    group_members: Ints
    own: tuple[Ints, ...]
    incoming: tuple[Ints, ...]


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
    by_rank = np.argsort(rank.astype(np.int16), kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=num_ranks))])
    transfers = np.flatnonzero(peer >= 0)
    to = peer[transfers]
    return Wiring(
        stream=stream,
        stream_first=stream_first,
        stream_order=stream_order,
        succ_offsets=succ_offsets,
        succ_index=ops.edge_target[by_source],
        num_preds=np.bincount(ops.edge_target, minlength=n).astype(np.int64),
        group_first=group_first,
        group_members=members[in_group].astype(np.int64),
        own=tuple(by_rank[first[r] : first[r + 1]] for r in range(num_ranks)),
        incoming=tuple(transfers[to == r] for r in range(num_ranks)),
    )
