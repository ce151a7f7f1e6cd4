"""The bf16 program as torchao's Float8Linear runs it with dynamic scales, on torchtitan's Llama 3.

torchao 0.11 (2025), float8/float8_linear.py, float8_scaling_utils.py, float8_tensor_parallel.py: each product casts its
operands when it runs. With one scale a tensor the sequence-parallel shard is cast and gathered in 8 bits, forward and,
for gradients, backward; with a scale a row arrays travel in bf16 and every rank casts the whole of them, along rows for
the product that reads rows and along columns for the weight gradient. Inputs are saved in bf16.

# Approximation: casts of weights are left out: FSDP gathers them in 8 bits (scales by tensor), or they are small beside
# activations (under-estimates by 1 to 2 % where a rank has fewer than 20,000 tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, OpRow, Phase
from echo_explore.specs.recipe import Fp8Scales
from echo_explore.tracing.request import TraceRequest

_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_GATHERED = {
    ("self_attention", False): "linear_qkv",
    ("mlp", False): "linear_fc1",
    ("self_attention", True): "linear_proj",
    ("mlp", True): "linear_fc2",
}
"""Module of a gather and whether it is of a gradient; the product that reads what is gathered."""
_WIDE, _NARROW = 2.0, 1.0  # bytes of an element in bf16 and in 8 bits


@dataclass(slots=True, kw_only=True)
class TorchaoCasts:
    """Decides which arrays are cast before a row, and rewrites the row; what `Quantiser` is for Transformer Engine.

    Attributes:
        scales: found over the whole `tensor` or by `row`; `known` ones cost no pass.
        recomputes: layers run again in the backward, so that the first forward casts for its own product only.
        checkpoint_depth: as in Quantiser; inputs stay in bf16, so what is saved does not change.
    """

    scales: Fp8Scales
    recomputes: bool
    checkpoint_depth: int = 0
    _seen: set[tuple[object, ...]] = field(default_factory=set)
    _gathered: set[tuple[object, ...]] = field(default_factory=set)

    def concerns(self, row: OpRow) -> bool:
        """Whether the row is a product of a layer, or a gather of what one reads."""
        if row.kind is OpKind.COLLECTIVE:
            return self.scales != "row" and self._reader(row) is not None
        return row.module.rpartition(".")[2] in _LINEARS

    @staticmethod
    def _reader(row: OpRow) -> str | None:
        module = row.module.rpartition(".")[2]
        return _GATHERED.get((module, row.phase is Phase.BACKWARD))

    def may_cast(self, row: OpRow) -> bool:
        """Whether the first operand of `row` is wide."""
        return row.kind is OpKind.COLLECTIVE or row.name == "aten.mm"

    def must_cast(self, row: OpRow, array: torch.Tensor) -> bool:
        """Whether `array`, the first operand of a product or the shard of a gather, is cast before `row`.

        Products of one module share their input; their gradients are arrays of their own.
        """
        if row.kind is OpKind.COLLECTIVE:
            parent = row.module.rpartition(".")[0]
            module = ".".join((parent, row.module.rpartition(".")[2], self._reader(row) or ""))
            self._gathered.add((module, row.layer, row.phase, row.micro_batch))
            return True
        own = array.untyped_storage()._cdata if row.phase is Phase.BACKWARD else 0
        place = (row.module, row.layer, row.phase, row.micro_batch, own)
        if place in self._seen or (place[:-1] in self._gathered and not self._both(row)):
            return False
        self._seen.add(place)
        return True

    def _both(self, row: OpRow) -> bool:
        """Whether an array is cast for the weight gradient too: not where its layer runs again before the backward."""
        return row.phase is not Phase.FORWARD or not self.recomputes

    def cast_row(self, row: OpRow, array: torch.Tensor) -> OpRow:
        """The kernels that cast `array`, as one row; `row` is empty yet."""
        count = array.numel()
        both = self._both(row)
        place = (row.module, row.layer, row.phase, row.micro_batch)
        if row.op_class is OpClass.GEMM and place in self._gathered:  # narrow already
            read = written = _NARROW  # turned over for the weight gradient
        elif self.scales == "row":
            # One pass finds the scales of rows and casts; those of columns need one to find them and one to cast.
            read, written = (3 * _WIDE, 2 * _NARROW) if both else (_WIDE, _NARROW)
        else:
            read = _WIDE * (2 if self.scales == "tensor" else 1)
            written = _NARROW * (2 if both and row.op_class is OpClass.GEMM else 1)
        rescaled = 0.0
        if self.scales == "row" and row.phase is Phase.BACKWARD:
            # Products without fast accumulation run with one scale, and a kernel scales results (ao issue 2184, 2025).
            _, outputs, inputs, tokens = row.dims
            rescaled = _WIDE * (tokens * inputs + outputs * inputs)
        row.op_class, row.name, row.dtype = OpClass.COPY, "echo.quantise", DType.FP8
        row.axis, row.collective, row.message_bytes = Axis.NONE, Collective.NONE, 0.0
        row.asynchronous = False
        row.shapes = "x".join(map(str, array.shape))
        row.dims = (count,)
        row.bytes_read, row.bytes_written = read * count + rescaled, written * count + rescaled
        return row

    def forget(self, _: torch.Tensor) -> None:
        """Nothing narrow is kept."""

    def narrow_product(self, row: OpRow) -> None:
        """A matrix product of two narrow operands; its result stays wide."""
        groups, m, n, k = row.dims
        row.bytes_read += float(m * k + groups * k * n) * (_NARROW - _WIDE)
        row.dtype = DType.FP8

    def narrow_gather(self, row: OpRow) -> None:
        """A gather of narrow elements."""
        for name in ("message_bytes", "bytes_read", "bytes_written"):
            setattr(row, name, getattr(row, name) * _NARROW / _WIDE)
        row.dtype = DType.FP8


def narrow_copies(rows: Sequence[OpRow]) -> None:
    """Halve the bytes of rows that put in order what was gathered in 8 bits."""
    for row in rows:
        if row.name == "aten.cat" and any(
            rows[dep].kind is OpKind.COLLECTIVE and rows[dep].dtype is DType.FP8 for dep in row.deps
        ):
            row.bytes_read, row.bytes_written = row.bytes_read * _NARROW / _WIDE, row.bytes_written * _NARROW / _WIDE
            row.dtype = DType.FP8


def casts_of(request: TraceRequest) -> TorchaoCasts | None:
    """What a precision asks for; None for bf16, fp16 and fp32."""
    if request.precision != "fp8":
        return None
    return TorchaoCasts(scales=request.fp8_scales, recomputes=request.recompute == "full")
