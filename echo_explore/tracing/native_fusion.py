"""Compiled functions of plain PyTorch: one kernel forward, one backward that recomputes what it can from the inputs.

AOTAutograd's min-cut partitioner (torch 2.13, _functorch/partitioners.py) keeps the inputs of a pointwise chain and
recomputes its middle in the backward; Inductor then runs each side as one kernel.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from echo_explore.tracing import megatron_shims

Function = Callable[..., torch.Tensor]
_region: Any = torch.compile  # the tracer's marker of fused regions


@contextlib.contextmanager
def _fusing() -> Iterator[None]:
    """Take regions as one kernel, whether the trace does so elsewhere or not."""
    recorders = megatron_shims.recorders()
    before = [recorder.fuse for recorder in recorders]
    for recorder in recorders:
        recorder.fuse = True
    try:
        yield
    finally:
        for recorder, fuse in zip(recorders, before, strict=True):
            recorder.fuse = fuse


@dataclass(frozen=True, slots=True)
class _Form:
    """What is known of an input that is not kept."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def one_number(self) -> torch.Tensor:
        """A tensor of this form over a single number."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


def compiled(function: Function) -> Function:
    """`function` as under torch.compile where the running trace fuses, else as it is."""
    return _with_regions(function, always=False)


def compiled_linear(function: Function) -> Function:
    """The same of a function that is linear in its inputs with gradients, so that its backward needs none of them."""
    return _with_regions(function, always=False, linear=True)


def one_kernel(function: Function) -> Function:
    """`function` as a library's kernel of its own: fused in eager programs too."""
    return _with_regions(function, always=True)


def _with_regions(function: Function, *, always: bool, linear: bool = False) -> Function:

    @functools.wraps(function)
    def backward(grad: torch.Tensor, inputs: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Any, ...]:
        with torch.enable_grad():
            again = [
                value.detach().requires_grad_(needed) if isinstance(value, torch.Tensor) else value
                for value, needed in zip(inputs, needs, strict=True)
            ]
            out = function(*again)
        wanted = [value for value, needed in zip(again, needs, strict=True) if needed]
        found = iter(torch.autograd.grad(out, wanted, grad))
        return tuple(next(found) if needed else None for needed in needs)

    backward.__name__ = f"{function.__name__}_backward"
    forward_region, backward_region = _region(function), _region(backward)

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
            tensors = tuple(isinstance(value, torch.Tensor) for value in inputs)
            ctx.is_saved = tuple(
                is_tensor and not (linear and needed)
                for is_tensor, needed in zip(tensors, ctx.needs_input_grad, strict=True)
            )
            ctx.save_for_backward(*(value for value, saved in zip(inputs, ctx.is_saved, strict=True) if saved))
            ctx.inputs = tuple(
                _Form(value.shape, value.dtype, value.device) if is_tensor else value
                for value, is_tensor in zip(inputs, tensors, strict=True)
            )
            with _fusing():
                out: torch.Tensor = forward_region(*inputs)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            saved = iter(ctx.saved_tensors)
            pairs = zip(ctx.inputs, ctx.is_saved, strict=True)
            inputs = tuple(
                next(saved) if is_saved else value.one_number() if isinstance(value, _Form) else value
                for value, is_saved in pairs
            )
            with _fusing():
                result: tuple[Any, ...] = backward_region(grads[0], inputs, ctx.needs_input_grad)
            return result

    @functools.wraps(function)
    def call(*args: Any) -> torch.Tensor:
        if not always and not any(recorder.fuse for recorder in megatron_shims.recorders()):
            return function(*args)
        return Fused.apply(*args)  # type: ignore[no-untyped-call,no-any-return]

    return call
