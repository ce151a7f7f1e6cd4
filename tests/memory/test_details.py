"""What the parts of a stage's memory consist of."""

from dataclasses import replace
from typing import Any

import pytest

from echo_explore.graph import Trace
from echo_explore.memory import StageDetails, memory_profile, stage_details
from echo_explore.memory.details import INPUTS
from echo_explore.specs import Candidate, ParallelConfig
from tests.memory.test_sharding_buffers import native
from tests.memory.traces import candidate_of, trace_of


def named(trace: Trace) -> Trace:
    """Three quarters of what a layer saves are said to be of two tensors."""
    layer = trace.pieces["layer.dense"]
    tensors = (("mlp.linear_fc1 aten.mm", 0.5 * layer.saved_bytes), ("attention", 0.25 * layer.saved_bytes))
    return replace(trace, pieces={**trace.pieces, "layer.dense": replace(layer, saved_tensors=tensors)})


def details_of(candidate: Candidate) -> list[StageDetails]:
    trace = named(trace_of(candidate))
    stages = memory_profile(candidate=candidate, trace=trace).stages
    found = [stage_details(candidate, trace, stage) for stage in stages]
    for one, stage in zip(found, stages, strict=True):
        framework = one.context_bytes + one.communicators_bytes + one.workspace_bytes
        assert framework == pytest.approx(stage.framework_bytes)
        assert sum(one.activations_bytes.values()) == pytest.approx(stage.activations_bytes)
        assert one.sharding_buffers_bytes + one.offload_buffers_bytes <= stage.transient_bytes * (1 + 1e-12)
        assert 0 <= one.quantised_copies_bytes <= stage.parameters_bytes
    return found


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ({}, {}),
        ({"pipeline_parallel": 4}, {"recompute": "full"}),
        ({"pipeline_parallel": 4, "virtual_pipeline": 2, "tensor_parallel": 2}, {"precision": "fp8"}),
    ],
)
def test_activations_by_tensor_add_up(layout: dict[str, Any], recipe: dict[str, Any]) -> None:
    candidate = candidate_of(ParallelConfig(data_parallel=2, **layout), **recipe)
    found = details_of(candidate)
    layer = trace_of(candidate).pieces["layer.dense"].saved_bytes
    stage = memory_profile(candidate=candidate, trace=trace_of(candidate)).stages[0]
    # The last of four layers that keep nothing but results keeps none, as the stage frees it once sent.
    layers = sum(stage.in_flight) * (candidate.chunk_layers[0] - (recipe.get("recompute") == "full"))
    assert found[0].activations_bytes["layers: mlp.linear_fc1 aten.mm"] == pytest.approx(0.5 * layers * layer)
    assert found[0].activations_bytes[INPUTS] >= 0
    assert (found[0].quantised_copies_bytes > 0) is (recipe.get("precision") == "fp8")
    assert found[0].sharding_buffers_bytes == 0.0


def test_sharding_and_offload_are_told_apart() -> None:
    sharded, offloaded = details_of(native())[0], details_of(native(offload_layers=8))[0]
    assert sharded.sharding_buffers_bytes > 0
    assert sharded.offload_buffers_bytes == 0.0 < offloaded.offload_buffers_bytes
    attention = "layers: attention"
    assert offloaded.activations_bytes[attention] == pytest.approx(sharded.activations_bytes[attention] / 2)
