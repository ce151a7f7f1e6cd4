"""Which part of the step a user's program is in: in a backward, between one and its update, or in the update."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from echo_explore.graph import OpKind, Phase
from echo_explore.tracing.recorder import Recorder

_RUN = "_engine_run_backward"


class StepPhases:
    """Tells a recorder its phase; made anew for every step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._backward_ended: int | None = None

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """What autograd runs, and what it calls at its end: FSDP2's last reductions, DDP's waits."""
        recorder = self._recorder
        before, recorder.phase = recorder.phase, Phase.BACKWARD
        try:
            yield
        finally:
            recorder.flush()
            recorder.phase, self._backward_ended = before, len(recorder.rows)

    def update(self) -> None:
        """What has run since the last backward belongs to the update: clipping, unscaling, averages of weights."""
        if self._backward_ended is None:
            return
        self._recorder.flush()
        rows = self._recorder.rows
        waits = [row for row in rows if row.kind is OpKind.HOST_SYNC]
        for row in rows[self._backward_ended :]:
            if row.phase is Phase.FORWARD:
                row.phase = Phase.OPTIMIZER
        for row, told in zip(reversed(waits), reversed(self._recorder.host_syncs), strict=False):
            told["phase"] = row.phase.name


@contextlib.contextmanager
def phases_told(recorder: Recorder) -> Iterator[None]:
    """One step of a program: the recorder learns when a backward runs and when the optimizer does."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    phases = StepPhases(recorder)
    engine: Any = torch.autograd
    real = getattr(engine, _RUN)

    def run(*args: Any, **kwargs: Any) -> Any:
        with phases.backward():
            return real(*args, **kwargs)

    def enter(*_: Any) -> None:
        phases.update()
        recorder.phase = Phase.OPTIMIZER

    def leave(*_: Any) -> None:
        recorder.phase = Phase.FORWARD

    hooks = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    setattr(engine, _RUN, run)
    try:
        yield
        phases.update()
    finally:
        setattr(engine, _RUN, real)
        for hook in hooks:
            hook.remove()
