"""Megatron's checkpoints that give their output back: what they free, run again and copy, as a recorder sees it.

megatron-core 0.16.1, tensor_parallel/random.py, CheckpointWithoutOutput: the output of a part is freed once the next
part has used it; in the backward the part runs again, and its result is copied into the storage of the output, of which
the next part kept a reference.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from echo_explore.tracing.recorder import Recorder

Recorders = Callable[[], tuple[Recorder, ...]]
"""Who is told: the recorder of the trace that runs, none outside of one."""


def install(recorders: Recorders) -> None:
    """Let Megatron's checkpoints tell the recorder what they do; their own code runs."""
    from megatron.core.tensor_parallel import random

    cls = random.CheckpointWithoutOutput
    begin, checkpoint = cls.__init__, cls.checkpoint
    recompute, discard = cls._recompute, cls.discard_output_and_register_recompute

    def without_engine(self: Any, fp8: Any = None) -> None:
        begin(self, fp8=None)  # no state of Transformer Engine to keep: the recorder narrows what it records

    def note_home(self: Any, function: Any, *args: Any) -> Any:
        self.home = next((recorder.home for recorder in recorders()), None)
        return checkpoint(self, function, *args)

    def free(self: Any, hook_tensor: torch.Tensor) -> None:
        outputs = self.outputs
        discard(self, hook_tensor)
        for recorder in recorders():
            recorder.forget(outputs)

    def run_again(self: Any, gradient: Any) -> None:
        context, outputs = self.ctx, self.outputs
        active = recorders()
        if context is None or not active:
            recompute(self, gradient)
            return
        with active[0].inside(self.home):
            recompute(self, gradient)
            with torch.no_grad():
                for output, again in zip(outputs, context.outputs, strict=True):
                    output.data.copy_(again.data)  # what upstream does to storages, which no dispatch mode sees

    cls.__init__, cls.checkpoint = without_engine, note_home
    cls._recompute, cls.discard_output_and_register_recompute = run_again, free
    for function in (random.CheckpointFunction, random.CheckpointWithoutOutputFunction):
        function.forward = staticmethod(_at_home(function.forward, recorders))


def _at_home(forward: Any, recorders: Recorders) -> Any:
    """A checkpoint's forward that runs its part, now and again, in the module that it is a part of."""

    @functools.wraps(forward)
    def run(context: Any, function: Any, *args: Any) -> Any:
        active = recorders()
        if not active:
            return forward(context, function, *args)
        recorder = active[0]
        home = recorder.home

        def part(*inputs: Any) -> Any:
            with recorder.inside(home):
                return function(*inputs)

        with recorder.checkpointed():
            return forward(context, part, *args)

    return run
