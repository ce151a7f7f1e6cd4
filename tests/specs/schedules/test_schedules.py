"""Schedules by name and from files: well formed, free of deadlock, in the notation of torch."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.specs.schedules import (
    SCHEDULES,
    PipelineSchedule,
    StageOrder,
    build_schedule,
    check_orders,
    parse_orders,
    read_orders,
)
from echo_explore.specs.schedules.checks import pass_name


@st.composite
def schedules(draw: st.DrawFn) -> PipelineSchedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p = 1 if name == "no-pipelining" else draw(st.integers(2, 7))
    v = SCHEDULES[name].num_chunks or draw(st.integers(2, 4))
    m = draw(st.integers(1, 20))
    if name == "interleaved":
        m *= p
    if name == "dualpipev":
        m += 2 * p - 1
    if name == "dualpipe":
        p, m = p + p % 2, 2 * (p + p % 2 + m - 1)
    return build_schedule(name, pipeline_parallel=p, virtual_pipeline=v, num_micro_batches=m)


def lines_of(schedule: PipelineSchedule) -> tuple[str, ...]:
    return tuple(
        ",".join(
            pass_name(kind, m, int(schedule.placement[stage, chunk]))
            for kind, m, chunk in zip(order.phase, order.micro_batch, order.chunk, strict=True)
        )
        for stage, order in enumerate(schedule.orders)
    )


@settings(deadline=None)
@given(schedule=schedules())
def test_every_schedule_runs_and_survives_a_file(schedule: PipelineSchedule) -> None:
    check_orders(schedule)
    if schedule.num_copies > 1:  # a file has one copy of the model
        return
    again = parse_orders(
        lines_of(schedule),
        pipeline_parallel=schedule.num_stages,
        virtual_pipeline=schedule.num_chunks,
        num_micro_batches=schedule.num_micro_batches,
    )
    assert lines_of(again) == lines_of(schedule)


def test_zb_h1_of_four_stages() -> None:
    schedule = build_schedule("zb-h1", pipeline_parallel=4, virtual_pipeline=1, num_micro_batches=5)
    lines = lines_of(schedule)
    assert lines[0] == "0F0,0F1,0F2,0F3,0I0,0W0,0F4,0I1,0W1,0I2,0W2,0I3,0W3,0I4,0W4"
    assert lines[3] == "3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3W0,3F4,3I4,3W1,3W2,3W3,3W4"


GOOD = ("0F0,0F1,,0B0,0B1", "1F0,1B0,(1F1;1B1)OVERLAP_F_B")


def parsed(lines: tuple[str, ...], *, stages: int = 2, chunks: int = 1, micro_batches: int = 2) -> PipelineSchedule:
    return parse_orders(lines, pipeline_parallel=stages, virtual_pipeline=chunks, num_micro_batches=micro_batches)


def test_a_file_with_bubbles_and_overlaps(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("\n".join(GOOD) + "\n\n")
    schedule = parsed(read_orders(path))
    assert [len(order.phase) for order in schedule.orders] == [4, 4]
    assert lines_of(schedule)[1] == "1F0,1B0,1F1,1B1"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (GOOD[:1], r"'1 lines': was made for 1 stages, and the layout has pp = 2; fix: use pp=1"),
        (("0F0,0F1,0B0", GOOD[1]), r"schedule\[0\] = 'micro-batch 1': chunk 0 needs F and either B .* and has F"),
        (("0F0,0F1,0B0,0B1,0B1", GOOD[1]), r"schedule\[0\] = '0B1': runs twice"),
        (("0F0,0F1,0B0,0B1,0F2", GOOD[1]), r"'0F2': is beyond the 2 micro-batches"),
        (("0F0,0F1,0B0,0X1", GOOD[1]), r"schedule\[0\] = '0X1': is not a pass"),
        (("0F0,0F1,1B0,0B1", GOOD[1]), r"chunk 1 is on stage 0 already"),
        (("0F0,0F1,0B0,0B1", "2F0,2B0,2F1,2B1"), r"the layout has 1 chunks a stage, numbered 0 to 1"),
        (
            ("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"),
            r"deadlocks with 6 passes left: stage 0 at 0B0 for the backward of micro-batch 0 in chunk 1; "
            r"stage 1 at 1F1 for the forward of micro-batch 1 in chunk 0",
        ),
    ],
)
def test_bad_files(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parsed(lines)


def test_weights_before_inputs_deadlock() -> None:
    with pytest.raises(SpecError, match="stage 1 at 1W0 for the backward of micro-batch 0 in chunk 1"):
        parsed(("0F0,0I0,0W0", "1F0,1W0,1I0"), micro_batches=1)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not a text file that can be read"):
        read_orders(tmp_path / "missing.csv")
    (tmp_path / "empty.csv").write_text(",,\n\n")
    with pytest.raises(SpecError, match="holds no line with passes"):
        read_orders(tmp_path / "empty.csv")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("zbv", (4, 1, 8), r"does not fit 4 stages of 1 chunks; fix: use 1f1b, or pp above 1 and vpp=2"),
        ("zb-h1", (1, 1, 8), r"does not fit 1 stages of 1 chunks; fix: use no-pipelining"),
        ("gpipe", (4, 2, 8), r"does not fit 4 stages of 2 chunks"),
        ("dualpipev", (4, 2, 7), r"dualpipev needs at least 2 \* pipeline_parallel = 8"),
        ("dualpipe", (4, 2, 9), r"num_micro_batches = 9: .* an even number, .* = 8 or more; fix: use 10"),
        ("dualpipe", (4, 2, 6), r"num_micro_batches = 6: .* fix: use 8"),
        ("dualpipe", (5, 2, 20), r"pipeline_parallel = 5: dualpipe needs an even number of stages; fix: use 6 or 4"),
        ("interleaved", (4, 2, 6), r"interleaving needs a multiple of pipeline_parallel = 4; fix: use 8"),
        ("zbw", (4, 2, 8), r"schedule = 'zbw': is not known; fix: use zbv"),
    ],
)
def test_refused(name: str, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_schedule(name, pipeline_parallel=shape[0], virtual_pipeline=shape[1], num_micro_batches=shape[2])


@pytest.mark.parametrize(("p", "m"), list(product([2, 3, 4], [1, 3, 9])))
def test_zbv_gives_the_last_chunk_to_the_first_stage(p: int, m: int) -> None:
    schedule = build_schedule("zbv", pipeline_parallel=p, virtual_pipeline=2, num_micro_batches=m)
    assert schedule.placement.tolist() == [[s, 2 * p - 1 - s] for s in range(p)]


def test_dualpipe_of_four_stages() -> None:
    """As DeepSeek's dualpipe.py issues them on ranks 0 and 3, micro-batches counted from 0 in each direction."""
    schedule = build_schedule("dualpipe", pipeline_parallel=4, virtual_pipeline=2, num_micro_batches=8)
    lines = lines_of(schedule)
    first = "0F0,0F1,0F2,7F0,7I0,7W0,7F1,0F3,7B1,7F2,0B0,7B2,7F3,0B1,7B3,0I2,0W2,0I3,0W3"
    assert lines[0] == first
    assert lines[3] == "4F0,4F1,4F2,3F0,3I0,3W0,3F1,4F3,3B1,3F2,4B0,3B2,3F3,4B1,3B3,4I2,4W2,4I3,4W3"
    assert schedule.placement.tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert schedule.num_model_chunks == 4


