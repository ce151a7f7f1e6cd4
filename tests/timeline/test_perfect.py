"""What better overlap could gain at most."""

import pytest
from hypothesis import given

from echo_explore.testing.strategies import equal_stages_job, interference, pipeline_jobs
from echo_explore.timeline import PipelineJob, perfectly_overlapped, simulate_step
from tests.examples import examples


def test_a_pass_lasts_as_long_as_its_kernels_or_its_transfers() -> None:
    job = equal_stages_job(
        num_stages=1,
        num_micro_batches=2,
        forward=[("gemm", 1.0), ("sync", 0.5), ("gemm", 1.0)],
        backward=[("sync", 3.0), ("gemm", 1.0)],
    )
    assert simulate_step(job, interference=interference(), fidelity="kernel").step_time_s == pytest.approx(13.0)
    perfect = simulate_step(perfectly_overlapped(job), interference=interference(), fidelity="kernel")
    assert perfect.step_time_s == pytest.approx(2 * (2.0 + 3.0))


@examples(25)
@given(job=pipeline_jobs(data_parallel=False))
def test_never_below_the_kernels_of_the_busiest_class(job: PipelineJob) -> None:
    step = simulate_step(perfectly_overlapped(job), interference=interference(), fidelity="kernel")
    assert step.step_time_s >= max(times.busy_s["compute"] for times in step.classes) * (1 - 1e-9)
