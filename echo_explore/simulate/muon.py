"""The update of weight matrices by Muon: what runs for one matrix, its FLOP, its bytes.

Momentum, then Newton-Schulz iterations that bring the singular values of the momentum to about 1, then the step along
the result. Follows megatron-core 0.16.1 (optimizer/muon.py) and NVIDIA-NeMo/Emerging-Optimizers (muon_utils.py,
orthogonalized_optimizer.py), read 2026-12-01: eager kernels over fp32 arrays, products in bf16 without the kernels for
symmetric results, which Megatron does not ask for.

References:
    Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from echo_explore.graph import Axis, DType, OpClass, OpRow, Parameter, Phase, weight_matrices
from echo_explore.specs import Candidate

STEPS: Final = 5
"""Iterations: muon_num_ns_steps of megatron-core 0.16.1, optimizer/optimizer_config.py (2026-12-01)."""
Mode = Literal["blockwise", "duplicated", "distributed"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of an update, and how often it runs."""

    row: OpRow
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One orthogonalisation, as a rank runs it: X of `rows` by `columns`, of which X X^T has `rows` squared.

    Attributes:
        rows, columns: extents after the transposition, m and n below.
        num_local_elements: elements of the rank's own part.
        ranks: that hold the matrix together and exchange something; 1: none.
        mode: what they exchange, if there are several.
    """

    rows: int
    columns: int
    num_local_elements: int
    ranks: int = 1
    mode: Mode = "blockwise"

    @property
    def flop(self) -> float:
        """STEPS (4 m^2 n + 2 m^3): A = X X^T (2 m^2 n), B = b A + c A A (2 m^3), X = a X + B X (2 m^2 n).

        A is symmetric; the kernels that run do not use it.
        """
        m, n = float(self.rows), float(self.columns)
        return STEPS * (4 * m * m * n + 2 * m**3)

    @property
    def messages(self) -> tuple[tuple[Literal["gather", "sum"], float, DType], ...]:
        """Collectives over the ranks, with nccl-tests' size in bytes.

        `duplicated` gathers the whole matrix in fp32; `distributed` sums one fp32 number for the norm, then A in bf16
        in every step.
        """
        if self.ranks == 1 or self.mode == "blockwise":
            return ()
        if self.mode == "duplicated":
            return (("gather", 4.0 * self.rows * self.columns, DType.FP32),)
        return (("sum", 4.0, DType.FP32), *(("sum", 2.0 * self.rows**2, DType.BF16) for _ in range(STEPS)))

    def kernels(self) -> list[Kernel]:
        """Gathered copies, the norm and the division by it, the products, the way back to fp32, two scalings."""
        m, n, local = self.rows, self.columns, self.num_local_elements
        whole = m * n
        kernels = []
        if self.messages and self.mode == "duplicated":
            kernels.append(_pass(OpClass.COPY, whole, 4, 4, times=2))  # out of the message; shards side by side
        if self.messages and self.mode == "distributed":
            kernels.append(_pass(OpClass.ELEMENTWISE, whole, 4, 4))  # squares
        kernels += [
            Kernel(_row(OpClass.REDUCTION, (whole, 1), 4.0 * whole, 4.0)),
            _pass(OpClass.ELEMENTWISE, whole, 4, 4),
            _pass(OpClass.COPY, whole, 4, 2),
            Kernel(_product(m, m, n, read=2.0 * m * n), STEPS),
            Kernel(_product(m, m, m, read=2.0 * m * m), STEPS),
            Kernel(_product(m, n, m, read=2.0 * (m * m + m * n)), STEPS),
            _pass(OpClass.COPY, whole, 2, 4),
            _pass(OpClass.ELEMENTWISE, local, 4, 4, times=2),
        ]
        return kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonUpdate:
    """The update of one parameter, and of how many alike.

    Attributes:
        shape: of the parameter on this rank.
        blocks: what is orthogonalised: one, or queries, keys and values apart.
        cut: the blocks lie between each other, so that they are copied out.
        expert: its ranks are those that split an expert.
        count: parameters of this kind.
    """

    shape: tuple[int, int]
    blocks: tuple[Block, ...]
    cut: bool
    expert: bool
    count: int

    @property
    def num_elements(self) -> int:
        """Of all parameters of this kind."""
        return self.count * self.shape[0] * self.shape[1]

    @property
    def label(self) -> str:
        """How many of what shape."""
        return f"{self.count} of {self.shape[0]} x {self.shape[1]}"

    @property
    def axis(self) -> Axis:
        """Whose group exchanges."""
        return Axis.EXPERT_TENSOR if self.expert else Axis.TENSOR

    def kernels(self) -> list[Kernel]:
        """Of one parameter: weight decay, momentum, its blocks, the step."""
        size = self.shape[0] * self.shape[1]
        kernels = [_pass(OpClass.ELEMENTWISE, size, 4, 4), _pass(OpClass.ELEMENTWISE, size, 8, 4)]
        if self.cut:
            kernels += [_pass(OpClass.COPY, block.num_local_elements, 4, 4) for block in self.blocks]
        for block in self.blocks:
            kernels += block.kernels()
        if len(self.blocks) > 1:
            kernels.append(_pass(OpClass.COPY, size, 4, 4))
        return [*kernels, _pass(OpClass.ELEMENTWISE, size, 8, 4)]

    @property
    def num_kernels(self) -> int:
        """Kernels of one parameter."""
        return sum(kernel.times for kernel in self.kernels())

    def row(self) -> OpRow:
        """All parameters of this kind as one op: FLOP of the products, bytes that the kernels move.

        For one whole matrix of N = m n elements 72 N + 4 + STEPS (6 N + 8 m^2) bytes: in fp32 weight decay 8, momentum
        12, norm 4, division 8, scalings 16, step 12; casts 6 each; operands and results of products once, in bf16.
        """
        kernels = self.kernels()
        return OpRow(
            op_class=OpClass.OPTIMIZER,
            phase=Phase.OPTIMIZER,
            dtype=DType.BF16,
            name="muon",
            module=self.label,
            dims=(self.num_elements,),
            flop=self.count * sum(block.flop for block in self.blocks),
            bytes_read=self.count * sum(k.times * k.row.bytes_read for k in kernels),
            bytes_written=self.count * sum(k.times * k.row.bytes_written for k in kernels),
            host_calls=0,
        )


def muon_updates(candidate: Candidate, parameters: Sequence[Parameter]) -> tuple[MuonUpdate, ...]:
    """What Muon updates of these parameters, alike ones together, largest first; nothing under another optimizer.

    Raises:
        TraceError: the trace does not say their shapes.
    """
    if candidate.recipe.optimizer != "muon":
        return ()
    kinds: Counter[tuple[tuple[int, int], int, bool, bool]] = Counter()
    for p in weight_matrices(parameters):
        expert = "experts" in p.name and "shared" not in p.name
        qkv = bool(candidate.recipe.muon_split_qkv) and p.name.endswith("linear_qkv.weight")
        kinds[((p.shape[0], p.shape[1]), p.partition_dim, expert, qkv)] += p.num_matrices
    updates = [_update(candidate, *kind, count) for kind, count in kinds.items()]
    return tuple(sorted(updates, key=lambda u: -u.num_elements))


def _update(
    candidate: Candidate, shape: tuple[int, int], partition_dim: int, expert: bool, qkv: bool, count: int
) -> MuonUpdate:
    model, layout = candidate.model, candidate.layout
    ranks = layout.expert_tensor_ranks if expert else layout.tensor_parallel
    mode = candidate.recipe.muon_tp_mode or "blockwise"
    parts, groups = [shape[0]], 1
    if qkv:
        head = model.head_dim
        each = [model.num_attention_heads // model.num_key_value_heads * head, head, head]
        groups = shape[0] // sum(each)
        parts = [groups * size for size in each]
    blocks = tuple(_block((rows, shape[1]), partition_dim, ranks, mode) for rows in parts)
    return MuonUpdate(shape=shape, blocks=blocks, cut=qkv and groups > 1, expert=expert, count=count)


def _block(shape: tuple[int, int], partition_dim: int, ranks: int, mode: Mode) -> Block:
    local = shape[0] * shape[1]
    if mode == "blockwise" or partition_dim < 0:
        return Block(rows=min(shape), columns=max(shape), num_local_elements=local)
    if mode == "distributed":  # X X^T has the side that is whole on every rank, the smaller one or not
        whole, part = shape[1 - partition_dim], shape[partition_dim]
        return Block(rows=whole, columns=part, num_local_elements=local, ranks=ranks, mode=mode)
    sizes = [size * (ranks if dim == partition_dim else 1) for dim, size in enumerate(shape)]
    return Block(rows=min(sizes), columns=max(sizes), num_local_elements=local, ranks=ranks, mode=mode)


def _row(
    op_class: OpClass, dims: tuple[int, ...], read: float, written: float, *, dtype: DType = DType.FP32,
    flop: float = 0.0,
) -> OpRow:  # fmt: skip
    return OpRow(
        op_class=op_class,
        phase=Phase.OPTIMIZER,
        dtype=dtype,
        name="muon",
        dims=dims,
        flop=flop,
        bytes_read=read,
        bytes_written=written,
    )


def _pass(op_class: OpClass, elements: int, read: float, written: float, *, times: int = 1) -> Kernel:
    """One pass over an array: bytes an element that it reads and writes."""
    return Kernel(_row(op_class, (elements,), read * elements, written * elements), times)


def _product(m: int, n: int, k: int, *, read: float) -> OpRow:
    flop = 2.0 * m * n * k
    return _row(OpClass.GEMM, (1, m, n, k), read, 2.0 * m * n, dtype=DType.BF16, flop=flop)
