import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.memory.schedule_walk import ActivationPeak, ChunkMemory, activation_peak
from echo_explore.specs.schedules import SCHEDULES, PassKind, build_schedule, default_schedule


def unit(saved: float = 1.0, forward: float = 0.0, backward: float = 0.0) -> ChunkMemory:
    return ChunkMemory(saved_bytes=saved, forward_peak_bytes=forward, backward_peak_bytes=backward)


def walked(chunks: list[ChunkMemory], *, num_stages: int, stage: int, num_micro_batches: int) -> ActivationPeak:
    schedule = build_schedule(
        default_schedule(num_stages, len(chunks)),
        pipeline_parallel=num_stages,
        virtual_pipeline=len(chunks),
        num_micro_batches=num_micro_batches,
    )
    return activation_peak(chunks, schedule.orders[stage])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, int, int]:
    stages = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 4)) if stages > 1 else 1
    micro_batches = draw(st.integers(1, 7)) * (stages if chunks > 1 else 1)
    return stages, draw(st.integers(0, stages - 1)), chunks, micro_batches


def brute_force(sizes: list[float], stages: int, stage: int, micro_batches: int) -> float:
    """Most bytes saved at once, walked micro-batch by micro-batch from Megatron's table of (micro-batch, chunk)."""
    chunks = len(sizes)
    table = [
        (start + i, chunk)
        for start in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for i in range(min(stages, micro_batches - start))
    ]
    warmup = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warmup = min(warmup, len(table)) if stages > 1 else 0
    alive: set[tuple[int, int]] = set()
    most, done = 0.0, 0
    for number, item in enumerate(table):
        alive.add(item)
        most = max(most, sum(sizes[chunk] for _, chunk in alive))
        if number >= warmup:
            micro_batch, chunk = table[done]
            alive.remove((micro_batch, chunks - 1 - chunk))
            done += 1
    return most


@given(schedules(), st.data())
def test_saved_bytes_equal_a_walk_over_micro_batches(schedule: tuple[int, int, int, int], data: st.DataObject) -> None:
    stages, stage, chunks, micro_batches = schedule
    sizes = data.draw(st.lists(st.integers(1, 50).map(float), min_size=chunks, max_size=chunks))
    peak = walked([unit(s) for s in sizes], num_stages=stages, stage=stage, num_micro_batches=micro_batches)
    assert peak.saved_bytes + peak.transient_bytes == brute_force(sizes, stages, stage, micro_batches)


