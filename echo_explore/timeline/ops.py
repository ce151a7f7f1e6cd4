"""The streams of a rank, what its time is charged to, and ops as column arrays."""

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Self

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph import Axis
from echo_explore.graph.execution_graph import Floats, Ints


class Stream(IntEnum):
    """In-order queues of one rank: PyTorch runs each communicator of NCCL on a stream of its own."""

    COMPUTE = 0
    TENSOR = 1
    CONTEXT = 2
    EXPERT = 3
    DATA = 4
    SEND_FORWARD = 5
    SEND_BACKWARD = 6
    MODEL = 7
    """Collectives over stages: gradient norm."""
    HOST = 8
    """Launches of a block, counted as one op."""
    EXPERT_TENSOR = 9
    EXPERT_MODEL = 10
    EXPERT_DATA = 11
    EMBEDDING = 12
    """Gradients of tied embeddings, between the first and the last stage."""
    HOST_LINK = 13
    """Copies to the memory of the host and back."""


class Charge(IntEnum):
    """What an op is charged to while it runs; `charges` says which wins where several run."""

    BODY = 0
    """A whole forward or backward as one op; its charges are known."""
    KERNEL = 1
    RECOMPUTE = 2
    OPTIMIZER = 3
    TENSOR = 4
    CONTEXT = 5
    EXPERT = 6
    DATA = 7
    PIPELINE = 8
    HOST = 9
    MARK = 10
    """Takes no time: begin, end, wait."""
    LAUNCH = 11
    """The host launches what a forward or backward runs."""


NUM_STREAMS = len(Stream)

_AXIS_STREAM = {
    Axis.TENSOR: (Stream.TENSOR, Charge.TENSOR),
    Axis.CONTEXT: (Stream.CONTEXT, Charge.CONTEXT),
    Axis.EXPERT: (Stream.EXPERT, Charge.EXPERT),
    Axis.EXPERT_TENSOR: (Stream.EXPERT_TENSOR, Charge.EXPERT),
    Axis.EXPERT_MODEL: (Stream.EXPERT_MODEL, Charge.EXPERT),
    Axis.DATA: (Stream.DATA, Charge.DATA),
    Axis.EXPERT_DATA: (Stream.EXPERT_DATA, Charge.DATA),
    Axis.PIPELINE: (Stream.MODEL, Charge.PIPELINE),
    Axis.EMBEDDING: (Stream.EMBEDDING, Charge.PIPELINE),
    Axis.MODEL: (Stream.MODEL, Charge.PIPELINE),
    Axis.HOST: (Stream.HOST_LINK, Charge.HOST),
}
AXIS_STREAM: Ints = np.array([_AXIS_STREAM.get(axis, (-1, -1))[0] for axis in Axis], dtype=np.int64)
"""(num_axes,) Stream of a collective by Axis; -1 where there is none."""
TRANSFERS = (Charge.TENSOR, Charge.CONTEXT, Charge.EXPERT, Charge.DATA, Charge.PIPELINE)
"""What communication is charged to."""
DATA_STREAMS = (Stream.DATA, Stream.EXPERT_DATA)
"""Where bucket reductions and parameter gathers run."""
AXIS_CHARGE: Ints = np.array([_AXIS_STREAM.get(axis, (-1, -1))[1] for axis in Axis], dtype=np.int64)
"""(num_axes,) Charge of a collective by Axis; -1 where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ops:
    """Ops as columns of shape (num_ops,), and the edges between them.

    Attributes:
        stream: Stream.
        charge: Charge.
        op_class: OpClass of a kernel, 0 for others.
        kernel_class: row of the pair table that a kernel has, 0 for others.
        traffic_class: column of the pair table that a transfer has which a kernel would feel, 0 for others.
        axis: Axis of a collective, 0 for others.
        duration_s: alone.
        sigma_log: of duration_s.
        straggler_fraction: share of duration_s that the slowest GPU takes longer than the mean one.
        row: row of the graph it came from, -1 for others.
        edge_source: (num_edges,) op that must end ...
        edge_target: (num_edges,) ... before this one starts.
    """

    stream: Ints
    charge: Ints
    op_class: Ints
    kernel_class: Ints
    traffic_class: Ints
    axis: Ints
    duration_s: Floats
    sigma_log: Floats
    straggler_fraction: Floats
    row: Ints
    edge_source: Ints
    edge_target: Ints

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return int(self.stream.shape[0])

    @classmethod
    def blank(cls, num_ops: int) -> Self:
        """Marks on the compute stream, without edges."""

        def zeros() -> Ints:
            return np.zeros(num_ops, dtype=np.int64)

        return cls(
            stream=zeros(),
            charge=np.full(num_ops, int(Charge.MARK), dtype=np.int64),
            op_class=zeros(),
            kernel_class=zeros(),
            traffic_class=zeros(),
            axis=zeros(),
            duration_s=np.zeros(num_ops),
            sigma_log=np.zeros(num_ops),
            straggler_fraction=np.zeros(num_ops),
            row=np.full(num_ops, -1, dtype=np.int64),
            edge_source=np.zeros(0, dtype=np.int64),
            edge_target=np.zeros(0, dtype=np.int64),
        )


OP_COLUMNS = tuple(item.name for item in fields(Ops) if not item.name.startswith("edge_"))
"""Columns of `Ops` that have one entry an op."""


def check_times(field: str, values: Floats) -> None:
    """Refuse times that are negative or not finite.

    Raises:
        SpecError: naming the first bad one.
    """
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        at = int(np.argmax(bad))
        raise SpecError(f"{field}[{at}]", float(values[at]), "must be finite and not negative", "price it again")
