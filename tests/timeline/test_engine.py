"""The engine: numba equals Python on random programs, and both obey the rules that they claim."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import EchoError
from echo_explore.core.jit import python_of
from echo_explore.graph.execution_graph import Floats
from echo_explore.timeline import engine, program, undisturbed
from echo_explore.timeline.ops import NUM_STREAMS, Ops, Stream
from echo_explore.timeline.program import Pairs, Program, Times, run_program
from tests.examples import examples


def pairs(compute: float, collective: float) -> Pairs:
    return Pairs(compute=np.full((32, 32), compute), collective=np.full((32, 32), collective))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Edges go up in index, and groups take ops of one position on several ranks: no deadlock is possible."""
    num_ranks, length = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    n = num_ranks * length
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rank = np.tile(np.arange(num_ranks), length)
    ops = Ops.blank(n)
    ops.stream[:] = rng.choice([Stream.COMPUTE, Stream.COMPUTE, Stream.TENSOR, Stream.DATA], n)
    ops.duration_s[:] = np.where(
        rng.random(n) < 0.2, 0.0, rng.integers(1, 9, n) / 8 + (rng.random(n) < 0.5) * rng.random(n)
    )
    source, target = rng.integers(0, n, (2, draw(st.integers(0, 2 * n))))
    keep = source < target
    group = np.full(n, -1)
    for position in np.flatnonzero(rng.random(length) < 0.3):
        group[position * num_ranks : (position + 1) * num_ranks] = position
        ops.stream[position * num_ranks : (position + 1) * num_ranks] = Stream.MODEL
        keep &= ~((group[source] == position) & (group[target] == position))
    is_kernel = ops.stream == Stream.COMPUTE
    ops.kernel_class[:] = np.where(is_kernel, rng.integers(0, 4, n), 0)
    ops.traffic_class[:] = np.where(is_kernel, 0, rng.integers(0, 4, n))
    used, numbers = np.unique(group[group >= 0], return_inverse=True)
    group[group >= 0] = numbers
    assert used.size <= length
    return Program(
        ops=replace(ops, edge_source=source[keep], edge_target=target[keep]),
        rank=rank,
        peer=np.full(n, -1),
        order=np.arange(n, dtype=np.float64),
        group=group,
        source=np.full(n, -1),
        copy=np.full(n, -1),
        num_ranks=num_ranks,
    )


def run_engine(one: Program, table: Pairs) -> Times:
    """By events, even where nothing slows anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "disturbs", lambda *_: True)
        return run_program(one, table)


def run_python(one: Program, table: Pairs) -> Times:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "run_events", python_of(engine.run_events))
        patch.setattr(engine, "_settle", python_of(engine._settle))
        return run_engine(one, table)


@examples(150)
@given(one=programs(), slow=st.sampled_from([(1.0, 1.0), (1.5, 1.25), (1.0, 1.25), (1.5, 1.0)]), shares=st.booleans())
def test_a_program_in_which_nothing_slows_anything_needs_no_events(
    one: Program, slow: tuple[float, float], shares: bool
) -> None:
    """One pass gives the very times of the engine, and sees where it does not."""
    table = pairs(*slow)
    if shares:
        shared = table.shared.copy()
        shared[Stream.TENSOR, Stream.DATA] = shared[Stream.DATA, Stream.TENSOR] = 1.5
        table = replace(table, shared=shared)
    events, times = run_engine(one, table), run_program(one, table)
    np.testing.assert_array_equal(times.start_s, events.start_s)
    np.testing.assert_array_equal(times.end_s, events.end_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "run_undisturbed", python_of(undisturbed.run_undisturbed))
        patch.setattr(program, "disturbs", python_of(undisturbed.disturbs))
        python = run_program(one, table)
    np.testing.assert_array_equal(times.end_s, python.end_s)


def of_one_rank(ops: Ops) -> Program:
    """The program of these ops, in their order."""
    num = ops.num_ops
    return Program(
        ops=ops,
        rank=np.zeros(num, dtype=np.int64),
        peer=np.full(num, -1),
        order=np.arange(num, dtype=np.float64),
        group=np.full(num, -1),
        source=np.full(num, -1),
        copy=np.full(num, -1),
        num_ranks=1,
    )


def test_kernels_and_collectives_that_take_turns_need_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel, a collective, a kernel of 1 s each; only beside each other they would slow each other."""

    def refuse(*_: object) -> int:
        raise AssertionError("events")

    ops = Ops.blank(3)
    ops.duration_s[:] = 1.0
    ops.stream[1], ops.traffic_class[1], ops.kernel_class[[0, 2]] = Stream.TENSOR, 1, 1
    ops = replace(ops, edge_source=np.array([0, 1]), edge_target=np.array([1, 2]))
    one = of_one_rank(ops)
    monkeypatch.setattr(program, "run_events", refuse)
    assert run_program(one, pairs(2.0, 2.0)).end_s.tolist() == [1.0, 2.0, 3.0]
    beside = replace(one, ops=replace(ops, edge_source=ops.edge_source[:1], edge_target=ops.edge_target[:1]))
    with pytest.raises(AssertionError, match="events"):
        run_program(beside, pairs(2.0, 2.0))


