import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo_explore.graph import Parameter
from echo_explore.memory import StageMemory, memory_lower_bound, memory_profile
from echo_explore.memory.profile import count_communicators, fragmentation_bytes
from echo_explore.memory.static_state import state_bytes, static_state
from echo_explore.specs import Candidate, MemorySpec, ModelSpec, MoeSpec, ParallelConfig, load_stack
from tests.examples import examples
from tests.memory.traces import MODEL, candidate_of, layer_activation_bytes, trace_of

MIXTURE = MODEL.model_copy(
    update={
        "name": "toy-moe",
        "moe": MoeSpec(num_experts=8, experts_per_token=2, ffn_hidden_size=2048, first_dense_layers=2),
    }
)
UNTIED = MODEL.model_copy(update={"name": "toy-untied", "tied_embeddings": False, "activation": "swiglu"})


@st.composite
def layouts(draw: st.DrawFn) -> ParallelConfig:
    pipeline = draw(st.sampled_from([1, 2, 4]))
    return ParallelConfig(
        tensor_parallel=draw(st.sampled_from([1, 2, 4, 8])),
        pipeline_parallel=pipeline,
        virtual_pipeline=draw(st.sampled_from([1, 2, 4])) if pipeline > 1 else 1,
        data_parallel=draw(st.sampled_from([1, 2, 4])),
        context_parallel=draw(st.sampled_from([1, 2])),
        sequence_parallel=draw(st.booleans()),
    )


def total_static(stages: tuple[StageMemory, ...]) -> float:
    return max(stage.static_bytes for stage in stages)


RECIPES = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["bf16", "fp16", "fp32", "fp8"]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "distributed_optimizer": st.booleans(),
    }
)


@settings(deadline=None)
@given(layouts(), st.sampled_from([MODEL, MIXTURE, UNTIED]), RECIPES)
def test_the_bound_never_exceeds_the_profile(layout: ParallelConfig, model: ModelSpec, recipe: dict[str, Any]) -> None:
    assume(model.moe is None or layout.tensor_parallel == 1)
    candidate = candidate_of(layout, model=model, **recipe)
    profile = memory_profile(candidate=candidate, trace=trace_of(candidate))
    assert 0 < memory_lower_bound(candidate) <= total_static(profile.stages) * (1 + 1e-12)
    assert total_static(profile.stages) <= profile.peak_bytes


@settings(deadline=None)
@given(layouts(), st.sampled_from([MODEL, MIXTURE]), st.sampled_from(["bf16", "fp32", "fp8"]))
def test_static_state_never_rises_with_sharding(layout: ParallelConfig, model: ModelSpec, precision: str) -> None:
    def static(changed: ParallelConfig, *, sharded: bool) -> float:
        candidate = candidate_of(changed, model=model, precision=precision, distributed_optimizer=sharded)
        return total_static(memory_profile(candidate=candidate, trace=trace_of(candidate)).stages)

    assume(model.moe is None or layout.tensor_parallel == 1)
    for sharded in (False, True):
        here = static(layout, sharded=sharded)
        if model.moe is None:
            narrower = layout.model_copy(update={"tensor_parallel": 2 * layout.tensor_parallel})
            assert static(narrower, sharded=sharded) <= here
        assert static(layout.model_copy(update={"data_parallel": 2 * layout.data_parallel}), sharded=sharded) <= here
        if layout.pipeline_parallel < 4 and layout.virtual_pipeline == 1:
            deeper = layout.model_copy(update={"pipeline_parallel": 2 * layout.pipeline_parallel})
            assert static(deeper, sharded=sharded) <= here
    assert static(layout, sharded=True) <= static(layout, sharded=False)


