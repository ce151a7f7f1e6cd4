"""Chakra traces of other programs as rows of a graph."""

import heapq
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NoReturn

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph.chakra_messages import CommType, Node, NodeType
from echo_explore.graph.execution_graph import ExecutionGraph, OpRow
from echo_explore.graph.kinds import Axis, Collective, OpClass, OpKind
from echo_explore.graph.rank_trace import RankTrace, groups_of_rows

COMM_TYPES = {
    Collective.ALL_REDUCE: CommType.ALL_REDUCE, Collective.ALL_GATHER: CommType.ALL_GATHER,
    Collective.REDUCE_SCATTER: CommType.REDUCE_SCATTER, Collective.ALL_TO_ALL: CommType.ALL_TO_ALL,
    Collective.BROADCAST: CommType.BROADCAST, Collective.REDUCE: CommType.REDUCE,
    Collective.BARRIER: CommType.BARRIER,
}  # fmt: skip
_COLLECTIVES = {code: kind for kind, code in COMM_TYPES.items()} | {
    CommType.REDUCE_SCATTER_BLOCK: Collective.REDUCE_SCATTER
}
TRANSFERS = {Collective.SEND: NodeType.COMM_SEND, Collective.RECV: NodeType.COMM_RECV}
_TRANSFERS = {code: kind for kind, code in TRANSFERS.items()}
Peers = dict[int, tuple[int, int]]
"""Of a transfer, by its row: the rank that sends and the rank that receives."""
_MOST_RANKS = 2**31
"""No job has more."""
_SHOWN = 6
"""Nodes of a cycle that are written out."""


def wrong_node(path: Path, node: Node, why: str) -> SpecError:
    """The error of one node."""
    return SpecError("file", str(path), f"node {node.number} ({node.name}) {why}", "export it anew")


def foreign_rows(path: Path, nodes: Sequence[Node]) -> tuple[list[OpRow], Peers]:
    """Rows of the nodes, in an order that respects their dependences, and the ranks of transfers.

    Raises:
        SpecError: a node misses, names itself, or has no counterpart.
    """
    if all(n.kind is NodeType.METADATA for n in nodes):
        rule = f"has {len(nodes)} nodes, all of kind METADATA, and none that computes or sends"
        raise SpecError("file", str(path), rule, "export it anew")
    ordered = _ordered(path, nodes)
    device = [n for n in nodes if n.kind is not NodeType.METADATA and n.attrs.get("is_cpu_op") is not True]
    host_too = not device
    rows: list[OpRow] = []
    row_of: dict[int, frozenset[int]] = {}
    waited: set[int] = set()
    peers: Peers = {}
    for node in ordered:
        read = sorted(set().union(*(row_of[d] for d in (*node.data_deps, *node.ctrl_deps))))
        kept = node.kind is not NodeType.METADATA and (host_too or node.attrs.get("is_cpu_op") is not True)
        if not kept:
            row_of[node.number] = frozenset(read)
            continue
        for dep in read:
            if rows[dep].kind is OpKind.COLLECTIVE and dep not in waited:
                waited.add(dep)
                rows.append(OpRow(kind=OpKind.WAIT, name="wait", awaits=dep, deps=(dep,)))
        row = _foreign_row(path, node)
        row.deps = tuple(read)
        row_of[node.number] = frozenset({len(rows)})
        if node.kind in _TRANSFERS and {"comm_src", "comm_dst"} <= set(node.attrs):
            peers[len(rows)] = _peers(path, node)
        rows.append(row)
    return rows, peers


def _peers(path: Path, node: Node) -> tuple[int, int]:
    """The rank that sends and the rank that receives."""
    pair = _amount(path, node, "comm_src"), _amount(path, node, "comm_dst")
    if pair[0] == pair[1] or any(rank != int(rank) or rank >= _MOST_RANKS for rank in pair):
        raise wrong_node(path, node, f"goes from rank {pair[0]:g} to rank {pair[1]:g}, which no transfer does")
    return int(pair[0]), int(pair[1])


