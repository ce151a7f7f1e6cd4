"""What the host needs for a graph, and where it waits for the GPU."""

import numpy as np
import pytest

from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, OpRow, Phase, TimedGraph, build_graph
from echo_explore.interference import NoInterference
from echo_explore.timeline.blocks import _measure
from echo_explore.timeline.charges import Column
from echo_explore.timeline.host import LAUNCH_LATENCY_S, HostModules, ModuleSeconds, host_row_seconds, host_seconds
from echo_explore.timeline.program import checked_pairs
from echo_explore.timeline.templates import expand


def test_backward_calls_are_counted_apart_from_those_of_the_interpreter() -> None:
    rows = [
        OpRow(phase=Phase.FORWARD, host_calls=3),
        OpRow(phase=Phase.RECOMPUTE, host_calls=5, kind=OpKind.COLLECTIVE),
        OpRow(phase=Phase.BACKWARD, host_calls=7),
    ]
    timed = TimedGraph(graph=build_graph(rows), time_s=np.zeros(3), sigma_log=np.zeros(3))
    assert host_seconds(timed, call_s=2.0, backward_call_s=0.5) == pytest.approx(8 * 2.0 + 7 * 0.5)


def test_collectives_take_the_host_what_their_axis_says() -> None:
    """On top of the operator, in either direction, and not inside a CUDA graph."""
    rows = [
        OpRow(phase=phase, kind=OpKind.COLLECTIVE, axis=axis, collective=Collective.ALL_GATHER, host_calls=calls)
        for phase, axis, calls in (
            (Phase.FORWARD, Axis.TENSOR, 1), (Phase.BACKWARD, Axis.TENSOR, 1), (Phase.FORWARD, Axis.DATA, 1),
            (Phase.FORWARD, Axis.TENSOR, 0),
        )
    ]  # fmt: skip
    timed = TimedGraph(graph=build_graph([*rows, OpRow()]), time_s=np.zeros(5), sigma_log=np.zeros(5))
    each_s = tuple(10.0 if axis == Axis.TENSOR else 3.0 * (axis == Axis.DATA) for axis in Axis)
    host = host_row_seconds(timed, call_s=1.0, backward_call_s=0.5, collective_s=each_s)
    np.testing.assert_allclose(host, [11.0, 10.5, 4.0, 0.0, 1.0])


def _body_s(rows: list[OpRow], times: list[float], host: list[float] | None) -> float:
    timed = TimedGraph(graph=build_graph(rows), time_s=np.array(times), sigma_log=np.zeros(len(rows)))
    template = expand(timed, host_row_s=None if host is None else np.array(host))
    ((body,),) = _measure([[template]], checked_pairs(NoInterference()))
    return float(body.ops.duration_s.sum())


def test_a_wait_for_the_gpu_stops_the_host_from_running_ahead() -> None:
    kernel = OpRow(phase=Phase.FORWARD)
    sync = OpRow(kind=OpKind.HOST_SYNC)
    times, host = [10.0, 0.0, 1.0], [1.0, 0.0, 4.0]
    # Without a wait the host is ahead; with one its 4 s of launches start when the first kernel is done, and the last
    # kernel runs for a second behind its own.
    assert _body_s([kernel, OpRow(phase=Phase.FORWARD), kernel], times, host) == pytest.approx(11.0)
    assert _body_s([kernel, sync, kernel], times, host) == pytest.approx(15.0)
    assert _body_s([kernel, sync, kernel], times, None) == pytest.approx(11.0)


def test_a_wait_may_be_for_an_earlier_row() -> None:
    kernel = OpRow(phase=Phase.FORWARD)
    sync = OpRow(kind=OpKind.HOST_SYNC, awaits=0)
    times, host = [2.0, 8.0, 0.0, 1.0], [1.0, 1.0, 0.0, 4.0]
    # The host is done with two launches at 2 s and waits for the first kernel only, which ends then too.
    assert _body_s([kernel, kernel, sync, kernel], times, host) == pytest.approx(11.0)


def test_nothing_starts_before_what_the_host_launched_ahead_of_it() -> None:
    kernel = OpRow(phase=Phase.FORWARD)
    sync = OpRow(kind=OpKind.HOST_SYNC, awaits=0)
    # The host has launched two at 10 s, when both have long ended, and the third at 11 s.
    assert _body_s([kernel, kernel, sync, kernel], [1.0, 1.0, 0.0, 3.0], [5.0, 5.0, 0.0, 1.0]) == pytest.approx(14.0)


def test_rows_behind_a_wait_do_not_start_before_their_own_launch() -> None:
    kernel = OpRow(phase=Phase.FORWARD)
    sync = OpRow(kind=OpKind.HOST_SYNC, awaits=0)
    rows = [kernel, sync, kernel, kernel, kernel]
    # Short kernels behind the wait run as they are launched, 3 s apart; the long one goes on for 10 s.
    assert _body_s(rows, [2.0, 0.0, 1.0, 1.0, 10.0], [0.0, 0.0, 3.0, 3.0, 3.0]) == pytest.approx(2 + 9 + 10)
    assert _body_s(rows, [2.0, 0.0, 10.0, 1.0, 1.0], [0.0, 0.0, 3.0, 3.0, 3.0]) == pytest.approx(2 + 3 + 12)
    experts = OpRow(op_class=OpClass.GROUPED_GEMM, dims=(4, 256, 8, 8), phase=Phase.FORWARD)
    # Four experts launched over 8 s: the last one runs for 1 s behind its launch.
    assert _body_s([kernel, sync, experts], [2.0, 0.0, 4.0], [0.0, 0.0, 8.0]) == pytest.approx(2 + 8 + 1)


