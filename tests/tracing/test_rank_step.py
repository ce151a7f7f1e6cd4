"""A whole rank of Megatron priced row by row from its trace, beside the step composed from pieces."""

from pathlib import Path

import pytest

from echo_explore.simulate import default_simulator, predict_trace
from echo_explore.specs import JobOptions, candidate_of
from echo_explore.tracing import CachedTracer, TraceService

pytestmark = pytest.mark.torch


def test_a_rank_is_priced_as_the_job(service: TraceService, tmp_path: Path) -> None:
    """Pieces leave out little: the loop of the schedule, rows between layers."""
    options = JobOptions(
        model="llama2-7b", cluster="a100-80gb-hdr", layout="tp=8,dp=2,sp=1", global_batch_size=8, micro_batch_size=4,
        stack="megatron-core", overrides=("recipe.overlap_tensor=false",),
    )  # fmt: skip
    candidate = candidate_of(options)
    simulator = default_simulator(tracer=CachedTracer(tmp_path, service=service))
    whole = simulator.predict(candidate)
    step = service.rank_step(candidate, rank=3)
    alone = predict_trace(step, cluster=candidate.cluster, stack=candidate.stack, simulator=simulator)
    assert alone.num_ranks == 16
    assert alone.step_time_s == pytest.approx(whole.step_time_s, rel=0.04)
