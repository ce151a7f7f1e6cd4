"""Micro-batch, chunk and phase of what `torch.distributed.pipelining` runs and sends.

Gradients of weights that are made apart are added up outside of autograd, and transfers run outside of every module:
only the stage knows what they belong to.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from echo_explore.graph import Collective, OpKind, Phase
from echo_explore.tracing.recorder import Recorder

_PASSES = {
    "forward_one_chunk": Phase.FORWARD,
    "backward_one_chunk": Phase.BACKWARD,
    "backward_weight_one_chunk": Phase.BACKWARD,
}
_TRANSFERS = {
    "get_fwd_recv_ops": Phase.FORWARD,
    "get_fwd_send_ops": Phase.FORWARD,
    "get_bwd_recv_ops": Phase.BACKWARD,
    "get_bwd_send_ops": Phase.BACKWARD,
}
_LAUNCH, _PLACE = "_batch_p2p", "echo_explore_place"


@contextlib.contextmanager
def pipelines_told(recorder: Recorder) -> Iterator[None]:
    """One step of a program: if it has pipeline stages, the recorder learns what they run."""
    stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None:
        yield
        return
    kind: Any = stages._PipelineStageBase
    schedules: Any = sys.modules["torch.distributed.pipelining.schedules"]
    real = {name: getattr(kind, name) for name in (*_PASSES, *_TRANSFERS)}
    batch, first = getattr(schedules, _LAUNCH), len(recorder.rows)

    def run(name: str, stage: Any, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        with _at(recorder, (_PASSES[name], micro_batch, stage.stage_index // stage.group_size)):
            return real[name](stage, micro_batch, *args, **kwargs)

    def transfers(name: str, stage: Any, micro_batch: int) -> Any:
        found = real[name](stage, micro_batch)
        for transfer in found:
            setattr(transfer, _PLACE, (_TRANSFERS[name], micro_batch, stage.stage_index // stage.group_size))
        return found

    def launch(found: list[Any], desc: str | None = None) -> Any:
        if not all(hasattr(transfer, _PLACE) for transfer in found):
            return batch(found, desc)
        works = []
        for transfer in found:
            with _at(recorder, getattr(transfer, _PLACE)):
                works += batch([transfer])
        return works

    for names, instead in ((_PASSES, run), (_TRANSFERS, transfers)):
        for name in names:
            setattr(kind, name, functools.partialmethod(_called, functools.partial(instead, name)))
    setattr(schedules, _LAUNCH, launch)
    try:
        yield
    finally:
        setattr(schedules, _LAUNCH, batch)
        for name, method in real.items():
            setattr(kind, name, method)
    _place_waits(recorder, first)


def _called(stage: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(stage, *args, **kwargs)


@contextlib.contextmanager
def _at(recorder: Recorder, place: tuple[Phase, int, int]) -> Iterator[None]:
    before = recorder.phase, recorder.micro_batch, recorder.chunk
    recorder.phase, recorder.micro_batch, recorder.chunk = place
    try:
        yield
        recorder.flush()
    finally:
        recorder.phase, recorder.micro_batch, recorder.chunk = before


def _place_waits(recorder: Recorder, first: int) -> None:
    """A wait for a transfer belongs to the pass that the transfer is for."""
    for row in recorder.rows[first:]:
        if row.kind is OpKind.WAIT:
            awaited = recorder.rows[row.awaits]
            if awaited.collective in (Collective.SEND, Collective.RECV):
                row.phase, row.micro_batch, row.chunk = awaited.phase, awaited.micro_batch, awaited.chunk
