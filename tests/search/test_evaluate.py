"""The real evaluator: traces by the real framework, bounds that hold, artefacts that travel."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_explore.search.enumerate import BoundTable
from echo_explore.search.evaluate import SharedModels, SimulatorEvaluator, SimulatorFactory
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import PARTS_OF_COMPUTE
from echo_explore.search.run import SearchOptions, run_search
from echo_explore.search.space import ResolvedSpace, enumerate_points
from tests.search.support import resolved, write_space
from tests.shared_service import SharedService, lend

pytestmark = pytest.mark.torch

# Small enough to be quick, and every part of the step occurs: tensor, data and pipeline traffic, interleaving.
SPACE = """
schema = 1
model = "gpt-22b"
cluster = "h800-ndr"
[cluster_size]
num_gpus = 32
[recipe]
sequence_length = 2048
global_batch_size = 32
[search]
tensor_parallel = [8]
pipeline_parallel = [1, 2, 4]
virtual_pipeline = [1, 2, 3]
micro_batch_size = [1, 2]
recompute = ["selective"]
sequence_parallel = [true]
"""


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> ResolvedSpace:
    return resolved(write_space(tmp_path_factory.mktemp("space"), SPACE, "tiny"))


@pytest.fixture(scope="module")
def factory(space: ResolvedSpace) -> SimulatorFactory:
    return SimulatorFactory(space=space)


@pytest.fixture(scope="module")
def evaluator(factory: SimulatorFactory, service: SharedService) -> Iterator[SimulatorEvaluator]:
    with pytest.MonkeyPatch.context() as patch:
        lend(service, patch)
        made = factory.build(factory.shared())
        assert isinstance(made, SimulatorEvaluator)
        yield made
        made.close()


@pytest.fixture(scope="module")
def points(space: ResolvedSpace) -> tuple[SearchPoint, ...]:
    return enumerate_points(space)


def test_bounds_never_exceed_evaluations(
    space: ResolvedSpace, evaluator: SimulatorEvaluator, points: tuple[SearchPoint, ...]
) -> None:
    bounds = BoundTable(evaluator, space.objectives, space.cluster)
    for point in points:
        outcome, bound = evaluator.evaluate(point), evaluator.lower_bounds(point)
        assert 0 < bound.step_time_s <= outcome.step_time_s * (1 + 1e-9), point.label()
        assert 0 < bound.peak_memory_bytes <= outcome.peak_memory_bytes * (1 + 1e-9), point.label()
        assert bounds(point).values == (bound.step_time_s,)
        parts = sum(value for name, value in outcome.breakdown.items() if name not in PARTS_OF_COMPUTE)
        assert parts == pytest.approx(outcome.step_time_s)
        assert sum(outcome.memory.values()) == pytest.approx(outcome.peak_memory_bytes)


def test_same_outcome_in_another_evaluator_with_the_shared_models(
    factory: SimulatorFactory, evaluator: SimulatorEvaluator, points: tuple[SearchPoint, ...]
) -> None:
    shared = factory.shared()
    assert isinstance(shared, SharedModels)
    other = factory.build(shared)
    assert [other.evaluate(point) for point in points[:3]] == [evaluator.evaluate(point) for point in points[:3]]
    other.close()


def test_a_trace_travels(
    factory: SimulatorFactory,
    evaluator: SimulatorEvaluator,
    points: tuple[SearchPoint, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = evaluator.trace_request(points[0])
    evaluator.make_trace(request)
    artefact = evaluator.load_trace(request)
    assert artefact is not None
    monkeypatch.setenv("ECHO_EXPLORE_HOME", str(tmp_path / "other-node"))
    monkeypatch.setattr("echo_explore.tracing.cache.TraceService", None)  # nothing is traced there
    elsewhere = factory.build(factory.shared())
    assert elsewhere.load_trace(request) is None
    elsewhere.store_trace(request, artefact)
    assert elsewhere.evaluate(points[0]) == evaluator.evaluate(points[0])


def test_a_whole_search_without_ray(tmp_path: Path, evaluator: SimulatorEvaluator) -> None:
    path = write_space(tmp_path, SPACE, "tiny")
    with open(os.devnull, "w") as nowhere:
        result = run_search(SearchOptions(space=str(path), address="none"), stream=nowhere)
    assert result.certified
    best = result.best[0]
    assert best.outcome == evaluator.evaluate(best.point)
    assert result.timeline is not None
    assert json.loads(result.timeline.read_text())["traceEvents"]
    assert result.header["identity"].keys() == {"calibration", "interference", "tracer", "torch", "megatron_core"}
