"""What the parts of a stage's memory consist of: activations by tensor, copies, buffers, context, communicators."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from echo_explore.graph import Trace, is_layer, piece_of
from echo_explore.memory.profile import (
    StageMemory,
    chunk_pieces_kept,
    count_communicators,
    frees_output,
    offload_buffer_bytes,
    stage_chunks,
    stage_parameters,
    stage_peak,
)
from echo_explore.memory.static_state import state_bytes, static_state
from echo_explore.specs import Candidate

INPUTS = "inputs that layers keep, and others"
"""What no row of a piece made that its backward needs: results of the piece before it, mostly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDetails:
    """Bytes on a rank of one stage, of the parts that `StageMemory` names.

    Attributes:
        stage: pipeline stage.
        quantised_copies_bytes: of parameters: copies of weight matrices in 8 or 4 bits.
        sharding_buffers_bytes: of the transient part: gathered parameters and gradients on their way to be reduced.
        offload_buffers_bytes: of the transient part: what is on its way to the host or back.
        context_bytes, communicators_bytes, workspace_bytes: of the framework's part: CUDA context, NCCL's buffers, and
            arrays that the framework keeps for the whole run.
        activations_bytes: of the activations: by piece, module and operator that made them, the largest first.
    """

    stage: int
    quantised_copies_bytes: float
    sharding_buffers_bytes: float
    offload_buffers_bytes: float
    context_bytes: float
    communicators_bytes: float
    workspace_bytes: float
    activations_bytes: Mapping[str, float]


def stage_details(candidate: Candidate, trace: Trace, memory: StageMemory) -> StageDetails:
    """What the parts of one stage of `memory_profile(candidate=candidate, trace=trace)` consist of."""
    spec, shapes = candidate.stack.memory, stage_chunks(candidate, memory.stage)
    each = state_bytes(candidate)
    parameters = stage_parameters(candidate, trace, shapes)
    # Narrow parameters have nothing but copies; where a rank holds a share of the weights, copies are made on the way.
    plain = static_state(parameters, replace(each, quantised_copy_bytes=0.0, one_orientation=False))
    sharding = 0.0
    if candidate.stack.fully_sharded:
        alone = stage_peak(candidate, trace, memory.stage, beside_pieces=False)
        sharding = max(
            memory.activations_bytes + memory.transient_bytes - alone.saved_bytes - alone.transient_bytes, 0.0
        )
    return StageDetails(
        stage=memory.stage,
        quantised_copies_bytes=max(memory.parameters_bytes - plain.parameters_bytes, 0.0),
        sharding_buffers_bytes=sharding,
        offload_buffers_bytes=min(offload_buffer_bytes(candidate, trace), memory.transient_bytes),
        context_bytes=spec.context_bytes,
        communicators_bytes=count_communicators(candidate.layout) * spec.communicator_bytes,
        workspace_bytes=float(trace.facts.get("workspace_bytes", 0.0)),
        activations_bytes=_by_tensor(candidate, trace, memory),
    )


def _label(name: str) -> str:
    return "layers" if is_layer(name) else name


def _result_key(trace: Trace, name: str) -> str:
    """The key of what a piece hands on."""
    return f"{_label(name)}: {piece_of(trace, name).result_label(trace.boundary_bytes)}"


def _by_tensor(candidate: Candidate, trace: Trace, memory: StageMemory) -> dict[str, float]:
    found: dict[str, float] = {}
    for shape, in_flight in zip(stage_chunks(candidate, memory.stage), memory.in_flight, strict=True):
        kept = chunk_pieces_kept(candidate, trace, shape)
        names = shape.piece_names(trace.layer_kinds)
        times = Counter(name for name, piece in zip(names, kept, strict=True) if piece.saved_bytes > 0)
        for name, count in times.items():
            piece = piece_of(trace, name)
            label = _label(name)
            if sum(size for _, size in piece.saved_tensors) > piece.saved_bytes:
                continue  # it frees more than it makes: told apart nowhere
            for tensor, size in piece.saved_tensors:
                key = f"{label}: {tensor}"
                found[key] = found.get(key, 0.0) + size * count * in_flight
        if kept and kept[-1].saved_bytes > 0 and frees_output(candidate, shape):
            key = _result_key(trace, names[-1])
            if key in found:
                found[key] = max(0.0, found[key] - trace.boundary_bytes * in_flight)
    rest = memory.activations_bytes - sum(found.values())
    if rest < 0:  # more than the peak holds: a pass ran beside another one
        return {INPUTS: memory.activations_bytes}
    return dict(sorted({**found, INPUTS: rest}.items(), key=lambda item: -item[1]))
