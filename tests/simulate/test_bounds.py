"""Lower bounds are admissible: no prediction is below them."""

from typing import Any

import pytest

from echo_explore.simulate import SimulationOptions
from echo_explore.simulate.bounds import lower_bounds
from tests.simulate.support import candidate, simulator

LAYOUTS = ("tp=1,pp=8", "tp=2,pp=4,vpp=2,sp=1", "tp=8,pp=4", "tp=8,pp=6,vpp=4,sp=1", "tp=8,pp=1,dp=4", "tp=4,pp=2,dp=2")
RECOMPUTE = ("none", "selective", "full")
SOME_LAYERS = ("full:block:1", "full:uniform:2")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", RECOMPUTE + SOME_LAYERS)
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_never_above_the_prediction(layout: str, recompute: str, attention: str) -> None:
    batch = 12 if "pp=6" in layout else 8
    job = candidate(layout=layout, recompute=recompute, attention=attention, global_batch_size=batch)
    model = simulator()
    bounds = model.bounds(job)
    kernel = model.predict(job)
    assert 0 < bounds.step_time_s <= kernel.step_time_s
    assert 0 < bounds.peak_memory_bytes <= kernel.peak_memory_bytes
    assert bounds.step_time_s <= model.predict(job, SimulationOptions(fidelity="block")).step_time_s


@pytest.mark.parametrize("cluster", ["v100-25gbe", "a100-80gb-hdr", "h100-ndr", "b200-ndr", "mi300x-roce"])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_on_every_generation(cluster: str, micro_batch_size: int) -> None:
    job = candidate(cluster=cluster, precision="fp16", micro_batch_size=micro_batch_size)
    model = simulator(allow_fallback=True)
    bounds, prediction = model.bounds(job), model.predict(job)
    assert bounds.step_time_s <= prediction.step_time_s
    assert bounds.peak_memory_bytes <= prediction.peak_memory_bytes


def test_uneven_stages() -> None:
    job = candidate(layout="tp=8,pp=4", layer_split="6,20,16,6")
    model = simulator()
    assert model.bounds(job).step_time_s <= model.predict(job).step_time_s


def test_more_work_is_never_bounded_lower() -> None:
    bounds = [simulator().bounds(candidate(recompute=recompute)).step_time_s for recompute in RECOMPUTE]
    assert bounds == sorted(bounds)
    larger = simulator().bounds(candidate(global_batch_size=32)).step_time_s
    assert larger > bounds[0]


@pytest.mark.parametrize("layout", ["tp=8,pp=4", "tp=8,pp=4,sp=1"])
def test_products_and_exchanges_are_priced(layout: str) -> None:
    """The bound is near: what it leaves out is attention, elementwise kernels, transfers between stages."""
    job, model = candidate(layout=layout, overrides=("recipe.dropout=0",)), simulator()
    bound, step_s = model.bounds(job).step_time_s, model.predict(job).step_time_s
    at_peak_s = lower_bounds(job).step_time_s
    assert at_peak_s < 0.75 * bound
    assert 0.7 * step_s < bound <= step_s
    hidden = candidate(layout="tp=8,pp=4,sp=1", overrides=("recipe.overlap_tensor=true",))
    assert at_peak_s < model.bounds(hidden).step_time_s < bound


@pytest.mark.parametrize(
    "job",
    [
        {"cluster": "b200-ndr", "precision": "fp8"},
        {"overrides": ("recipe.lora_rank=16",)},
        {
            "cluster": "h100-ndr",
            "stack": "torchtitan-fsdp2",
            "layout": "tp=8,dp=4,sp=1",
            "model": "llama3-8b",
            "framework": "fsdp2",
        },
    ],
)
def test_layers_that_are_not_known_are_bounded_at_the_peak(job: dict[str, Any]) -> None:
    one = candidate(**job)
    assert simulator().bounds(one).step_time_s == lower_bounds(one).step_time_s
