"""Runs Megatron's own schedule functions and tells the recorder which micro-batch and chunk run."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from echo_explore.graph import Phase
from echo_explore.tracing.recorder import Recorder
from echo_explore.tracing.request import TraceRequest
from echo_explore.tracing.storages import Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One forward or backward of a micro-batch of a chunk: rows [first_row, last_row).

    Attributes:
        live_bytes_before: alive at its start.
        kept: alive at its end of what was made inside.
    """

    backward: bool
    micro_batch: int
    chunk: int
    first_row: int
    last_row: int
    live_bytes_before: int
    kept: Kept


class Batches:
    """Forward step functions as in Megatron-LM's pretrain_gpt.py, on token ids that are already on the GPU."""

    def __init__(self, request: TraceRequest) -> None:
        # Megatron-LM 0.16, get_batch_on_this_cp_rank: two of 2 cp chunks; where a batch is cut launches nothing here.
        batch, sequence = request.micro_batch_size, request.sequence_length // request.context_parallel
        self._tokens = torch.zeros(batch, sequence, dtype=torch.int64, device="cuda")
        self._positions = self._tokens.clone()
        self._loss_mask = torch.ones(batch, sequence, dtype=torch.float32, device="cuda")
        self.inputs = (self._tokens, self._positions)
        self._mask = None
        if request.attention == "unfused":
            self._mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device="cuda")

    def step(self, iterator: Any, model: Any) -> Any:
        """Output of the model, and the function that reduces it to a loss."""
        output = model(self._tokens, self._positions, self._mask, labels=self._tokens)
        return output, functools.partial(_loss, self._loss_mask)


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron-LM 0.16, pretrain_gpt.py, loss_func (without the check for NaN)."""
    losses = output.view(-1).float()
    flat = mask.view(-1).float()
    loss = torch.sum(losses * flat)
    num_tokens = flat.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


@contextlib.contextmanager
def spans(recorder: Recorder, models: list[Any]) -> Iterator[list[Span]]:
    """Watch Megatron's forward_step and backward_step; yields the spans so far, in order."""
    from megatron.core.pipeline_parallel import schedules

    found: list[Span] = []
    origin: dict[int, tuple[int, int]] = {}
    kept: list[Any] = []
    chunk_of = {id(model): number for number, model in enumerate(models)}
    counts = [0] * len(models)
    real_forward, real_backward = schedules.forward_step, schedules.backward_step

    def run(function: Any, backward: bool, micro_batch: int, chunk: int, args: Any, kwargs: Any) -> Any:
        recorder.flush()
        recorder.phase = Phase.BACKWARD if backward else Phase.FORWARD
        recorder.micro_batch, recorder.chunk = micro_batch, chunk
        row, live = len(recorder.rows), recorder.storages.live_bytes
        recorder.since_row = row
        result = function(*args, **kwargs)
        recorder.flush()
        found.append(
            Span(
                backward=backward, micro_batch=micro_batch, chunk=chunk, first_row=row, last_row=len(recorder.rows),
                live_bytes_before=live, kept=recorder.storages.kept_since(row),
            )
        )  # fmt: skip
        recorder.micro_batch = -1
        return result

    def forward_step(step: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = chunk_of[id(model)]
        micro_batch = counts[chunk]
        counts[chunk] += 1
        result = run(real_forward, False, micro_batch, chunk, (step, iterator, model, *args), kwargs)
        output = result[0][0] if isinstance(result[0], list) else result[0]
        origin[id(output)] = (micro_batch, chunk)
        kept.append(output)  # the id stays its own
        return result

    def backward_step(input_tensor: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        first = output[0] if isinstance(output, list) else output
        micro_batch, chunk = origin.pop(id(first))
        kept[:] = [t for t in kept if t is not first]
        return run(real_backward, True, micro_batch, chunk, (input_tensor, output, *args), kwargs)

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    try:
        yield found
    finally:
        schedules.forward_step, schedules.backward_step = real_forward, real_backward
