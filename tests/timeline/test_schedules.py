"""Schedules: well formed, free of deadlock, and equal to megatron-core's own order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.specs.schedules import num_warm_up_forwards
from echo_explore.timeline import schedule_order


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    p = draw(st.integers(1, 6))
    v = draw(st.integers(1, 4)) if p > 1 else 1
    m = draw(st.integers(1, 12)) if v == 1 else p * draw(st.integers(1, 4))
    return p, v, m


@given(shape=shapes())
def test_each_block_once_and_forward_first(shape: tuple[int, int, int]) -> None:
    p, v, m = shape
    for rank in range(p):
        order = schedule_order(p, v, m, rank)
        assert sorted(order) == sorted((f, i, c) for f in ("forward", "backward") for i in range(m) for c in range(v))
        at = {block: i for i, block in enumerate(order)}
        assert all(at["forward", i, c] < at["backward", i, c] for i in range(m) for c in range(v))
        assert order[0] == ("forward", 0, 0)
        assert order[-1] == ("backward", m - 1, 0)
        warm_up = next(i for i, block in enumerate(order) if block[0] == "backward")
        expected = num_warm_up_forwards(pipeline_parallel=p, virtual_pipeline=v, num_micro_batches=m, rank=rank)
        assert warm_up == min(expected + 1, m * v)


def test_1f1b_of_four_stages() -> None:
    names = [f"{phase[0]}{i}" for phase, i, _ in schedule_order(4, 1, 6, 1)]
    assert names == ["f0", "f1", "f2", "b0", "f3", "b1", "f4", "b2", "f5", "b3", "b4", "b5"]


def test_interleaved_of_two_stages() -> None:
    names = [f"{phase[0]}{i}.{c}" for phase, i, c in schedule_order(2, 2, 4, 1)]
    assert names[:8] == ["f0.0", "f1.0", "f0.1", "b0.1", "f1.1", "b1.1", "f2.0", "b0.0"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1, 1), "pipeline_parallel = 0: must be 1 or more"),
        ((1, 2, 4), "virtual_pipeline = 2: needs pipeline_parallel above 1"),
        ((4, 2, 6), r"num_micro_batches = 6: interleaving needs a multiple of pipeline_parallel = 4; fix: use 8"),
        ((2, 1, 0), "num_micro_batches = 0"),
    ],
)
def test_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        schedule_order(*shape, 0)
