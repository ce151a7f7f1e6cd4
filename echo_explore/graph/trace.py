"""A traced program: the pieces from which every stage of every layout with the same trace key is composed.

A piece is a run of ops that repeats: the forward or backward of the embedding, of one transformer layer, of the head
(final norm, logits, loss). Layers that differ (dense, mixture of experts) are layer kinds. Gradient synchronisation,
pipeline transfers and the optimizer are not pieces: they follow from the parameters, the layout and the schedule.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo_explore.core import TraceError
from echo_explore.graph.execution_graph import ExecutionGraph

PieceName = str
"""`embedding`, `head`, `layer.<kind>`, or `again.<kind>`: a layer that runs again where others are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter tensor as this rank holds it, in the order of the module tree.

    Attributes:
        name: path inside its piece, e.g. `self_attention.linear_qkv.weight`.
        num_elements: elements on this rank.
        tensor_sharded: split over the tensor-parallel group (else every rank of it holds a copy).
        sequence_parallel: replicated, and its gradient is summed over the tensor-parallel group.
        expert: belongs to experts, so replicated over the expert-data group only.
        trainable: has a gradient and optimizer states.
        shape: on this rank; where experts share one tensor, of the matrix of one of them.
        num_matrices: experts that share the tensor.
        partition_dim: dimension that is split over the tensor-parallel group; -1: none.
        embedding: word embedding or output layer, as Megatron marks them.
    """

    name: str
    num_elements: int
    tensor_sharded: bool
    sequence_parallel: bool = False
    expert: bool = False
    trainable: bool = True
    shape: tuple[int, ...] = ()
    num_matrices: int = 1
    partition_dim: int = -1
    embedding: bool = False


def weight_matrices(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Trained parameters that Muon updates: all of two dimensions but word embedding and output layer.

    megatron-core 0.16.1, optimizer/muon.py (2026-12-01); a router and a table of learned positions are among them.

    Raises:
        TraceError: a parameter whose shape the trace does not say.
    """
    for p in parameters:
        if math.prod(p.shape) * p.num_matrices != p.num_elements:
            raise TraceError(f"parameter {p.name}: shape {p.shape} is not known; fix: trace again with this version")
    return tuple(p for p in parameters if p.trainable and len(p.shape) == 2 and not p.embedding)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """One piece: its graphs, its parameters, and what it needs in memory for one micro-batch on this rank.

    Attributes:
        forward: ops of the forward.
        backward: ops of the backward, recomputation included.
        parameters: in module order.
        saved_bytes: activation bytes that stay from the end of the forward to the start of its backward.
        forward_peak_bytes: most activation bytes alive during the forward above what was alive at its start.
        backward_peak_bytes: most bytes alive during the backward above what was alive at its start (saved activations
            of this piece are alive at its start).
        saved_tensors: what saved_bytes consists of: module and operator that made it, and bytes; the input that a layer
            keeps is a result of the piece before. Empty where a tracer does not say.
    """

    forward: ExecutionGraph
    backward: ExecutionGraph
    parameters: tuple[Parameter, ...]
    saved_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    saved_tensors: tuple[tuple[str, float], ...] = ()

    @property
    def num_parameters(self) -> int:
        """Parameter elements on this rank."""
        return sum(p.num_elements for p in self.parameters)

    def result_label(self, num_bytes: float) -> str:
        """Which of `saved_tensors` holds the result of the forward: its last row that makes as much; empty if none."""
        graph = self.forward
        for row in reversed(range(graph.num_ops)):
            if graph.allocated_bytes[row] >= num_bytes:
                return tensor_label(graph.strings[graph.module[row]], graph.strings[graph.name[row]])
        return ""


def tensor_label(module: str, operator: str) -> str:
    """What made a tensor, as `Piece.saved_tensors` names it: the path inside its piece and the operator."""
    return f"{re.sub(_OUTSIDE, '', module)} {operator}".strip()


_OUTSIDE = r"^(decoder\.|embedding\.)?(layers\.N\.?)?"
"""The part of a module's path that all modules of a piece have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """All pieces under one trace key, and the facts of the trace.

    Attributes:
        key: content hash of `request`.
        request: what was traced (canonical JSON value): model dimensions, tp, sp, cp, ep, micro-batch, sequence,
            precision, attention, recompute, fusion, framework and versions.
        pieces: by name.
        layer_kinds: the kind of every layer of the model, in order: piece `layer.<kind>`.
        boundary_bytes: bytes of the activation that a stage sends to the next for one micro-batch, on this rank.
        oracles: host syncs and data-dependent values met, with the values that were assumed.
        facts: versions, seconds the trace took, number of layers compared for equality.
    """

    key: str
    request: Mapping[str, Any]
    pieces: Mapping[PieceName, Piece]
    layer_kinds: tuple[str, ...]
    boundary_bytes: float
    oracles: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, Any]