@settings(deadline=None)
@given(layouts(), RECIPES)
def test_parts_add_up_and_the_peak_is_that_of_the_fullest_stage(layout: ParallelConfig, recipe: dict[str, Any]) -> None:
    candidate = candidate_of(layout, **recipe)
    profile = memory_profile(candidate=candidate, trace=trace_of(candidate))
    assert len(profile.stages) == layout.pipeline_parallel
    for row, stage in zip(profile.to_rows(), profile.stages, strict=True):
        parts = {k: v for k, v in row.items() if k not in ("stage", "total_bytes")}
        assert all(value >= 0 for value in parts.values())
        assert sum(parts.values()) == pytest.approx(row["total_bytes"])
        assert stage.total_bytes <= profile.peak_bytes
    assert profile.parts == profile.stages[profile.peak_stage].parts
    assert profile.capacity_bytes == candidate.cluster.device.memory_bytes
    assert profile.fits == (profile.peak_bytes <= profile.capacity_bytes)


@pytest.mark.parametrize(
    ("recipe", "parameter", "gradient", "optimizer"),
    [
        ({"precision": "bf16", "distributed_optimizer": False}, 2, 4, 12),
        ({"precision": "bf16", "distributed_optimizer": True}, 2, 4, 3),
        ({"precision": "fp32", "distributed_optimizer": False}, 4, 4, 8),
        ({"precision": "fp32", "distributed_optimizer": True}, 4, 4, 2),
    ],
)
def test_bytes_a_parameter(recipe: dict[str, Any], parameter: int, gradient: int, optimizer: int) -> None:
    # Rajbhandari et al., arXiv 1910.02054 (2019), section 3.1, with fp32 gradients as Megatron accumulates them.
    candidate = candidate_of(ParallelConfig(data_parallel=4), **recipe)
    trace = trace_of(candidate)
    stage = memory_profile(candidate=candidate, trace=trace).stages[0]
    layers = MODEL.num_layers * trace.pieces["layer.dense"].num_parameters
    elements = layers + trace.pieces["embedding"].num_parameters  # the tied table once
    assert stage.parameters_bytes == parameter * elements
    assert stage.gradients_bytes == gradient * elements
    assert stage.optimizer_bytes == optimizer * elements


def test_experts_are_sharded_over_their_own_replicas() -> None:
    layout = ParallelConfig(data_parallel=8, expert_parallel=4)
    candidate = candidate_of(layout, model=MIXTURE, distributed_optimizer=True)
    trace = trace_of(candidate)
    stage = memory_profile(candidate=candidate, trace=trace).stages[0]
    held = [p for kind in MIXTURE.layer_kinds for p in trace.pieces[f"layer.{kind}"].parameters]
    dense = sum(p.num_elements for p in held if not p.expert) + trace.pieces["embedding"].num_parameters
    expert = sum(p.num_elements for p in held if p.expert)
    assert stage.optimizer_bytes == pytest.approx(12 * (dense / 8 + expert / 2))


def test_a_tied_table_lies_on_both_ends_of_a_pipeline() -> None:
    candidate = candidate_of(ParallelConfig(pipeline_parallel=4), distributed_optimizer=False)
    trace = trace_of(candidate)
    stages = memory_profile(candidate=candidate, trace=trace).stages
    assert stages[0].parameters_bytes == stages[3].parameters_bytes > stages[1].parameters_bytes


@pytest.mark.parametrize(("recompute", "each"), [("none", 34 + 5 * 16 * 2048 / 1024), ("selective", 34)])
def test_activations_of_a_layer_follow_the_published_formula(recompute: str, each: float) -> None:
    # Korthikanti et al., arXiv 2205.05198 (2022), equations 4 and 6: s b h (34 + 5 a s / h) / t, and 34 s b h / t;
    # here of a trace by hand, 16 layers a rank, one micro-batch in flight.
    candidate = candidate_of(ParallelConfig(tensor_parallel=4, sequence_parallel=True), recompute=recompute)
    trace = trace_of(candidate)
    assert layer_activation_bytes(candidate) == 2048 * 1024 * each / 4
    stage = memory_profile(candidate=candidate, trace=trace).stages[0]
    assert stage.in_flight == (1,)
    assert stage.activations_bytes == pytest.approx(16 * 2048 * 1024 * each / 4 + 3 * trace.boundary_bytes)


