"""The real evaluator: points become candidates, the simulator predicts them."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_explore.core import content_hash, write_atomic
from echo_explore.core.home import state_folder
from echo_explore.core.jit import kernel_cache_folder
from echo_explore.core.versions import GRAPH_SCHEMA, TRACER_VERSION
from echo_explore.graph import Trace
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Bounds, Evaluator, Outcome
from echo_explore.search.space import ResolvedSpace
from echo_explore.simulate import CollectiveModel, ComputeModel, Prediction, Simulator, default_simulator
from echo_explore.simulate.ports import InterferenceModel
from echo_explore.simulate.presets import DEFAULT_INTERFERENCE, calibration_facts
from echo_explore.tracing import CachedTracer, TraceRequest, request_of
from echo_explore.tracing.versions import framework_versions

_COMPILED: Final = "compiled"
"""File in the kernel cache that says that one process compiled for a whole evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedModels:
    """What all evaluators of a search have in common; loaded once, and shared over Ray's object store."""

    compute: ComputeModel
    collective: CollectiveModel
    interference: InterferenceModel
    calibration: dict[str, Any]


class _NoTracer:
    """Stands in where only the models of a Simulator are wanted."""

    def trace(self, request: TraceRequest) -> Trace:
        """Never called."""
        raise AssertionError("no trace is wanted here")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorFactory:
    """Makes evaluators around the simulator.

    Attributes:
        calibration: path of a calibration file whose coefficients replace the shipped ones.
        interference: name of the model of mutual slowdowns.
    """

    space: ResolvedSpace
    calibration: str | None = None
    interference: str = DEFAULT_INTERFERENCE

    def identity(self) -> dict[str, str]:
        """Hash of the calibration files, and the versions that a trace depends on."""
        versions = {name.replace("-", "_"): version for name, version in framework_versions().items()}
        tracer = f"{TRACER_VERSION}.{GRAPH_SCHEMA}"
        calibration = content_hash(calibration_facts(self._path(), self.interference))
        return {"calibration": calibration, "interference": self.interference, "tracer": tracer} | versions

    def shared(self) -> SharedModels:
        """The models of the simulator."""
        simulator = default_simulator(tracer=_NoTracer(), calibration=self._path(), interference=self.interference)
        return SharedModels(
            compute=simulator.compute,
            collective=simulator.collective,
            interference=simulator.interference,
            calibration=simulator.calibration,
        )

    def build(self, shared: object) -> Evaluator:
        """An evaluator with a tracer of its own; its trace child starts only for a trace that is not cached."""
        assert isinstance(shared, SharedModels)
        return SimulatorEvaluator(self.space, shared)

    def _path(self) -> Path | None:
        return Path(self.calibration).expanduser().resolve() if self.calibration else None


class SimulatorEvaluator:
    """Evaluates points of one space with the simulator."""

    def __init__(self, space: ResolvedSpace, models: SharedModels) -> None:
        self._space = space
        self._folder = state_folder("traces")
        self._tracer = CachedTracer(self._folder)
        self._simulator = Simulator(
            tracer=self._tracer,
            compute=models.compute,
            collective=models.collective,
            interference=models.interference,
            calibration=models.calibration,
        )
        self._is_compiled = False

    def evaluate(self, point: SearchPoint) -> Outcome:
        """The prediction of the point."""
        candidate = self._space.candidate(point)
        with self._compile_once():
            return _outcome(self._simulator.predict(candidate))

    def lower_bounds(self, point: SearchPoint) -> Bounds:
        """Closed forms of the simulator."""
        bounds = self._simulator.bounds(self._space.candidate(point))
        return Bounds(
            step_time_s=bounds.step_time_s,
            peak_memory_bytes=bounds.peak_memory_bytes,
            memory_capacity_bytes=self._space.cluster.device.memory_bytes,
        )

    def trace_request(self, point: SearchPoint) -> TraceRequest:
        """The trace of the point's candidate."""
        return request_of(self._space.candidate(point))

    def make_trace(self, request: TraceRequest) -> None:
        """Run the framework in the trace child, unless the trace is cached."""
        self._tracer.trace(request)

    def load_trace(self, request: TraceRequest) -> bytes | None:
        """The cached file; one that cannot be read is as good as none, for the tracer makes it anew."""
        try:
            return self._file(request).read_bytes()
        except OSError:
            return None

    def store_trace(self, request: TraceRequest, artefact: bytes) -> None:
        """Write the file as the tracer would."""
        write_atomic(self._file(request), artefact)

    def write_timeline(self, point: SearchPoint, path: Path) -> None:
        """Predict the point once more, recording its spans."""
        self._simulator.predict(self._space.candidate(point), timeline=path)

    def close(self) -> None:
        """End the trace child."""
        self._tracer.close()

    def _file(self, request: TraceRequest) -> Path:
        return self._folder / f"{request.key(framework_versions())}.npz"

    @contextlib.contextmanager
    def _compile_once(self) -> Iterator[None]:
        """On a machine where nothing is compiled yet, let one process compile while the others wait for its cache."""
        if self._is_compiled:
            yield
            return
        folder = kernel_cache_folder()
        if (folder / _COMPILED).exists():
            self._is_compiled = True
            yield
            return
        handle = os.open(folder / f"{_COMPILED}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
            (folder / _COMPILED).touch()
            self._is_compiled = True
        finally:
            os.close(handle)


def _outcome(prediction: Prediction) -> Outcome:
    fullest = max(prediction.memory, key=lambda row: row["total_bytes"])
    return Outcome(
        step_time_s=prediction.step_time_s,
        step_time_low_s=prediction.step_time_low_s,
        step_time_high_s=prediction.step_time_high_s,
        mfu=prediction.mfu,
        mfu_causal=prediction.mfu_causal,
        hfu=prediction.hfu,
        tokens_per_s=prediction.tokens_per_s,
        peak_memory_bytes=prediction.peak_memory_bytes,
        memory_capacity_bytes=prediction.memory_capacity_bytes,
        breakdown={name: float(value) for name, value in prediction.breakdown.items()},
        memory={name: float(value) for name, value in fullest.items() if name not in ("stage", "total_bytes")},
        warnings=prediction.warnings,
    )
