"""One tracing process for many tests: it takes 8 s of a CPU to start, and is made to serve many requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from echo_explore.graph import RankTrace, Trace
from echo_explore.tracing import TraceRequest, TraceService
from echo_explore.tracing.rank_request import RankRequest
from echo_explore.tracing.transformers_request import TransformersJob

EXAMPLES = Path(__file__).parents[1] / "examples"


class SharedService(TraceService):
    """Makes the trace of a request once for all tests (traces cannot be changed); `close` leaves it running."""

    def __init__(self) -> None:
        super().__init__()
        self._traces: dict[str, Trace] = {}
        self._ranks: dict[str, RankTrace] = {}
        self._examples: dict[tuple[Path, str, int, int], RankTrace] = {}

    def trace(self, request: TraceRequest, path: Path | None = None) -> Trace:
        """The trace of a request; made anew where a file of it is wanted."""
        if path is not None:
            return super().trace(request, path)
        key = _text(request.to_json())
        if key not in self._traces:
            self._traces[key] = super().trace(request)
        return self._traces[key]

    def rank_step_request(self, request: RankRequest) -> RankTrace:
        """The step of a rank."""
        key = _text(request.to_json())
        if key not in self._ranks:
            self._ranks[key] = super().rank_step_request(request)
        return self._ranks[key]

    def script_step(self, script: Path, function: str, *, world_size: int, rank: int) -> RankTrace:
        """The step of a script; once for those that are shipped."""
        if script.parent != EXAMPLES:
            return super().script_step(script, function, world_size=world_size, rank=rank)
        key = script, function, world_size, rank
        if key not in self._examples:
            self._examples[key] = super().script_step(script, function, world_size=world_size, rank=rank)
        return self._examples[key]

    def transformers_step(self, job: TransformersJob, rank: int = 0) -> RankTrace:
        """The step of a model of transformers."""
        key = _text({"job": job.to_json(), "rank": rank})
        if key not in self._ranks:
            self._ranks[key] = super().transformers_step(job, rank)
        return self._ranks[key]

    def close(self) -> None:
        """Nothing: others use it."""

    def end(self) -> None:
        """End the tracing process."""
        super().close()


def lend(service: SharedService, patch: pytest.MonkeyPatch) -> None:
    """Commands and tracers that would start a tracing process of their own use this one."""
    for module in ("echo_explore.tracing", "echo_explore.tracing.cache"):
        patch.setattr(f"{module}.TraceService", lambda: service)


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)