def test_the_first_stage_of_1f1b_holds_as_many_micro_batches_as_there_are_stages() -> None:
    candidate = candidate_of(ParallelConfig(pipeline_parallel=4), num_micro_batches=8)
    stages = memory_profile(candidate=candidate, trace=trace_of(candidate)).stages
    assert [stage.in_flight for stage in stages] == [(4,), (3,), (2,), (1,)]


def test_communicators_count_axes_in_use() -> None:
    assert count_communicators(ParallelConfig(data_parallel=1)) == 0
    assert count_communicators(ParallelConfig(data_parallel=8)) == 2  # world, data
    # world, tensor, data, transfers, ends, model
    assert count_communicators(ParallelConfig(tensor_parallel=8, pipeline_parallel=4, data_parallel=2)) == 6
    candidate = candidate_of(ParallelConfig(data_parallel=8))
    memory, trace = candidate.stack.memory, trace_of(candidate)
    few, many = (
        memory_profile(candidate=candidate, trace=trace, num_communicators=n).stages[0].framework_bytes for n in (0, 9)
    )
    assert few == memory.context_bytes
    assert many == few + 9 * memory.communicator_bytes


def test_what_is_reserved_leaves_context_and_communicators_out() -> None:
    candidate = candidate_of(ParallelConfig(tensor_parallel=2, data_parallel=2))
    profile = memory_profile(candidate=candidate, trace=trace_of(candidate), num_communicators=3)
    memory = candidate.stack.memory
    assert profile.peak_bytes - profile.reserved_bytes == memory.context_bytes + 3 * memory.communicator_bytes


def test_gradients_of_the_parameters_own_type_stay_where_the_stack_says() -> None:
    candidate = candidate_of(ParallelConfig(tensor_parallel=2, data_parallel=2))
    stack = candidate.stack.model_copy(update={"keeps_model_gradients": True})
    trace = trace_of(candidate)
    before = memory_profile(candidate=candidate, trace=trace).stages[0]
    after = memory_profile(candidate=replace(candidate, stack=stack), trace=trace).stages[0]
    assert after.gradients_bytes == before.gradients_bytes * (4 + 2) / 4


@pytest.mark.parametrize(("kept", "precision", "size"), [("fp16", "fp16", 2), ("fp16", "bf16", 4), ("bf16", "bf16", 2)])
def test_stacks_with_fp16_gradients_keep_fp32_ones_in_bf16_training(kept: str, precision: str, size: int) -> None:
    candidate = candidate_of(ParallelConfig(data_parallel=2), precision=precision)
    stack = candidate.stack.model_copy(update={"gradient_dtype": kept})
    trace = trace_of(candidate)
    wide = memory_profile(candidate=candidate, trace=trace).stages[0]
    found = memory_profile(candidate=replace(candidate, stack=stack), trace=trace).stages[0]
    assert found.gradients_bytes == wide.gradients_bytes * size / 4


def test_narrow_parameters_leave_only_the_quantised_copies_of_weights() -> None:
    layout = ParallelConfig(tensor_parallel=2, data_parallel=2)
    wide = candidate_of(layout, precision="fp8")
    narrow = replace(wide, stack=wide.stack.model_copy(update={"narrow_parameters": True}))
    trace = trace_of(wide)
    saved = [memory_profile(candidate=c, trace=trace).stages[0].parameters_bytes for c in (wide, narrow)]
    assert 0 < saved[1] < saved[0]
    assert memory_lower_bound(narrow) <= memory_profile(candidate=narrow, trace=trace).peak_bytes
    bf16 = candidate_of(layout, precision="bf16")
    same = replace(bf16, stack=bf16.stack.model_copy(update={"narrow_parameters": True}))
    assert memory_profile(candidate=same, trace=trace) == memory_profile(candidate=bf16, trace=trace)


