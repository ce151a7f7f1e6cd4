"""Chakra traces of other programs as rows of a graph."""

import heapq
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph.chakra_messages import CommType, Node, NodeType
from echo_explore.graph.execution_graph import OpRow
from echo_explore.graph.kinds import Axis, Collective, OpClass, OpKind

COMM_TYPES = {
    Collective.ALL_REDUCE: CommType.ALL_REDUCE, Collective.ALL_GATHER: CommType.ALL_GATHER,
    Collective.REDUCE_SCATTER: CommType.REDUCE_SCATTER, Collective.ALL_TO_ALL: CommType.ALL_TO_ALL,
    Collective.BROADCAST: CommType.BROADCAST, Collective.REDUCE: CommType.REDUCE,
    Collective.BARRIER: CommType.BARRIER,
}  # fmt: skip
_COLLECTIVES = {code: kind for kind, code in COMM_TYPES.items()} | {
    CommType.REDUCE_SCATTER_BLOCK: Collective.REDUCE_SCATTER
}


def wrong_node(path: Path, node: Node, why: str) -> SpecError:
    """The error of one node."""
    return SpecError("file", str(path), f"node {node.number} ({node.name}) {why}", "export it anew")


def foreign_rows(path: Path, nodes: Sequence[Node]) -> list[OpRow]:
    """Rows of the nodes, in an order that respects their dependences.

    Raises:
        SpecError: a node misses, names itself, or has no counterpart.
    """
    ordered = _ordered(path, nodes)
    device = [n for n in nodes if n.kind is not NodeType.METADATA and n.attrs.get("is_cpu_op") is not True]
    host_too = not device
    rows: list[OpRow] = []
    row_of: dict[int, frozenset[int]] = {}
    waited: set[int] = set()
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
        rows.append(row)
    return rows


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
        raise wrong_node(path, nodes[int(np.flatnonzero(missing)[0])], "depends on itself")
    return ordered


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
    elif node.kind in (NodeType.COMM_SEND, NodeType.COMM_RECV):
        row.collective = Collective.SEND if node.kind is NodeType.COMM_SEND else Collective.RECV
    else:
        raise wrong_node(path, node, "has the type INVALID")
    return row


def _amount(path: Path, node: Node, name: str) -> float:
    """A number that a node may lack."""
    value = node.attrs.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise wrong_node(path, node, f"has {name} = {value!r}, not a number of 0 or more")
    return float(value)
