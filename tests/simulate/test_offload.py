"""Activations in the memory of the host: bytes, hidden and exposed copies, memory, refusals."""

from typing import Any

import numpy as np
import pytest

from echo_explore.core import EchoError
from echo_explore.graph import Axis, Collective, OpKind, Phase
from echo_explore.simulate import SimulationOptions
from echo_explore.simulate.offload import with_offload
from echo_explore.specs import Candidate
from echo_explore.testing.traces import HandmadeTracer
from echo_explore.tracing.request import request_of
from tests.simulate.support import candidate, simulator


def job(count: int, *overrides: str, **changes: Any) -> Candidate:
    options = {"layout": "tp=8,pp=1", "global_batch_size": 4}
    return candidate(overrides=(f"recipe.offload_layers={count}", *overrides), **(options | changes))


def test_what_layers_save_leaves_once_and_comes_back_once() -> None:
    one = job(12)
    plain = HandmadeTracer().trace(request_of(one))
    layer = with_offload(one, plain).pieces["layer.dense"]
    for graph, kind, phase in (
        (layer.forward, Collective.SEND, Phase.FORWARD),
        (layer.backward, Collective.RECV, Phase.BACKWARD),
    ):
        copies = graph.axis == Axis.HOST
        assert np.flatnonzero(copies).tolist() == [0]
        assert graph.collective[0] == kind
        assert set(graph.phase.tolist()) == {phase}
        assert graph.asynchronous[0]
        assert (graph.kind[-1], graph.awaits[-1]) == (OpKind.WAIT, 0)
        assert 48 * graph.message_bytes[0] == pytest.approx(12 * plain.pieces["layer.dense"].saved_bytes)
    assert layer.forward.flop.sum() == plain.pieces["layer.dense"].forward.flop.sum()
    assert with_offload(job(0), plain) is plain


@pytest.mark.parametrize("framework", ["megatron", "fsdp2"])
@pytest.mark.parametrize("fidelity", ["kernel", "block"])
def test_copies_hide_behind_kernels_until_the_link_is_too_slow(framework: str, fidelity: Any) -> None:
    changes: dict[str, Any] = {"framework": framework}
    if framework == "fsdp2":
        changes |= {"model": "llama2-7b", "layout": "dp=8", "global_batch_size": 8, "sequence_length": 2048}
    options = SimulationOptions(fidelity=fidelity)

    def step(count: int, bandwidth: str) -> tuple[float, float]:
        prediction = simulator().predict(job(count, f"cluster.node.host_bandwidth={bandwidth}", **changes), options)
        keys = ("recompute_s", "interference_s", "straggler_s")
        parts = sum(seconds for key, seconds in prediction.breakdown.items() if key not in keys)
        assert parts == pytest.approx(prediction.step_time_s, rel=1e-9)
        return prediction.step_time_s, prediction.breakdown["host_s"]

    (plain_s, host_s), (fast_s, _), (slow_s, exposed_s), (slower_s, _) = (
        step(count, bandwidth)
        for count, bandwidth in ((0, '"1 GB/s"'), (8, '"10 TB/s"'), (8, '"1 GB/s"'), (8, '"0.5 GB/s"'))
    )
    assert fast_s == pytest.approx(plain_s, rel=0.02)
    assert exposed_s - host_s == pytest.approx(slow_s - plain_s, rel=0.2)
    one = job(8, **changes)
    saved = with_offload(one, HandmadeTracer().trace(request_of(one))).pieces["layer.dense"].saved_bytes
    copied_s = one.num_micro_batches * 2 * 8 * saved / 1e9
    assert copied_s * 0.98 < slow_s < plain_s + copied_s
    assert slower_s - slow_s == pytest.approx(copied_s, rel=0.02)


def test_memory_of_what_left_is_free() -> None:
    saved = HandmadeTracer().trace(request_of(job(0))).pieces["layer.dense"].saved_bytes
    parts = [simulator().memory_of(job(count)).stages[0] for count in (0, 12, 40)]
    assert [p.activations_bytes for p in parts] == pytest.approx(
        [parts[0].activations_bytes - count * saved for count in (0, 12, 40)]
    )
    # The layer that runs has its activations back, and the next is on its way.
    assert parts[2].transient_bytes <= parts[0].transient_bytes + 2 * saved
    assert parts[2].total_bytes < parts[1].total_bytes < parts[0].total_bytes


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [
        (48, {}, "must be below num_layers = 48"),
        (4, {"layout": "tp=8,pp=4"}, "does not go with pipeline stages"),
        (4, {"recompute": "selective"}, "does not go with recomputation"),
        (4, {"framework": "ddp", "layout": "dp=4", "model": "llama2-7b"}, "is not modelled for ddp"),
    ],
)
def test_refused(count: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EchoError, match=f"recipe.offload_layers = {count}: {message}"):
        job(count, **changes)
