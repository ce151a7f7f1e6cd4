"""Lower bounds are admissible: no prediction is below them."""

import pytest

from echo_explore.simulate import SimulationOptions
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
