"""The bf16 program as Transformer Engine runs it in 8 or 4 bits: linear layers and experts, nothing else.

Transformer Engine 2 (pytorch/module/linear.py, layernorm_linear.py; read 2026-11-30): inputs and incoming gradients are
quantised once, in both orientations, weights once a step; under sequence parallelism the quantised array is gathered;
results, attention, norms and the output layer stay in bf16.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from echo_explore.graph import DType, OpClass, OpKind, OpRow, Phase
from echo_explore.specs.recompute import modules_of
from echo_explore.tracing.request import TraceRequest

_LINEARS = (
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "eh_proj",
)  # fmt: skip
_BF16_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A narrow number format; `element_bytes` includes its block scales."""

    dtype: DType
    element_bytes: float


FORMATS = {
    "fp8": Format(dtype=DType.FP8, element_bytes=1.0),  # one scale a tensor
    "mxfp8": Format(
        dtype=DType.MXFP8, element_bytes=1.0 + 1 / 32
    ),  # OCP MX specification 1.0: E8M0 scale for 32 elements
    "nvfp4": Format(dtype=DType.NVFP4, element_bytes=0.5 + 1 / 16),  # arXiv 2509.25149: E4M3 scale for 16 elements
}


READS = {"known": 1.0, "tensor": 2.0, "row": 3.0}
"""Times that a cast reads its array, by how scales are found (torchao 0.11, float8/float8_scaling_utils.py, 2025).

A scale of the whole array needs a pass before the cast. By rows, one orientation finds the scale and casts while a row
lies in registers; the other reduces over columns first and reads again.
"""


class Casts(Protocol):
    """What a recorder asks before rows whose arrays a library of narrow types casts."""

    checkpoint_depth: int

    def concerns(self, row: OpRow) -> bool:
        """Whether the row's operands or elements are narrow."""

    def may_cast(self, row: OpRow) -> bool:
        """Whether the first operand may still be wide."""

    def must_cast(self, row: OpRow, array: torch.Tensor) -> bool:
        """Whether `array` is cast before `row`."""

    def cast_row(self, row: OpRow, array: torch.Tensor) -> OpRow:
        """The row that casts it."""

    def narrow_product(self, row: OpRow) -> None:
        """Make a product one of narrow operands."""

    def narrow_gather(self, row: OpRow) -> None:
        """Make a gather one of narrow elements."""

    def forget(self, array: torch.Tensor) -> None:
        """`array` is freed in the forward and made anew."""


@dataclass(slots=True, kw_only=True)
class Quantiser:
    """Decides which arrays are quantised before a row, and rewrites the row.

    Attributes:
        format: the narrow format.
        saved_change_bytes: by layer, what its saved activations change by in one forward: inputs of linear layers are
            kept in the narrow format; the attention output stays in bf16 for the attention and is kept again; inputs
            that are made anew in the backward are not kept at all.
        reads: times that a cast reads its array.
        frozen: weights have no gradients: inputs are not kept, and are quantised in one orientation.
        checkpoint_depth: above 0 while a part runs of which only the inputs are kept.
    """

    format: Format
    keeps_attention_output: bool
    reads: float = 1.0
    frozen: bool = False
    saved_change_bytes: dict[int, float] = field(default_factory=dict)
    checkpoint_depth: int = 0
    _kept: dict[int, tuple[Any, int, float]] = field(default_factory=dict)
    _narrow: set[tuple[str, int, Phase, int]] = field(default_factory=set)

    def concerns(self, row: OpRow) -> bool:
        """Whether the row belongs to a linear layer that is quantised."""
        return row.op_class is OpClass.GROUPED_GEMM or row.module.rpartition(".")[2] in _LINEARS

    def may_cast(self, row: OpRow) -> bool:
        """Whether the first operand of `row` is wide; weight gradients of experts read what is narrow already."""
        return row.kind is not OpKind.COMPUTE or row.name in ("aten.mm", "echo.grouped_gemm")

    def must_cast(self, row: OpRow, array: torch.Tensor) -> bool:
        """Whether `array`, the first operand of a product or the shard of a gather, must be quantised before `row`."""
        if row.asynchronous:  # a gather of the saved input, for the weight gradient: it is narrow already
            return False
        if row.op_class is not OpClass.GROUPED_GEMM:  # both products of the experts lie in one module
            place = (row.module, row.layer, row.phase, row.micro_batch)
            if place in self._narrow:  # by the gather or by the first product of this pass
                return False
            self._narrow.add(place)
        if row.phase is Phase.FORWARD and not self.frozen and self.checkpoint_depth == 0:
            twice = row.module.endswith("linear_proj") and self.keeps_attention_output
            twice |= row.module.endswith("linear_kv_down_proj")  # the projection of queries keeps the same input
            change = self.format.element_bytes - (0.0 if twice else _BF16_BYTES)
            self._change(row.layer, change * array.numel())
            storage = array.untyped_storage()
            self._kept[storage._cdata] = (weakref.ref(storage), row.layer, change * array.numel())
        return True

    def _change(self, layer: int, size: float) -> None:
        self.saved_change_bytes[layer] = self.saved_change_bytes.get(layer, 0.0) + size

    def forget(self, array: torch.Tensor) -> None:
        """`array` is freed in the forward and made anew in the backward: no narrow copy of it is kept either.

        Transformer Engine 2, `save_original_input`: the linear layer behind it keeps a reference to `array` itself.
        """
        storage = array.untyped_storage()
        reference, layer, size = self._kept.pop(storage._cdata, (None, -1, 0.0))
        if reference is not None and reference() is storage:  # else of a storage that lay there before
            self._change(layer, -size)

    def cast_row(self, row: OpRow, array: torch.Tensor) -> OpRow:
        """The kernel that quantises `array`, both ways where a weight gradient follows; `row` is empty yet."""
        row.op_class, row.name, row.dtype = OpClass.COPY, "echo.quantise", self.format.dtype
        row.shapes = "x".join(map(str, array.shape))
        row.dims = (array.numel(),)
        row.bytes_read = self.reads * _BF16_BYTES * array.numel()
        row.bytes_written = (1 if self.frozen else 2) * self.format.element_bytes * array.numel()
        return row

    def narrow_product(self, row: OpRow) -> None:
        """A matrix product of two narrow operands; its result and what it accumulates into stay wide."""
        groups, m, n, k = row.dims
        operands = float(m * k + groups * k * n)
        row.bytes_read += operands * (self.format.element_bytes - _BF16_BYTES)
        row.dtype = self.format.dtype

    def narrow_gather(self, row: OpRow) -> None:
        """A gather of narrow elements."""
        ratio = self.format.element_bytes / _BF16_BYTES
        row.message_bytes *= ratio
        row.bytes_read *= ratio
        row.bytes_written *= ratio
        row.dtype = self.format.dtype


def quantiser_of(request: TraceRequest) -> Quantiser | None:
    """What a precision asks for; None for bf16, fp16 and fp32."""
    narrow = FORMATS.get(request.precision)
    if narrow is None:
        return None
    # A recomputed attention does not keep its result.
    again = request.recompute == "full" or "core_attn" in modules_of(request.recompute)
    keeps = not again and request.attention == "flash"
    return Quantiser(
        format=narrow,
        keeps_attention_output=keeps,
        reads=READS[request.fp8_scales],
        frozen=request.lora_rank > 0,
    )