def test_each_further_expert_is_a_call_of_its_own() -> None:
    rows = [
        OpRow(op_class=OpClass.COPY, host_calls=1),
        OpRow(op_class=OpClass.GROUPED_GEMM, dims=(16, 256, 8, 8), host_calls=2),
        OpRow(op_class=OpClass.GROUPED_GEMM, dims=(1, 256, 8, 8), host_calls=2),
    ]
    timed = TimedGraph(graph=build_graph(rows), time_s=np.zeros(3), sigma_log=np.zeros(3))
    host = host_row_seconds(timed, call_s=1.0, backward_call_s=0.5, expert_call_s=0.25)
    assert host.tolist() == [1 + 15 * 0.25, 2 + 15 * 0.25, 2]
    assert host_row_seconds(timed, call_s=1.0, backward_call_s=0.5).tolist() == [1, 2, 2]


def test_a_row_takes_at_least_what_its_module_does_in_python() -> None:
    wide = ModuleSeconds(linear_s=5.0, linear_backward_s=4.0, attention_s=7.0, attention_backward_s=6.0)
    narrow = ModuleSeconds(linear_s=9.0, grouped_s=10.0, expert_s=1.0, grouped_backward_s=8.0, expert_backward_s=2.0)
    back, experts = Phase.BACKWARD, (4, 256, 8, 8)
    rows = [
        OpRow(op_class=OpClass.GEMM, dims=(1, 8, 8, 8), host_calls=2),
        OpRow(op_class=OpClass.GEMM, dims=(1, 8, 8, 8), host_calls=20),  # more operators than the module has Python
        OpRow(op_class=OpClass.GEMM, dims=(16, 8, 8, 8), host_calls=1),  # batched: no linear layer
        OpRow(op_class=OpClass.GEMM, dims=(1, 8, 8, 8), dtype=DType.MXFP8, host_calls=1),
        OpRow(op_class=OpClass.GEMM, dims=(1, 8, 8, 8), phase=back, host_calls=1),
        OpRow(op_class=OpClass.ATTENTION, host_calls=1),
        OpRow(op_class=OpClass.ATTENTION, phase=back, host_calls=1),
        OpRow(op_class=OpClass.GROUPED_GEMM, dims=experts, dtype=DType.FP8, host_calls=1),
        OpRow(op_class=OpClass.GROUPED_GEMM, dims=experts, dtype=DType.FP8, phase=back, host_calls=1),
        OpRow(op_class=OpClass.NORM, host_calls=1),
    ]
    timed = TimedGraph(graph=build_graph(rows), time_s=np.zeros(len(rows)), sigma_log=np.zeros(len(rows)))
    modules = HostModules(wide=wide, narrow=narrow)
    host = host_row_seconds(timed, call_s=1.0, backward_call_s=0.5, modules=modules)
    assert host.tolist() == [5, 20, 1, 9, 2, 7, 6, 10 + 3, (8 + 3 * 2) / 2, 1]
    halved = host_row_seconds(timed, call_s=0.0, backward_call_s=0.0, modules=modules.times(0.5))
    assert halved[0] == 2.5


def test_rows_of_a_cuda_graph_cost_the_host_nothing() -> None:
    modules = HostModules(wide=ModuleSeconds(linear_s=5.0, grouped_s=10.0), narrow=ModuleSeconds())
    rows = [
        OpRow(op_class=OpClass.GEMM, dims=(1, 8, 8, 8), host_calls=0),
        OpRow(op_class=OpClass.GROUPED_GEMM, dims=(4, 256, 8, 8), host_calls=0),
        OpRow(op_class=OpClass.GEMM, dims=(1, 8, 8, 8), host_calls=1),
    ]
    timed = TimedGraph(graph=build_graph(rows), time_s=np.zeros(3), sigma_log=np.zeros(3))
    host = host_row_seconds(timed, call_s=1.0, backward_call_s=0.5, expert_call_s=0.25, modules=modules)
    assert host.tolist() == [0.0, 0.0, 5.0]


def test_blocking_launches_put_the_host_between_kernels() -> None:
    rows = [
        OpRow(phase=Phase.FORWARD),
        OpRow(kind=OpKind.COLLECTIVE, axis=Axis.TENSOR, collective=Collective.ALL_REDUCE, asynchronous=True),
        OpRow(phase=Phase.FORWARD),
        OpRow(kind=OpKind.WAIT, awaits=1),
    ]
    timed = TimedGraph(graph=build_graph(rows), time_s=np.array([4.0, 2.0, 1.0, 0.0]), sigma_log=np.zeros(4))
    host = np.array([0.5, 0.25, 0.5, 0.0])
    ((free,),) = _measure([[expand(timed, host_row_s=host)]], checked_pairs(NoInterference()))
    held = expand(timed, host_row_s=host, launch_blocking=True)
    ((blocking,),) = _measure([[held]], checked_pairs(NoInterference()))
    assert free.ops.duration_s.sum() == pytest.approx(6.0)  # the last kernel runs beside the collective
    assert blocking.ops.duration_s.sum() == pytest.approx(4.0 + 2.0 + 1.0 + 1.25)
    assert blocking.charges is not None
    assert blocking.charges[Column.HOST] == pytest.approx(1.25)


def test_every_kernel_waits_for_its_launch_when_launches_block() -> None:
    rows = [OpRow(phase=Phase.FORWARD, host_calls=2), OpRow(kind=OpKind.WAIT, host_calls=0)]
    timed = TimedGraph(graph=build_graph(rows), time_s=np.zeros(2), sigma_log=np.zeros(2))
    seconds = host_row_seconds(timed, call_s=1.0, backward_call_s=0.0, launch_blocking=True)
    assert seconds.tolist() == pytest.approx([2.0 + LAUNCH_LATENCY_S, 0.0], rel=1e-12)