@given(st.integers(1, 12), st.integers(1, 40))
def test_1f1b_keeps_at_most_the_stages_to_come(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        peak = walked([unit()], num_stages=stages, stage=stage, num_micro_batches=micro_batches)
        assert peak.in_flight == (min(micro_batches, stages - stage),)
        assert peak.saved_bytes == min(micro_batches, stages - stage)


@given(st.integers(2, 8), st.integers(2, 4))
def test_interleaving_keeps_the_warm_up_and_one_more(stages: int, chunks: int) -> None:
    for stage in range(stages):
        warmup = 2 * (stages - stage - 1) + (chunks - 1) * stages
        peak = walked([unit()] * chunks, num_stages=stages, stage=stage, num_micro_batches=4 * stages)
        assert sum(peak.in_flight) == peak.saved_bytes == warmup + 1


def test_transients_come_on_top_of_what_is_saved() -> None:
    chunk = unit(saved=10, forward=14, backward=5)
    peak = walked([chunk], num_stages=4, stage=3, num_micro_batches=8)
    assert (peak.saved_bytes, peak.transient_bytes) == (10, 4)  # forward: 14 above nothing
    last = unit(saved=10, forward=10, backward=17)
    peak = walked([last], num_stages=4, stage=2, num_micro_batches=8)
    assert (peak.saved_bytes, peak.transient_bytes) == (20, 7)  # backward: 17, of which 10 saved, beside another 10


@pytest.mark.parametrize("stages", [2, 4])
def test_a_longer_step_has_the_same_peak(stages: int) -> None:
    chunks = [unit(3, 4, 5), unit(7, 8, 9), unit(2, 9, 2)]
    for stage in range(stages):
        peaks = {walked(chunks, num_stages=stages, stage=stage, num_micro_batches=m * stages) for m in (3, 4, 50)}
        assert len(peaks) == 1


@pytest.mark.parametrize(("name", "kept"), [("gpipe", 9), ("zb-h1", 4), ("1f1b", 4)])
def test_the_first_stage_of_four_keeps(name: str, kept: int) -> None:
    """GPipe keeps every micro-batch; ZB-H1 keeps what 1F1B does (Qi et al. 2401.10241, section 3)."""
    schedule = build_schedule(name, pipeline_parallel=4, virtual_pipeline=1, num_micro_batches=9)
    assert activation_peak([unit()], schedule.orders[0]).saved_bytes == kept


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_a_v_keeps_at_most_the_activations_of_1f1b_on_every_stage(name: str) -> None:
    """2 p chunks of half the layers, on all stages alike (Qi et al. 2401.10241, section 6); one more in DualPipeV."""
    p = 4
    schedule = build_schedule(
        name, pipeline_parallel=p, virtual_pipeline=SCHEDULES[name].num_chunks, num_micro_batches=16
    )
    peaks = [activation_peak([unit(), unit()], order).saved_bytes for order in schedule.orders]
    assert max(peaks) <= 2 * p + (name == "dualpipev")
    assert any((order.phase == PassKind.BACKWARD_WEIGHT).any() for order in schedule.orders)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe_keeps_one_more_than_its_stages(p: int) -> None:
    """Activations of p + 1 stages (DeepSeek-V3 2412.19437 table 2)."""
    schedule = build_schedule("dualpipe", pipeline_parallel=p, virtual_pipeline=2, num_micro_batches=4 * p)
    peaks = [activation_peak([unit(), unit()], order).saved_bytes for order in schedule.orders]
    assert max(peaks) == p + 1


def test_a_forward_beside_a_backward_saves_while_the_other_frees() -> None:
    """One forward runs ahead; then forwards and backwards of two micro-batches go piece by piece."""
    pieces = ((10.0, 12.0, 3.0), (10.0, 12.0, 3.0), (20.0, 25.0, 7.0))
    chunk = ChunkMemory(saved_bytes=40.0, forward_peak_bytes=45.0, backward_peak_bytes=47.0, pieces=pieces)
    order = build_schedule(
        "no-pipelining", pipeline_parallel=1, virtual_pipeline=1, num_micro_batches=6, ahead=1
    ).orders[0]
    apart, together = (activation_peak([chunk], order, together=t) for t in (False, True))
    assert apart.saved_bytes + apart.transient_bytes == 2 * 40 + 7
    # The first piece forward beside the last one backward: 12 of one, 40 + 7 of the other.
    assert (together.saved_bytes, together.transient_bytes) == (10 + 40, 12 - 10 + 7)


@given(schedules(), st.data())
def test_running_together_never_needs_less_than_what_is_saved_between(
    schedule: tuple[int, int, int, int], data: st.DataObject
) -> None:
    stages, stage, chunks, micro_batches = schedule
    sizes = data.draw(st.lists(st.integers(1, 50).map(float), min_size=chunks, max_size=chunks))
    order = build_schedule(
        default_schedule(stages, chunks),
        pipeline_parallel=stages,
        virtual_pipeline=chunks,
        num_micro_batches=micro_batches,
    ).orders[stage]
    units = [
        ChunkMemory(saved_bytes=s, forward_peak_bytes=s, backward_peak_bytes=s, pieces=((s, s, 0.0),)) for s in sizes
    ]
    apart, together = (activation_peak(units, order, together=t) for t in (False, True))
    assert max(sizes) <= together.saved_bytes + together.transient_bytes <= apart.saved_bytes + apart.transient_bytes
