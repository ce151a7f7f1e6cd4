"""Our legal points against megatron-core itself, asked in the tracing child."""

import random
from dataclasses import replace

import pytest

from echo_explore.core import SpecError
from echo_explore.search.point import SearchPoint
from echo_explore.search.space import ResolvedSpace, enumerate_points
from echo_explore.tracing import TraceService, request_of
from tests.search.support import MAIN_SPACE, resolved

pytestmark = pytest.mark.torch

SIZES = [pytest.param(8, id="some"), pytest.param(60, id="many", marks=pytest.mark.slow)]
STEPS: dict[str, tuple[int, ...]] = {
    "num_gpus": (1, 7, 32, 64, 80, 90, 97, 120, 144, 192, 256),
    "tensor_parallel": (2, 3, 4, 5, 6, 8, 12, 16, 32),
    "pipeline_parallel": (1, 2, 4, 5, 7, 9, 10, 12, 18, 24, 36, 48, 96),
    "virtual_pipeline": (2, 3, 4, 5, 7, 8, 12, 16),
    "micro_batch_size": (2, 3, 4, 5, 6, 8, 16, 64),
}
"""Values that one choice of a legal point is changed to."""


@pytest.fixture(scope="module")
def space() -> ResolvedSpace:
    return resolved(MAIN_SPACE)


def _ask(service: TraceService, space: ResolvedSpace, point: SearchPoint, legal: SearchPoint) -> str:
    """What megatron-core says of `point`, a neighbour of the legal one."""
    request = replace(
        request_of(space.candidate(legal)),
        tensor_parallel=point.tensor_parallel,
        sequence_parallel=point.sequence_parallel,
        micro_batch_size=point.micro_batch_size,
        recompute=point.recompute,
    )
    layout = {"tp": point.tensor_parallel, "pp": point.pipeline_parallel, "vpp": point.virtual_pipeline}
    batch = space.space.recipe.global_batch_size
    return service.check_layout(request, layout, global_batch_size=batch, num_gpus=point.num_gpus)


@pytest.mark.parametrize("count", SIZES)
def test_legal_points_are_accepted(service: TraceService, space: ResolvedSpace, count: int) -> None:
    points = random.Random(20261130).sample(enumerate_points(space), count)
    assert {point.label(): _ask(service, space, point, point) for point in points} == {p.label(): "ok" for p in points}


@pytest.mark.parametrize("count", SIZES)
def test_illegal_neighbours_are_refused(service: TraceService, space: ResolvedSpace, count: int) -> None:
    generator = random.Random(20261201)
    points = enumerate_points(space)
    asked: dict[str, str] = {}
    while len(asked) < count:
        legal = generator.choice(points)
        axis = generator.choice(list(STEPS))
        point = replace(legal, **{axis: generator.choice(STEPS[axis])})  # type: ignore[arg-type]
        try:
            space.candidate(point)
        except SpecError:
            asked[point.label()] = _ask(service, space, point, legal)
    assert {label: said for label, said in asked.items() if said == "ok"} == {}