def test_frozen_parameters_have_neither_gradients_nor_optimizer_states() -> None:
    candidate = candidate_of(ParallelConfig(tensor_parallel=2, data_parallel=2))
    frozen = replace(candidate, recipe=candidate.recipe.model_copy(update={"lora_rank": 16}))
    trace = trace_of(candidate)
    pieces = {
        name: replace(piece, parameters=tuple(replace(p, trainable=False) for p in piece.parameters))
        for name, piece in trace.pieces.items()
    }
    stage = memory_profile(candidate=frozen, trace=replace(trace, pieces=pieces)).stages[0]
    whole = memory_profile(candidate=candidate, trace=trace).stages[0]
    assert (stage.gradients_bytes, stage.optimizer_bytes) == (0.0, 0.0)
    assert stage.parameters_bytes == whole.parameters_bytes
    assert 0 < memory_lower_bound(frozen) <= stage.total_bytes


def test_frozen_weights_in_8_bits_may_be_kept_in_one_orientation() -> None:
    candidate = candidate_of(ParallelConfig(tensor_parallel=2, data_parallel=2), precision="fp8")
    narrow = {"narrow_parameters": True}
    trace = trace_of(candidate)
    pieces = {
        name: replace(piece, parameters=tuple(replace(p, trainable=False) for p in piece.parameters))
        for name, piece in trace.pieces.items()
    }

    def parameters(trainable: bool, **changes: bool) -> float:
        changed = replace(candidate, stack=candidate.stack.model_copy(update=narrow | changes))
        used = trace if trainable else replace(trace, pieces=pieces)
        return memory_profile(candidate=changed, trace=used).stages[0].parameters_bytes

    both, one = parameters(False), parameters(False, keeps_transposed_weights=False)
    weights = sum(
        p.num_elements
        for name in ("embedding", *["layer.dense"] * MODEL.num_layers)
        for p in trace.pieces[name].parameters
        if p.tensor_sharded and p.name.endswith(".weight")
    )
    assert both - one == weights
    assert parameters(True) == parameters(True, keeps_transposed_weights=False)


def _on_a_card_of(candidate: Candidate, size: float) -> Candidate:
    device = candidate.cluster.device.model_copy(update={"memory_bytes": size})
    return replace(candidate, cluster=candidate.cluster.model_copy(update={"device": device}))


def test_the_allocator_gives_back_free_segments_before_it_fails() -> None:
    """A step whose gaps do not fit runs, as long as what is in use does, with the gaps that cannot be given back."""
    roomy = candidate_of(ParallelConfig(), num_micro_batches=1)
    pressed = roomy.stack.memory.model_copy(update={"pressed_fragmentation_fraction": 0.03})
    roomy = replace(roomy, stack=roomy.stack.model_copy(update={"memory": pressed}))
    trace = trace_of(roomy)
    stage = memory_profile(candidate=roomy, trace=trace).stages[0]
    memory = roomy.stack.memory
    volatile = stage.activations_bytes + stage.transient_bytes
    assert stage.fragmentation_bytes == memory.fragmentation_fraction * volatile
    in_use = stage.total_bytes - stage.fragmentation_bytes
    least = 0.03 * volatile
    assert 0 < least < stage.fragmentation_bytes
    for share in (0.0, 0.3, 0.7, 1.0):
        size = in_use + least + share * (stage.fragmentation_bytes - least)
        tight = memory_profile(candidate=_on_a_card_of(roomy, size), trace=trace)
        assert tight.fits
        assert tight.peak_bytes == pytest.approx(size, rel=1e-12)
    over = memory_profile(candidate=_on_a_card_of(roomy, in_use + 0.99 * least), trace=trace)
    assert not over.fits
    assert over.peak_bytes == pytest.approx(in_use + least)


@given(st.floats(0, 1e12), st.floats(-1e12, 1e12), st.floats(0, 1), st.floats(0, 1) | st.none())
def test_gaps_grow_with_what_comes_and_goes_and_with_room(
    size: float, room: float, loose: float, tight: float | None
) -> None:
    memory = MemorySpec.model_construct(
        context_bytes=0.0, communicator_bytes=0.0, fragmentation_fraction=loose, pressed_fragmentation_fraction=tight
    )
    here = fragmentation_bytes(size, room, memory)
    assert 0 <= here <= loose * size
    assert here >= min(loose, loose if tight is None else tight) * size
    assert fragmentation_bytes(2 * size, room, memory) >= here
    assert fragmentation_bytes(size, room + 1e9, memory) >= here


