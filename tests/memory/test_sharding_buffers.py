"""What fully sharded data parallelism holds whole, and when."""

from dataclasses import replace
from typing import Any

import pytest

from echo_explore.graph import OpClass, OpKind, OpRow, Parameter, Piece, Trace, build_graph
from echo_explore.memory import memory_profile
from echo_explore.memory.sharding_buffers import beside, sharding_buffers
from echo_explore.specs import Candidate, ParallelConfig, load_stack
from tests.memory.traces import EMPTY, MODEL, candidate_of, trace_of

UNTIED = MODEL.model_copy(update={"name": "toy-untied", "tied_embeddings": False})
NATIVE = load_stack("torch-fsdp2")


def native(sharding: dict[str, Any] | None = None, **changes: Any) -> Candidate:
    stack = NATIVE.model_copy(
        update={"sharding": NATIVE.sharding.model_copy(update=sharding or {}), "gradient_dtype": "fp32"}
    )
    candidate = candidate_of(ParallelConfig(data_parallel=4), model=UNTIED, attention="flash", fusion="fused")
    return replace(candidate, stack=stack, recipe=candidate.recipe.model_copy(update=changes))


def sizes(trace: Trace) -> tuple[int, int]:
    return trace.pieces["embedding"].num_parameters, trace.pieces["layer.dense"].num_parameters


def test_buffers_follow_what_runs() -> None:
    candidate = native()
    trace = trace_of(candidate)
    table, layer = sizes(trace)
    found = sharding_buffers(candidate, trace)
    assert found.head_bytes == 2 * (2 * table + layer)
    assert found.forward_bytes == 2 * (2 * table + 2 * layer)
    assert found.backward_bytes == found.forward_bytes + 2 * table + 4 * 2 * layer
    assert sharding_buffers(replace(candidate, layout=ParallelConfig(data_parallel=1)), trace).backward_bytes == 0.0


def test_root_gradients_that_are_reduced_at_once_are_not_held() -> None:
    trace = trace_of(native())
    table, _ = sizes(trace)
    held, reduced = (
        sharding_buffers(native({"root_reduced_at_end": at_end}), trace).backward_bytes for at_end in (True, False)
    )
    assert held - reduced == 2 * table


def test_layers_that_stay_gathered_all_count() -> None:
    trace = trace_of(native())
    table, layer = sizes(trace)
    kept = sharding_buffers(native(reshard_after_forward=False), trace)
    assert kept.forward_bytes == kept.head_bytes == 2 * (2 * table + MODEL.num_layers * layer)


def test_what_a_layer_holds_is_not_alive_beside_the_loss() -> None:
    """The peak is the larger of the two moments, not the sum of both."""
    candidate = native()
    trace = trace_of(candidate)
    buffers = sharding_buffers(candidate, trace)
    stage = memory_profile(candidate=candidate, trace=trace).stages[0]
    in_use = stage.activations_bytes + stage.transient_bytes
    pieces = trace.pieces
    layers = pieces["embedding"].saved_bytes + MODEL.num_layers * pieces["layer.dense"].saved_bytes
    head = pieces["head"].saved_bytes + pieces["head"].backward_peak_bytes + buffers.head_bytes
    last = pieces["layer.dense"].backward_peak_bytes + buffers.backward_bytes
    assert in_use == pytest.approx(layers + max(head, last))


def _row(name: str, *, allocated: float, freed: float = 0.0) -> OpRow:
    return OpRow(kind=OpKind.COMPUTE, op_class=OpClass.GEMM, name=name, allocated_bytes=allocated, freed_bytes=freed)


def test_gradients_reduced_one_by_one_are_alive_one_at_a_time() -> None:
    parameters = tuple(Parameter(name=f"w{n}", num_elements=100 * n, tensor_sharded=False) for n in (1, 2, 3))
    backward = build_graph(
        [
            _row("recompute", allocated=50.0),
            _row("wgrad", allocated=600.0),
            _row("dgrad", allocated=10.0),
            _row("wgrad", allocated=400.0),
            _row("wgrad", allocated=200.0),
        ]
    )
    piece = Piece(
        forward=EMPTY, backward=backward, parameters=parameters, saved_bytes=1.0, forward_peak_bytes=2.0,
        backward_peak_bytes=1260.0,
    )  # fmt: skip
    slices = {"slices": load_stack("deepspeed-zero3").sharding.slices}
    trace = trace_of(native())
    buffers = sharding_buffers(native(slices), trace)
    largest = max(p.num_elements for p in trace.pieces["layer.dense"].parameters)
    assert buffers.forward_bytes == 2 * 2 * largest
    one = beside(piece, "layer.dense", buffers)
    assert one.backward_peak_bytes == 660.0 + buffers.backward_bytes
    whole = beside(piece, "layer.dense", sharding_buffers(native(), trace))
    assert whole.backward_peak_bytes == 1260.0 + sharding_buffers(native(), trace).backward_bytes


def test_what_goes_to_the_host_lies_beside_layers_only() -> None:
    """Half of the layers are offloaded: one more is on its way while a layer runs, none while the loss does."""
    candidate = native(offload_layers=MODEL.num_layers // 2)
    trace = trace_of(candidate)
    stage = memory_profile(candidate=candidate, trace=trace).stages[0]
    pieces, buffers = trace.pieces, sharding_buffers(candidate, trace)
    layer = pieces["layer.dense"]
    rest = pieces["embedding"].saved_bytes + MODEL.num_layers // 2 * layer.saved_bytes
    head = pieces["head"].saved_bytes + pieces["head"].backward_peak_bytes + buffers.head_bytes
    last = layer.backward_peak_bytes + layer.saved_bytes + buffers.backward_bytes
    assert stage.activations_bytes + stage.transient_bytes == pytest.approx(rest + max(head, last))
