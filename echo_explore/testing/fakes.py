"""Stand-ins for tests: fast, deterministic, and able to fail in the ways that real parts fail.

They live in the package because Ray workers must be able to import them.
"""

import errno
import hashlib
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from echo_explore.core import SpecError
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Bounds, Outcome
from echo_explore.search.space import ResolvedSpace
from echo_explore.specs.recompute import KINDS
from echo_explore.tracing.request import TraceRequest, request_of

_RECOMPUTE_TIME = {"none": 1.0, "selective": 1.03, "full": 1.33}
_RECOMPUTE_MEMORY = {"none": 34.0, "selective": 17.0, "full": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How a fake evaluator misbehaves on points, given by their keys.

    Attributes:
        raise_on: raises an error.
        exit_on: kills its process.
        hang_on: never comes back.
        fatal: raises what is wrong with the whole search, on every point.
        no_space_on: cannot write to its disk.
        once_folder: with it, a point misbehaves only the first time, remembered by a file there.
        slow_s: every evaluation sleeps that long.
        log: file to which every evaluation appends its point's key.
    """

    raise_on: frozenset[str] = frozenset()
    exit_on: frozenset[str] = frozenset()
    hang_on: frozenset[str] = frozenset()
    no_space_on: frozenset[str] = frozenset()
    fatal: bool = False
    once_folder: str = ""
    slow_s: float = 0.0
    log: str = ""

    def apply(self, key: str) -> None:
        """Misbehave as asked for this point."""
        if self.log:
            handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(handle, f"{key}\n".encode())
            os.close(handle)
        if self.fatal:
            raise SpecError("fake", 1, "is wrong", "correct it")
        if self.slow_s:
            time.sleep(self.slow_s)
        if key not in self.raise_on | self.exit_on | self.hang_on | self.no_space_on or self._already(key):
            return
        if key in self.exit_on:
            os._exit(77)
        while key in self.hang_on:
            time.sleep(3600.0)
        if key in self.no_space_on:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ZeroDivisionError(f"fake crash of {key}")

    def _already(self, key: str) -> bool:
        if not self.once_folder:
            return False
        try:
            os.close(os.open(Path(self.once_folder, key), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEvaluator:
    """An analytic step time and memory with the shape of the real ones: bubble, tensor and data traffic, recomputation.

    Attributes:
        cache: folder that stands for the trace cache of a machine; empty: traces are not kept.
        cache_by_process: every process has a cache of its own in there, as machines do that share no file system.
    """

    space: ResolvedSpace
    faults: Faults = field(default_factory=Faults)
    cache: str = ""
    cache_by_process: bool = False

    def evaluate(self, point: SearchPoint) -> Outcome:
        """The analytic outcome, after misbehaving as asked."""
        self.faults.apply(point.key)
        self.make_trace(self.trace_request(point))
        compute_s, bubble_s = self._compute_s(point), self._bubble_s(point)
        parts = {"compute_s": compute_s, "bubble_s": bubble_s, "tensor_s": self._tensor_s(point)}
        parts["data_s"] = 0.08 * (1.0 - 1.0 / point.data_parallel)
        parts["host_s"] = 0.01 * point.pipeline_parallel * point.virtual_pipeline / 8 + _noise(point.key)
        step_time_s = sum(parts.values())
        tokens = self.space.space.recipe.global_batch_size * self.space.space.recipe.sequence_length
        peak = max(self.space.cluster.device.peak_flop_per_s.values())
        mfu = self._flop() / (step_time_s * point.num_gpus * peak)
        return Outcome(
            step_time_s=step_time_s,
            step_time_low_s=step_time_s * 0.9,
            step_time_high_s=step_time_s * 1.1,
            mfu=mfu,
            mfu_causal=mfu * 0.98,
            hfu=mfu * _RECOMPUTE_TIME[point.recompute],
            tokens_per_s=tokens / step_time_s,
            peak_memory_bytes=self._memory_bytes(point) * 1.1,
            memory_capacity_bytes=self.space.cluster.device.memory_bytes,
            breakdown=parts,
            memory={"activation_bytes": self._memory_bytes(point)},
        )

    def lower_bounds(self, point: SearchPoint) -> Bounds:
        """Compute and bubble alone; memory without its last tenth."""
        return Bounds(
            step_time_s=self._compute_s(point) + self._bubble_s(point),
            peak_memory_bytes=self._memory_bytes(point),
            memory_capacity_bytes=self.space.cluster.device.memory_bytes,
        )

    def trace_request(self, point: SearchPoint) -> TraceRequest:
        """The request that the real program would make."""
        return request_of(self.space.candidate(point))

    def make_trace(self, request: TraceRequest) -> None:
        """Write a small file in the place of a trace, and note that it was made here."""
        if self.cache and self.load_trace(request) is None:
            self._path(request).write_text(f"made in {os.getpid()}")
            self._path(request, ".made").touch()

    def load_trace(self, request: TraceRequest) -> bytes | None:
        """The file's bytes."""
        try:
            return self._path(request).read_bytes() if self.cache else None
        except FileNotFoundError:
            return None

    def store_trace(self, request: TraceRequest, artefact: bytes) -> None:
        """Write it, and note that it came from elsewhere."""
        if self.cache:
            self._path(request).write_bytes(artefact)
            self._path(request, ".came").touch()

    def _path(self, request: TraceRequest, suffix: str = "") -> Path:
        folder = Path(self.cache, str(os.getpid())) if self.cache_by_process else Path(self.cache)
        folder.mkdir(exist_ok=True)
        return folder / f"{request.key({})}{suffix}"

    def write_timeline(self, point: SearchPoint, path: Path) -> None:
        """An empty Chrome trace."""
        path.write_text('{"traceEvents": []}\n')

    def close(self) -> None:
        """Nothing to end."""

    def _flop(self) -> float:
        model, recipe = self.space.model, self.space.space.recipe
        return 72.0 * recipe.global_batch_size * recipe.sequence_length * model.num_layers * model.hidden_size**2

    def _compute_s(self, point: SearchPoint) -> float:
        rate = max(self.space.cluster.device.peak_flop_per_s.values()) * point.num_gpus
        grain = self.space.model.hidden_size * point.micro_batch_size / point.tensor_parallel
        efficiency = 0.7 * grain / (grain + 800.0)
        return self._flop() * _RECOMPUTE_TIME[point.recompute] / (rate * efficiency)

    def _bubble_s(self, point: SearchPoint) -> float:
        unit = point.micro_batch_size * point.data_parallel
        num_micro_batches = self.space.space.recipe.global_batch_size // unit
        share = (point.pipeline_parallel - 1) / (point.virtual_pipeline * num_micro_batches)
        return self._compute_s(point) * share

    def _tensor_s(self, point: SearchPoint) -> float:
        per_rank = 1.0 - 1.0 / point.tensor_parallel
        hidden = 0.9 if point.sequence_parallel else 1.0
        far = 8.0 if point.tensor_parallel > self.space.cluster.node.num_gpus else 1.0
        return 0.12 * self._compute_s(point) * per_rank * hidden * far * math.sqrt(point.tensor_parallel / 2)

    def _memory_bytes(self, point: SearchPoint) -> float:
        model, recipe = self.space.model, self.space.space.recipe
        parameters = 12.0 * model.num_layers * model.hidden_size**2 / (point.tensor_parallel * point.pipeline_parallel)
        state = parameters * (6.0 + 12.0 / point.data_parallel)
        per_layer = recipe.sequence_length * point.micro_batch_size * model.hidden_size
        split = point.tensor_parallel if point.sequence_parallel else math.sqrt(point.tensor_parallel)
        live_layers = model.num_layers * (1.0 + (point.virtual_pipeline > 1) * 0.5)
        return state + per_layer * _RECOMPUTE_MEMORY[point.recompute] * live_layers / split


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFactory:
    """Makes fake evaluators; picklable, so that Ray actors can build theirs."""

    space: ResolvedSpace
    faults: Faults = field(default_factory=Faults)
    cache: str = ""
    cache_by_process: bool = False
    calibration: str = "fake"

    def identity(self) -> dict[str, str]:
        """The name of the fake calibration."""
        return {"calibration": self.calibration}

    def shared(self) -> object:
        """Something that stands for the models."""
        return KINDS

    def build(self, shared: object) -> FakeEvaluator:
        """The fake evaluator."""
        assert shared == KINDS
        return FakeEvaluator(
            space=self.space, faults=self.faults, cache=self.cache, cache_by_process=self.cache_by_process
        )


def _noise(key: str) -> float:
    """Up to 20 ms, the same for a key everywhere."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32 * 0.02