@settings(deadline=None)
@given(layouts(), RECIPES)
def test_a_larger_micro_batch_never_needs_less(layout: ParallelConfig, recipe: dict[str, Any]) -> None:
    def peak(micro_batch_size: int) -> float:
        candidate = candidate_of(layout, micro_batch_size=micro_batch_size, num_micro_batches=4, **recipe)
        return memory_profile(candidate=candidate, trace=trace_of(candidate)).peak_bytes

    assert peak(1) <= peak(2) * (1 + 1e-12) <= peak(4) * (1 + 1e-12) ** 2


@examples(50)
@given(layouts(), RECIPES)
def test_the_peak_never_rises_with_tensor_parallelism_zero_or_recomputation(
    layout: ParallelConfig, recipe: dict[str, Any]
) -> None:
    def peak(changed: ParallelConfig, **changes: Any) -> float:
        candidate = candidate_of(changed, **(recipe | changes))
        return memory_profile(candidate=candidate, trace=trace_of(candidate), num_communicators=1).peak_bytes

    here = peak(layout) * (1 + 1e-12)
    if layout.tensor_parallel < 8:
        assert peak(layout.model_copy(update={"tensor_parallel": 2 * layout.tensor_parallel})) <= here
    assert peak(layout, distributed_optimizer=True) <= peak(layout, distributed_optimizer=False) * (1 + 1e-12)
    assert peak(layout, recompute="selective") <= peak(layout, recompute="none") * (1 + 1e-12)


def _shaped(name: str, *shape: int, embedding: bool = False) -> Parameter:
    return Parameter(name=name, num_elements=math.prod(shape), shape=shape, tensor_sharded=True, embedding=embedding)


@pytest.mark.parametrize(("precision", "master"), [("bf16", 4.0), ("fp32", 0.0)])
def test_matrices_under_muon_have_one_momentum(precision: str, master: float) -> None:
    parameters = (_shaped("table", 100, 8, embedding=True), _shaped("linear_fc1.weight", 32, 8), _shaped("bias", 32))
    layout = ParallelConfig(data_parallel=4)
    muon = candidate_of(layout, precision=precision, optimizer="muon")
    adam = candidate_of(layout, precision=precision, distributed_optimizer=False)
    sizes = [static_state(parameters, state_bytes(job)).optimizer_bytes for job in (muon, adam)]
    assert sizes == [(4 + master) * 256 + (8 + master) * 832, (8 + master) * 1088]


def test_the_bound_knows_muon() -> None:
    """Layers hold matrices only, so the bound is their states and Adam's of the table."""
    layout = ParallelConfig(tensor_parallel=2)
    muon, adam = candidate_of(layout, optimizer="muon"), candidate_of(layout, distributed_optimizer=False)
    weights = 16 * 12 * 1024**2 / 2
    assert memory_lower_bound(adam) - memory_lower_bound(muon) == pytest.approx(4 * weights)


@pytest.mark.parametrize(
    ("stack", "results"), [("megatron-core", (0, 0, 0, 1)), ("nanotron", (1, 1, 1, 1)), ("megatron-2022", (0, 0, 0, 1))]
)
def test_a_result_that_is_freed_once_sent_is_not_saved(stack: str, results: tuple[int, ...]) -> None:
    # Received inputs count on every stage but the first, whose embedding makes its own; results where they stay.
    candidate = replace(candidate_of(ParallelConfig(pipeline_parallel=4), recompute="none"), stack=load_stack(stack))
    trace = trace_of(candidate)
    layer, boundary = trace.pieces["layer.dense"].saved_bytes, trace.boundary_bytes
    stages = memory_profile(candidate=candidate, trace=trace).stages
    for stage, kept in zip(stages, results, strict=True):
        # A piece by hand saves its result like a traced one: the head's is what it adds.
        head = trace.pieces["head"].saved_bytes if stage.stage == 3 else 0.0
        each = 4 * layer + boundary * kept + head
        assert stage.activations_bytes == pytest.approx(stage.in_flight[0] * each), stage.stage