def transfers_of(path: Path, graph: ExecutionGraph, peers: Peers) -> RankTrace | None:
    """The trace of the rank that runs these transfers, None where there are none; of collectives no group is known.

    The rank is in the name of the file (`NAME.RANK.et`), else the one that every transfer has in common.
    """
    if not peers:
        return None
    own = set.intersection(*(set(pair) for pair in peers.values()))
    suffix = path.stem.rpartition(".")[2]
    rank = int(suffix) if suffix.isdecimal() else min(own, default=0)
    if own and rank not in own:
        raise SpecError("file", str(path), f"is of rank {rank} by its name, but its transfers are not", "rename it")
    groups, group_of_row = groups_of_rows([peers.get(row) for row in range(graph.num_ops)])
    return RankTrace(
        graph=graph, rank=rank, world_size=1 + max(max(pair) for pair in peers.values()), groups=groups,
        group_of_row=group_of_row, peak_memory_bytes=float(graph.live_bytes.max(initial=0.0)),
    )  # fmt: skip


def _ordered(path: Path, nodes: Sequence[Node]) -> list[Node]:
    """Nodes in file order as far as their dependences allow."""
    position = {node.number: i for i, node in enumerate(nodes)}
    if len(position) != len(nodes):
        twice = next(n for i, n in enumerate(nodes) if position[n.number] != i)
        raise wrong_node(path, twice, "has an id that another node has")
    missing = np.zeros(len(nodes), dtype=np.int64)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for dep in {*node.data_deps, *node.ctrl_deps}:
            if dep not in position:
                raise wrong_node(path, node, f"depends on node {dep}, which the file lacks")
            readers[position[dep]].append(i)
            missing[i] += 1
    ready = np.flatnonzero(missing == 0).tolist()
    ordered: list[Node] = []
    while ready:
        i = heapq.heappop(ready)
        ordered.append(nodes[i])
        for reader in readers[i]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    if len(ordered) < len(nodes):
        _refuse_cycle(path, nodes, position, int(np.flatnonzero(missing)[0]), {node.number for node in ordered})
    return ordered


def _refuse_cycle(
    path: Path, nodes: Sequence[Node], position: Mapping[int, int], start: int, ordered: Set[int]
) -> NoReturn:
    """Name nodes that wait for each other; `start` is one that could not be put in order."""
    seen: dict[int, int] = {}
    trail: list[Node] = []
    at = start
    while at not in seen:
        seen[at] = len(trail)
        trail.append(nodes[at])
        at = next(position[dep] for dep in (*nodes[at].data_deps, *nodes[at].ctrl_deps) if dep not in ordered)
    cycle = trail[seen[at] :]
    if len(cycle) == 1:
        raise wrong_node(path, cycle[0], "depends on itself")
    first = min(range(len(cycle)), key=lambda i: cycle[i].number)
    cycle = cycle[first:] + cycle[:first]
    named = [f"node {node.number} ({node.name})" for node in cycle[1:_SHOWN]]
    more = [f"{len(cycle) - _SHOWN} more"] if len(cycle) > _SHOWN else []
    chain = ", which depends on ".join([*named, *more, f"node {cycle[0].number}"])
    raise wrong_node(path, cycle[0], f"depends on itself: on {chain}")


def _foreign_row(path: Path, node: Node) -> OpRow:
    size = _amount(path, node, "tensor_size")
    if node.kind is NodeType.COMP:
        return OpRow(name=node.name, op_class=OpClass.OTHER, flop=_amount(path, node, "num_ops"), bytes_read=size)
    if node.kind is NodeType.MEM_LOAD:
        return OpRow(name=node.name, op_class=OpClass.COPY, bytes_read=size)
    if node.kind is NodeType.MEM_STORE:
        return OpRow(name=node.name, op_class=OpClass.COPY, bytes_written=size)
    row = OpRow(
        kind=OpKind.COLLECTIVE, name=node.name, message_bytes=_amount(path, node, "comm_size"), asynchronous=True,
        stream=1,
    )  # fmt: skip
    group = str(node.attrs.get("pg_name", "")).upper()
    row.axis = Axis[group] if group in Axis.__members__ else Axis.NONE
    if node.kind is NodeType.COMM_COLL:
        code = node.attrs.get("comm_type")
        if code not in _COLLECTIVES:
            raise wrong_node(path, node, f"has comm_type = {code!r}, which has no counterpart here")
        row.collective = _COLLECTIVES[CommType(code)]  # type: ignore[arg-type]
    elif node.kind in _TRANSFERS:
        row.collective = _TRANSFERS[node.kind]
    else:
        raise wrong_node(path, node, "has the type INVALID")
    return row


def _amount(path: Path, node: Node, name: str) -> float:
    """A number that a node may lack."""
    value = node.attrs.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise wrong_node(path, node, f"has {name} = {value!r}, not a number of 0 or more")
    return float(value)
