"""What is kept from call to call changes no number."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.graph import Collective
from echo_explore.testing.strategies import equal_stages_job, interference, pipeline_jobs
from echo_explore.timeline import GradientBucket, PipelineJob, blocks, pipeline, simulate_step
from echo_explore.timeline.recent import Recent
from tests.examples import examples


def forget() -> None:
    of_steps = (pipeline._ALIKE, pipeline._SAME, pipeline._POOLS, pipeline._EPILOGUES)
    for kept in (blocks._PREPARED, blocks._MEASURED, blocks._BLOCKS, *of_steps):
        kept._values.clear()


def test_the_oldest_goes_first() -> None:
    kept: Recent[int] = Recent(2)
    kept.keep(("a",), 1)
    kept.keep(("b",), 2)
    assert kept.get(("a",)) == 1
    kept.keep(("c",), 3)
    assert [kept.get((key,)) for key in "abc"] == [1, None, 3]


@examples(40)
@given(
    job=pipeline_jobs(), slow=st.sampled_from([(1.0, 1.0), (1.5, 1.5)]), fidelity=st.sampled_from(["kernel", "block"])
)
def test_a_warm_call_is_a_cold_one(job: PipelineJob, slow: tuple[float, float], fidelity: str) -> None:
    """A job of the same structure with other transfers and host time goes first, so that its program is there."""
    stages = tuple(replace(s, send_forward_s=s.send_forward_s + 0.5, send_sigma_log=0.3) for s in job.stages)
    simulate_step(replace(job, stages=stages, host_step_s=2.0), interference=interference(1.2), fidelity="kernel")
    warm = simulate_step(job, interference=interference(*slow), fidelity=fidelity)  # type: ignore[arg-type]
    again = simulate_step(job, interference=interference(*slow), fidelity=fidelity)  # type: ignore[arg-type]
    forget()
    cold = simulate_step(job, interference=interference(*slow), fidelity=fidelity)  # type: ignore[arg-type]
    assert warm == again == cold


@pytest.mark.parametrize("column", ["dtype", "name"])
def test_blocks_of_other_types_or_names_are_other_blocks(column: str) -> None:
    """The type decides what a module's Python takes, the name what a message says of a stuck op."""
    timed = equal_stages_job(num_stages=1, num_micro_batches=1).stages[0].chunks[0].forward
    changed = replace(timed.graph, **{column: getattr(timed.graph, column) + 1})
    assert replace(timed, graph=changed).digest != timed.digest


BUCKET = GradientBucket(collective=Collective.ALL_REDUCE, message_bytes=1.0, time_s=1.5, sigma_log=0.1, ready_after=0)


@pytest.mark.parametrize("fidelity", ["kernel", "block"])
@pytest.mark.parametrize(("schedule", "buckets"), [("", ()), ("", (BUCKET,)), ("dualpipe", (BUCKET,))])
def test_blocks_and_programs_are_made_once(
    fidelity: str, schedule: str, buckets: tuple[GradientBucket, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = equal_stages_job(
        num_stages=4,
        num_micro_batches=16,
        num_chunks=2,
        weight=[("gemm", 1.0)],
        send_s=0.25,
        schedule=schedule,
        buckets=buckets,
    )
    first = simulate_step(job, interference=interference(), fidelity=fidelity)  # type: ignore[arg-type]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(blocks, "expand", refuse)
    monkeypatch.setattr(pipeline, "copy_templates", refuse)
    assert simulate_step(job, interference=interference(), fidelity=fidelity) == first  # type: ignore[arg-type]
