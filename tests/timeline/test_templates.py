"""What the host needs for a graph."""

import numpy as np
import pytest

from echo_explore.graph import OpKind, OpRow, Phase, TimedGraph, build_graph
from echo_explore.timeline.templates import host_seconds


def test_backward_calls_are_counted_apart_from_those_of_the_interpreter() -> None:
    rows = [
        OpRow(phase=Phase.FORWARD, host_calls=3),
        OpRow(phase=Phase.RECOMPUTE, host_calls=5, kind=OpKind.COLLECTIVE),
        OpRow(phase=Phase.BACKWARD, host_calls=7),
    ]
    timed = TimedGraph(graph=build_graph(rows), time_s=np.zeros(3), sigma_log=np.zeros(3))
    assert host_seconds(timed, call_s=2.0, backward_call_s=0.5) == pytest.approx(8 * 2.0 + 7 * 0.5)