@settings(deadline=None)
@given(half=st.integers(1, 5), more=st.integers(0, 6))
def test_both_ends_of_dualpipe_run_the_same(half: int, more: int) -> None:
    m = 4 * half + 2 * more
    schedule = build_schedule("dualpipe", pipeline_parallel=2 * half, virtual_pipeline=2, num_micro_batches=m)
    for order, other in zip(schedule.orders, schedule.orders[::-1], strict=True):
        assert order.phase.tolist() == other.phase.tolist()
        assert order.micro_batch.tolist() == other.micro_batch.tolist()
        assert order.chunk.tolist() == (1 - other.chunk).tolist()
        assert order.joined.tolist() == other.joined.tolist()


def test_joined_passes_that_need_each_other_deadlock() -> None:
    """Each stage has the forward that the other's backward waits for in one step with a backward."""
    first = StageOrder.of([(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)], joined=[1])
    last = StageOrder.of([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)])
    apart = PipelineSchedule(
        name="x", num_micro_batches=2, placement=np.array([[0], [1]]), orders=(first, last), is_periodic=False
    )
    check_orders(apart)
    late = StageOrder.of([(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)])
    with pytest.raises(SpecError, match="stage 0 at 0B0 for the backward of micro-batch 0 in chunk 1; stage 1 at 1F1"):
        check_orders(replace(apart, orders=(first, late)))
