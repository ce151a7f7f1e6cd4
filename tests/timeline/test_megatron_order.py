"""The order of every stage equals what megatron-core's own schedule functions do when they run."""

import importlib.util

import pytest

from echo_explore.timeline import schedule_order
from echo_explore.tracing import TraceService

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs the extra `trace`"),
]

SHAPES = [(1, 1, 3), (2, 1, 1), (4, 1, 2), (4, 1, 9), (2, 2, 2), (2, 2, 6), (3, 2, 6), (4, 2, 8), (4, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_order(service: TraceService, shape: tuple[int, int, int]) -> None:
    for rank in range(shape[0]):
        assert [tuple(block) for block in service.schedule_order(*shape, rank)] == schedule_order(*shape, rank)
