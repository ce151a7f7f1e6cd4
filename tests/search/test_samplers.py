"""Samplers: legal points only, each once, the same for the same seed, and near the best within the figure promised."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from echo_explore.core import SpecError
from echo_explore.search.encoding import Encoding
from echo_explore.search.enumerate import BoundedPoint, BoundTable
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Outcome, TrialRecord
from echo_explore.search.space import enumerate_points
from echo_explore.search.study import SAMPLERS, OptunaProposer
from echo_explore.testing.fakes import FakeEvaluator
from tests.search.support import MAIN_SPACE, SMALL, fake_search, ledger_lines, resolved, write_space

Bounds = Callable[[SearchPoint], BoundedPoint]


def _record(trial: int, point: SearchPoint, outcome: Outcome) -> TrialRecord:
    return TrialRecord(
        trial=trial,
        point=point,
        state="evaluated",
        values=(outcome.step_time_s,),
        memory_overshoot=outcome.memory_overshoot,
        outcome=outcome,
    )


def _run(
    points: Sequence[SearchPoint], bounds: Bounds, evaluator: FakeEvaluator, *, sampler: str, seed: int, num_trials: int
) -> list[TrialRecord]:
    """Trials of a sampler with a window of 8, as the driver runs them."""
    proposer = OptunaProposer(points, bounds, sampler=sampler, seed=seed, num_objectives=1)
    records: list[TrialRecord] = []
    for trial in range(num_trials):
        if trial >= 8:
            proposer.tell(records[trial - 8])
        point = proposer.propose(trial)
        if point is None:
            break
        records.append(_record(trial, point, evaluator.evaluate(point)))
    return records


def _weak(bounds: Bounds) -> Bounds:
    """Half the time and 0.6 of the memory: bounds as loose as those of the simulator."""

    def weak(point: SearchPoint) -> BoundedPoint:
        known = bounds(point)
        overshoot = (known.memory_overshoot + 1.0) * 0.6 - 1.0
        return replace(known, values=(known.values[0] * 0.5,), memory_overshoot=overshoot)

    return weak


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_each_legal_point_once_until_none_is_open(tmp_path: Path, sampler: str) -> None:
    space = resolved(write_space(tmp_path))
    points, evaluator = enumerate_points(space), FakeEvaluator(space=space)
    bounds = BoundTable(evaluator, space.objectives, space.cluster)
    records = _run(points, bounds, evaluator, sampler=sampler, seed=3, num_trials=1000)
    tried = [record.point for record in records]
    assert len(set(tried)) == len(tried)
    assert set(tried) <= set(points)
    best = min(record.values for record in records if record.feasible)
    for point in set(points) - set(tried):
        assert bounds(point).memory_overshoot > 0 or bounds(point).values > best
    again = _run(points, bounds, evaluator, sampler=sampler, seed=3, num_trials=1000)
    assert again == records
    assert _run(points, bounds, evaluator, sampler=sampler, seed=4, num_trials=12) != records[:12]


@pytest.mark.parametrize("sampler", ["nsga2", "tpe"])
def test_two_objectives(tmp_path: Path, sampler: str) -> None:
    path = write_space(tmp_path, SMALL.replace("num_gpus = 96", "num_gpus = [96, 192]"))
    by_sampler = fake_search(path, study=f"two-{sampler}", sampler=sampler, objective="step_time,energy", trials=500)
    by_order = fake_search(path, study=f"two-{sampler}-all", sampler="enumerate", objective="step_time,energy")
    assert [record.values for record in by_sampler.best] == [record.values for record in by_order.best]
    assert by_sampler.certified
    assert len(by_sampler.best) >= 1
    assert ledger_lines(by_sampler) != ledger_lines(by_order)


@pytest.mark.slow
def test_tpe_is_within_one_per_cent_of_the_best_in_300_trials() -> None:
    space = resolved(MAIN_SPACE)
    points, evaluator = enumerate_points(space), FakeEvaluator(space=space)
    bounds = _weak(BoundTable(evaluator, space.objectives, space.cluster))
    outcomes = [evaluator.evaluate(point) for point in points]
    best = min(outcome.step_time_s for outcome in outcomes if outcome.fits)
    ratios = []
    for seed in range(5):
        records = _run(points, bounds, evaluator, sampler="tpe", seed=seed, num_trials=300)
        ratios.append(min(record.values[0] for record in records if record.feasible) / best)
    assert statistics.median(ratios) <= 1.01, ratios


def test_nearest_open_point() -> None:
    points = enumerate_points(resolved(MAIN_SPACE))
    encoding = Encoding(points)
    assert {dimension.name for dimension in encoding.dimensions} == {
        "tensor_parallel",
        "pipeline_parallel",
        "virtual_pipeline",
        "micro_batch_size",
        "recompute",
        "sequence_parallel",
    }
    for index in (0, 17, 3143):
        assert encoding.nearest_open(encoding.code(index)) == index
        encoding.close(index)
        other = encoding.nearest_open(encoding.code(index))
        assert other is not None
        assert other != index
    assert encoding.num_open == 3141
    for index in range(len(points)):
        encoding.close(index)
    assert encoding.nearest_open(encoding.code(0)) is None


def test_a_space_of_one_point(tmp_path: Path) -> None:
    text = (
        write_space(tmp_path)
        .read_text()
        .replace("[4, 8]", "[8]")
        .replace("[6, 12, 24]", "[12]")
        .replace("[1, 2]", "[1]")
        .replace('["selective", "full"]', '["full"]')
    )
    result = fake_search(write_space(tmp_path, text), sampler="tpe")
    assert result.counts.num_legal == result.counts.num_evaluated == 1
    assert result.certified


def test_unknown_sampler(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="sampler = 'grid': is not known; fix: use one of auto, enumerate, tpe"):
        fake_search(write_space(tmp_path), sampler="grid")
