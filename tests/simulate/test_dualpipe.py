"""Two copies of a model on one pipeline: twice the state, gradients summed over both, the same work, true bounds."""

import pytest

from echo_explore.core import SpecError
from echo_explore.graph import Axis
from echo_explore.simulate.jobs import build_job
from echo_explore.simulate.pricing import Pricer
from echo_explore.simulate.simulator import executed_flop
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import Candidate
from echo_explore.timeline import PipelineJob
from echo_explore.topology import group_shape, mirrored_shape
from echo_explore.tracing.request import request_of
from tests.simulate.support import candidate, simulator

SMALL = {"layout": "tp=8,pp=4,vpp=2,sp=1", "schedule": "dualpipe"}
PLAIN = {"layout": "tp=8,pp=4,sp=1"}


def job_of(one: Candidate) -> PipelineJob:
    models = simulator()
    pricer = Pricer(one, compute=models.compute, collective=models.collective, what_if=WhatIf())
    return build_job(one, models.tracer.trace(request_of(one)), pricer, WhatIf())


def test_each_stage_holds_what_it_and_its_mirror_image_hold_alone() -> None:
    overrides = ("recipe.distributed_optimizer=false", "model.tied_embeddings=false")
    two, one = (simulator().predict(candidate(**job, overrides=overrides)) for job in (SMALL, PLAIN))
    for part in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        alone = [float(row[part]) for row in one.memory]
        both = [a + b for a, b in zip(alone, alone[::-1], strict=True)]
        assert [float(row[part]) for row in two.memory] == pytest.approx(both, rel=1e-12)


def test_the_distributed_optimizer_spreads_over_both_copies() -> None:
    two = simulator().predict(candidate(**SMALL, overrides=("recipe.distributed_optimizer=true",)))
    one = simulator().predict(candidate(**SMALL, overrides=("recipe.distributed_optimizer=false",)))
    for row, whole in zip(two.memory, one.memory, strict=True):
        assert float(row["optimizer_bytes"]) == pytest.approx(float(whole["optimizer_bytes"]) / 2, rel=1e-12)


def test_the_same_work_is_done() -> None:
    two, one = job_of(candidate(**SMALL)), job_of(candidate(**PLAIN))
    assert executed_flop(two) == pytest.approx(executed_flop(one), rel=1e-12)


def test_gradients_are_summed_over_both_copies_even_of_one_replica() -> None:
    two, one = job_of(candidate(**SMALL)), job_of(candidate(**PLAIN))
    assert not any(chunk.buckets for stage in one.stages for chunk in stage.chunks)
    for stage in two.stages:
        assert all(chunk.buckets and chunk.buckets[0].time_s > 0 for chunk in stage.chunks)
    mine, mirrored = two.stages[0].chunks[0].buckets, two.stages[3].chunks[1].buckets
    assert sum(b.message_bytes for b in mine) == sum(b.message_bytes for b in mirrored)


@pytest.mark.parametrize("layout", ["tp=8,pp=4,vpp=2,sp=1", "tp=4,pp=2,vpp=2,dp=2", "tp=8,pp=6,vpp=2"])
def test_bounds_hold(layout: str) -> None:
    one = candidate(layout=layout, schedule="dualpipe", global_batch_size=24, micro_batch_size=1)
    bounds, prediction = simulator().bounds(one), simulator().predict(one)
    assert 0.5 * prediction.step_time_s < bounds.step_time_s <= prediction.step_time_s
    assert 0 < bounds.peak_memory_bytes <= prediction.peak_memory_bytes


def test_groups_of_both_copies_reach_over_both_stages() -> None:
    one = candidate(layout="tp=4,pp=4,vpp=2,dp=2", schedule="dualpipe")
    alone = group_shape(Axis.DATA, one.layout, one.cluster)
    both = mirrored_shape(Axis.DATA, one.layout, one.cluster)
    assert (alone.num_ranks, alone.num_nodes) == (2, 1)
    assert (both.num_ranks, both.num_nodes, both.ranks_per_node) == (4, 2, 2)
    assert both.groups_per_node == 4
    assert both.node_stride == 3  # the outer pair of stages lies farthest apart
    odd = one.layout.model_copy(update={"pipeline_parallel": 3})
    with pytest.raises(SpecError, match="pipeline_parallel = 3: must be even to be mirrored"):
        mirrored_shape(Axis.DATA, odd, one.cluster)


def test_layers_are_split_over_stages() -> None:
    assert candidate(**SMALL).chunk_layers == (12, 12, 12, 12)
    with pytest.raises(SpecError, match=r"layer_split = .*2 copies of the model, split alike over pp = 4 stages"):
        candidate(**SMALL, layer_split="6,6,6,6,6,6,6,6")