@examples(150)
@given(one=programs(), slow=st.sampled_from([(1.0, 1.0), (1.5, 1.25)]))
def test_numba_equals_python(one: Program, slow: tuple[float, float]) -> None:
    compiled, oracle = run_program(one, pairs(*slow)), run_python(one, pairs(*slow))
    np.testing.assert_allclose(compiled.start_s, oracle.start_s, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(compiled.end_s, oracle.end_s, rtol=1e-12, atol=1e-12)


def work_done(one: Program, times: Times, table: Pairs) -> Floats:
    """(num_ops,) seconds of undisturbed work in the interval of every op, by brute force over instants of change."""
    cuts = np.unique(np.concatenate([times.start_s, times.end_s]))
    work = np.zeros(one.ops.num_ops)
    for low, high in pairwise(cuts.tolist()):
        middle = (low + high) / 2
        runs = np.flatnonzero((times.start_s < middle) & (times.end_s > middle))
        for op in runs:
            beside = [q for q in runs if one.rank[q] == one.rank[op]]
            slow = 1.0
            if one.ops.stream[op] == Stream.COMPUTE and one.ops.kernel_class[op] > 0:
                codes = [one.ops.traffic_class[q] for q in beside if one.ops.traffic_class[q] > 0]
                slow += sum(table.compute[one.ops.kernel_class[op], code] - 1 for code in codes)
            if one.ops.traffic_class[op] > 0:
                kernels = [one.ops.kernel_class[q] for q in beside if one.ops.kernel_class[q] > 0]
                slow = max([1.0, *(table.collective[k, one.ops.traffic_class[op]] for k in kernels)])
            work[op] += (high - low) / slow
    return work


@examples(80)
@given(one=programs(), slow=st.sampled_from([(1.0, 1.0), (1.5, 1.25)]))
def test_certificate(one: Program, slow: tuple[float, float]) -> None:
    """No overlap on a stream, order kept, every dependence and rendezvous respected, every op's work done exactly."""
    table = pairs(*slow)
    times = run_program(one, table)
    assert (times.end_s >= times.start_s - 1e-12).all()
    assert (times.start_s[one.ops.edge_target] >= times.end_s[one.ops.edge_source] - 1e-12).all()
    for stream in np.unique(one.rank * NUM_STREAMS + one.ops.stream):
        mine = np.flatnonzero(one.rank * NUM_STREAMS + one.ops.stream == stream)
        assert (times.start_s[mine[1:]] >= times.end_s[mine[:-1]] - 1e-12).all()
    for group in range(int(one.group.max(initial=-1)) + 1):
        assert np.ptp(times.start_s[one.group == group]) <= 1e-12
    np.testing.assert_allclose(work_done(one, times, table), one.ops.duration_s, rtol=1e-9, atol=1e-9)


@examples(60)
@given(one=programs())
def test_work_conserving(one: Program) -> None:
    """Every op starts when the last thing that it waits for ends: nothing idles without a reason."""
    times = run_program(one, pairs(1.0, 1.0))
    stream = one.rank * NUM_STREAMS + one.ops.stream
    ready = np.zeros(one.ops.num_ops)
    for op in range(one.ops.num_ops):
        before = np.flatnonzero(stream[:op] == stream[op])
        ends = times.end_s[one.ops.edge_source[one.ops.edge_target == op]]
        ready[op] = max([0.0, *ends, *(times.end_s[before[-1:]])])
    for group in range(int(one.group.max(initial=-1)) + 1):
        ready[one.group == group] = ready[one.group == group].max()
    np.testing.assert_allclose(times.start_s, ready, atol=1e-12)


def test_deadlock_is_reported() -> None:
    ops = Ops.blank(2)
    ops.duration_s[:] = 1.0
    one = Program(
        ops=replace(ops, edge_source=np.array([1]), edge_target=np.array([0])),
        rank=np.zeros(2, dtype=np.int64),
        peer=np.full(2, -1),
        order=np.arange(2, dtype=np.float64),
        group=np.full(2, -1),
        source=np.full(2, -1),
        copy=np.full(2, -1),
        num_ranks=1,
    )
    with pytest.raises(
        EchoError,
        match="2 of 2 ops wait for each other: mark on compute of rank class 0 waits for mark on compute",
    ):
        run_program(one, pairs(1.0, 1.0))


def test_two_collectives_add_their_slowdown() -> None:
    ops = Ops.blank(3)
    ops.stream[:] = [Stream.COMPUTE, Stream.TENSOR, Stream.DATA]
    ops.kernel_class[0] = 1
    ops.traffic_class[1:] = [1, 2]
    ops.duration_s[:] = [1.0, 10.0, 10.0]
    one = of_one_rank(ops)
    table = pairs(1.0, 1.0)
    table.compute[1, 1], table.compute[1, 2], table.collective[1, 1] = 1.5, 1.25, 2.0
    times = run_program(one, table)
    assert times.end_s[0] == pytest.approx(1.75)
    assert times.end_s[1] == pytest.approx(10.0 + 1.75 / 2)
    assert times.end_s[2] == pytest.approx(10.0)
