import pytest

from echo_explore.memory import MemoryProfile, cheapest_changes, memory_profile
from echo_explore.specs import Candidate, ModelSpec, ParallelConfig
from tests.memory.traces import candidate_of, trace_of

BIG = ModelSpec(
    name="big", num_layers=48, hidden_size=8192, ffn_hidden_size=32768, num_attention_heads=64, vocab_size=51200,
    max_sequence_length=2048,
)  # fmt: skip
STARVED = ParallelConfig(tensor_parallel=8, pipeline_parallel=4, data_parallel=2)


def profile_of(candidate: Candidate) -> MemoryProfile:
    return memory_profile(candidate=candidate, trace=trace_of(candidate))


def test_two_changes_that_fit_cheapest_first() -> None:
    candidate = candidate_of(STARVED, model=BIG, micro_batch_size=8, num_micro_batches=16, attention="unfused")
    assert not profile_of(candidate).fits
    changes = cheapest_changes(candidate, profile_of)
    assert len(changes) == 2
    assert changes[0].cost_fraction <= changes[1].cost_fraction
    for change in changes:
        assert change.profile == profile_of(change.candidate)
        assert change.profile.fits
        assert change.candidate.num_gpus == candidate.num_gpus
        assert change.candidate.recipe.global_batch_size == candidate.recipe.global_batch_size
        assert "\n" not in change.description
        assert ": peak " in change.description
        assert change.description.endswith("GiB")


def test_nothing_is_proposed_for_what_cannot_fit() -> None:
    candidate = candidate_of(ParallelConfig(), model=BIG, distributed_optimizer=False)
    calls: list[Candidate] = []

    def counted(changed: Candidate) -> MemoryProfile:
        calls.append(changed)
        return profile_of(changed)

    assert cheapest_changes(candidate, counted) == ()
    assert calls == []  # weights alone are too large: no trace is asked for


def test_the_number_of_profiles_is_bounded() -> None:
    candidate = candidate_of(STARVED, model=BIG, micro_batch_size=8, num_micro_batches=16, attention="unfused")
    calls: list[Candidate] = []

    def never(changed: Candidate) -> MemoryProfile:
        calls.append(changed)
        profile = profile_of(changed)
        return MemoryProfile(stages=profile.stages, capacity_bytes=1.0)

    assert cheapest_changes(candidate, never, max_profiles=3) == ()
    assert len(calls) == 3


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_as_asked_for(count: int) -> None:
    candidate = candidate_of(STARVED, model=BIG, micro_batch_size=8, num_micro_batches=16, attention="unfused")
    changes = cheapest_changes(candidate, profile_of, count=count, max_profiles=40)
    assert len(changes) == count
    assert len({change.description for change in changes}) == count
