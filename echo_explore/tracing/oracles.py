"""Values and sizes that only a GPU knows: what is assumed where, and what to say where nothing is.

A trace lists every value that was assumed. A place that is not listed here, nor by the script (`ECHO_ORACLES`), stops
the trace with its line.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from echo_explore.core import TraceError
from echo_explore.tracing.source_lines import program_frame, raised_at

Value = bool | int | float


def _balanced_exchange(frame: FrameType) -> int:
    """Tokens that transformers' all-to-all sends to each rank of experts, and gets from each, if all get the same."""
    pairs, ranks = frame.f_locals["expert_ids"].numel(), frame.f_locals["ep_size"]
    return int(pairs // ranks)


KNOWN: Mapping[str, Value | Callable[[FrameType], Value]] = {
    # Norm of the gradients, from which the clipping factor follows: any number launches the same kernels.
    "megatron/core/optimizer/clip_grads.py": 1.0,
    # Gradients are finite: the update is made.
    "megatron/core/optimizer/optimizer.py": 0.0,
    "megatron/core/optimizer/grad_scaler.py": 0.0,
    "torch/amp/grad_scaler.py": 0.0,
    # No token is padded: masks are all ones.
    "transformers/masking_utils.py": 1,
    "transformers/distributed/expert_parallel.py": _balanced_exchange,
    # What stages send each other once, to set up their connections.
    "torch/distributed/pipelining/schedules.py": 1,
    # Step counters of optimizers that are not fused.
    "torch/optim/": 1.0,
    # Total norm of DTensors and of lists of gradients.
    "torch/nn/utils/clip_grad.py": 1.0,
}
"""Ending of a file's path (a folder ends in /), and the value that it reads, or a function of its frame."""
ASK = "ECHO_ORACLES"
"""The dict of a script: `file.py:function` or `file.py:line`, and the value (of `nonzero`: the number of rows)."""


def _rows(count: int, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty((count, tensor.dim()), dtype=torch.int64, device=tensor.device)


def _elements(count: int, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty((count,), dtype=tensor.dtype, device=tensor.device)


def _chosen(count: int, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any) -> torch.Tensor:
    """Of `x[mask]`: the dimensions of the mask become one."""
    (mask,) = (index for index in indices if index is not None)
    before = next(i for i, index in enumerate(indices) if index is not None)
    shape = (*tensor.shape[:before], count, *tensor.shape[before + mask.dim() :])
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def _distinct(count: int, tensor: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Of `unique`: values, where each element went, and how many went there."""
    place = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device)
    counts = torch.empty((count,), dtype=torch.int64, device=tensor.device)
    return _elements(count, tensor), place, counts


FINDERS: Mapping[str, Callable[..., Any]] = {
    "aten.nonzero": _rows, "aten.masked_select": _elements, "aten.index": _chosen, "aten._unique2": _distinct,
}  # fmt: skip
"""Operators whose result has as many elements as the data says, and their result of a number of elements."""


class Oracles:
    """What is assumed of values that only a GPU knows.

    Attributes:
        own: those of the script, by `file.py:function` or `file.py:line`; None where a framework runs alone.
    """

    def __init__(self, own: Mapping[str, Value] | None = None) -> None:
        self.own = dict(own or {})
        self._of_script = own is not None

    def value(self, what: str, dtype: torch.dtype) -> Value:
        """The value that the program reads now.

        Raises:
            TraceError: nothing is known of this place.
        """
        found = self._own_value()
        if found is None:
            found = _known_value(sys._getframe(1))
        if found is None:
            raise self.unknown(what)
        if dtype == torch.bool:
            return bool(found)
        return float(found) if dtype.is_floating_point else int(found)

    def size(self, what: str) -> int:
        """The number of elements that an operator finds now.

        Raises:
            TraceError: the script does not say.
        """
        found = self._own_value()
        if found is None:
            raise self.unknown(what)
        return int(found)

    def unknown(self, what: str) -> TraceError:
        """The error of a place of which nothing is known."""
        frame = program_frame()
        if frame is None:
            return TraceError(f"{what} = (unknown): its result is known to a GPU only; fix: report this")
        name, line, function = frame
        rule = f"{what} at {name}:{line} = (unknown): its result is known to a GPU only, and no oracle says it"
        own = f'{ASK} = {{"{name}:{function}": VALUE}}'
        if not self._of_script:
            return TraceError(
                f"{rule}; fix: add the place to `KNOWN` in tracing/oracles.py, or trace a script with {own}"
            )
        return TraceError(f"{rule}; fix: add {own} to the script")

    def without_size(self, what: str) -> TraceError:
        """The error of an operator whose result has a size that the data says, and that no oracle can be given for."""
        frame = program_frame()
        place = "" if frame is None else f" at {frame[0]}:{frame[1]}"
        known = ", ".join(FINDERS)
        return TraceError(
            f"{what}{place} = (unknown): the size of its result is known to a GPU only, and oracles are for {known}; "
            "fix: choose by a mask and one of these, or keep the size and multiply by the mask"
        )

    def unknown_in(self, error: BaseException) -> TraceError:
        """The error of a value that the program read before its step, where no oracle is asked."""
        frame = raised_at(error)
        place = "" if frame is None else f" at {frame[0]}:{frame[1]}"
        return TraceError(
            f"{error}{place} = (unknown): its result is known to a GPU only, and the model is not made yet; "
            "fix: make it without that line in a script of your own (trace --script)"
        )

    def _own_value(self) -> Value | None:
        frame = program_frame() if self.own else None
        if frame is None:
            return None
        name, line, function = frame
        return self.own.get(f"{name}:{line}", self.own.get(f"{name}:{function}"))


def oracles_of(script: Any, where: str) -> Mapping[str, Value]:
    """`ECHO_ORACLES` of a script's module.

    Raises:
        TraceError: it is no dict of texts and numbers.
    """
    given = getattr(script, ASK, {})
    if not isinstance(given, dict) or not all(
        isinstance(key, str) and ":" in key and isinstance(value, int | float) for key, value in given.items()
    ):
        rule = f"{ASK} must be a dict of places and numbers"
        raise TraceError(f'{where}: {rule}; fix: write {ASK} = {{"file.py:function": VALUE}}')
    return given


def _known_value(frame: FrameType | None) -> Value | None:
    """Of the innermost frame that `KNOWN` lists, up to the program's own."""
    while frame is not None:
        file = frame.f_code.co_filename
        for place, value in KNOWN.items():
            if file.endswith(place) or (place.endswith("/") and f"/{place}" in file):
                return value(frame) if callable(value) else value
        frame = frame.f_back
    return None
