"""Peak memory of every pipeline stage by part, from a trace, a layout and a schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Final

from echo_explore.graph import ChunkShape, Parameter, Piece, Trace, is_layer, piece_of
from echo_explore.memory.schedule_walk import ActivationPeak, ChunkMemory, activation_peak
from echo_explore.memory.sharding_buffers import ShardingBuffers, beside, sharding_buffers
from echo_explore.memory.static_state import state_bytes, static_state
from echo_explore.specs import Candidate, MemorySpec, ModelSpec, ParallelConfig
from echo_explore.specs.recompute import recomputed_groups
from echo_explore.specs.schedules import PipelineSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on a rank of one pipeline stage when most is in use.

    Attributes:
        stage: pipeline stage.
        activations_bytes: saved for the backwards of all micro-batches in flight.
        transient_bytes: alive only within the pass that runs at the peak (logits, gradients of activations; under FSDP2
            gathered parameters and gradients before they are reduced), or while the optimizer runs, if that is the
            peak (gradients and states cast to fp32).
        boundary_bytes: activations and gradients received from and sent to neighbouring stages.
        framework_bytes: CUDA context, communicators, and buffers that the framework keeps for the whole run.
        fragmentation_bytes: reserved by the caching allocator and not in use; less where the GPU is full.
        in_flight: micro-batches in flight at the peak, by chunk of the stage.
    """

    PARTS: ClassVar[tuple[str, ...]] = (
        "parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "transient_bytes",
        "boundary_bytes", "framework_bytes", "fragmentation_bytes",
    )  # fmt: skip
    stage: int
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    transient_bytes: float
    boundary_bytes: float
    framework_bytes: float
    fragmentation_bytes: float
    in_flight: tuple[int, ...]

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part."""
        return {name: getattr(self, name) for name in self.PARTS}

    @property
    def total_bytes(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def static_bytes(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Peak memory of a candidate.

    Attributes:
        stages: one a pipeline stage, in order.
        capacity_bytes: memory of one GPU.
        outside_bytes: of every stage, what no allocator of the framework holds: CUDA context and communicators.
    """

    REFERENCE: ClassVar[str] = (
        "State by parameter, activations by schedule over traced pieces; Korthikanti et al., arXiv 2205.05198 (2022)"
    )
    VERSION: ClassVar[int] = 1
    stages: tuple[StageMemory, ...]
    capacity_bytes: float
    outside_bytes: float = 0.0

    @property
    def peak_stage(self) -> int:
        """The stage that needs most; the lowest on ties."""
        return max(self.stages, key=lambda s: (s.total_bytes, -s.stage)).stage

    @property
    def peak_bytes(self) -> float:
        """What the stage that needs most needs."""
        return self.stages[self.peak_stage].total_bytes

    @property
    def reserved_bytes(self) -> float:
        """What the caching allocator holds of the peak: the figure that runs report as reserved."""
        return self.peak_bytes - self.outside_bytes

    @property
    def fits(self) -> bool:
        """Every stage is within a GPU's memory."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part on the stage that needs most."""
        return self.stages[self.peak_stage].parts

    def to_rows(self) -> tuple[dict[str, float | int], ...]:
        """One row a stage: `stage`, every part, `total_bytes`."""
        return tuple({"stage": s.stage, **s.parts, "total_bytes": s.total_bytes} for s in self.stages)


SHARED_WEIGHT: Final = ("word_embeddings.weight", "output_layer.weight")
"""Names of the tied embedding in the pieces `embedding` and `head` [megatron-core 0.16.1, 2026-11-30]."""


def memory_profile(*, candidate: Candidate, trace: Trace, num_communicators: int | None = None) -> MemoryProfile:
    """Peak memory of every stage of the candidate.

    Args:
        candidate: with a resolved recipe.
        trace: of `tracing.request_of(candidate)`.
        num_communicators: NCCL communicators that a rank opens; None: one for each axis with more than one rank.
    """
    memory = candidate.stack.memory
    if num_communicators is None:
        num_communicators = count_communicators(candidate.layout)
    outside = memory.context_bytes + num_communicators * memory.communicator_bytes
    framework = outside + float(trace.facts.get("workspace_bytes", 0.0))
    return MemoryProfile(
        stages=tuple(
            _stage_memory(candidate, trace, stage, framework) for stage in range(candidate.layout.pipeline_parallel)
        ),
        capacity_bytes=candidate.cluster.device.memory_bytes,
        outside_bytes=outside,
    )


def count_communicators(layout: ParallelConfig) -> int:
    """NCCL communicators of a rank: the world, and one for each axis with more than one rank.

    Megatron makes more groups than it uses; NCCL connects a communicator at its first collective.
    """
    stages, tensor, experts = layout.pipeline_parallel, layout.tensor_parallel, layout.expert_parallel
    split = layout.expert_tensor_parallel  # as given: dense models have no such group
    replicas = layout.data_parallel * layout.context_parallel
    used = (
        layout.num_gpus > 1,  # world
        tensor > 1,
        layout.context_parallel > 1,
        replicas > 1,
        stages > 1,  # transfers
        stages > 1,  # first and last stage
        stages * tensor > 1,  # model: gradient norm
        experts > 1,
        split > 1,
        experts > 1 and split > 1,
        experts > 1 and layout.expert_data_parallel > 1,
    )
    return sum(used)


def _stage_memory(candidate: Candidate, trace: Trace, stage: int, framework_bytes: float) -> StageMemory:
    shapes = stage_chunks(candidate, stage)
    state = static_state(stage_parameters(candidate, trace, shapes), state_bytes(candidate))
    peak = stage_peak(candidate, trace, stage)
    boundary = trace.boundary_bytes * num_boundary_buffers(candidate)
    full = StageMemory(
        stage=stage,
        parameters_bytes=state.parameters_bytes,
        gradients_bytes=state.gradients_bytes,
        optimizer_bytes=state.optimizer_bytes,
        activations_bytes=peak.saved_bytes,
        transient_bytes=peak.transient_bytes,
        boundary_bytes=boundary,
        framework_bytes=framework_bytes,
        fragmentation_bytes=0.0,
        in_flight=peak.in_flight,
    )
    volatile = peak.saved_bytes + peak.transient_bytes
    if state.update_bytes > volatile:  # no activation is alive then
        volatile = state.update_bytes
        nothing = tuple(0 for _ in peak.in_flight)
        full = replace(full, activations_bytes=0.0, transient_bytes=volatile, in_flight=nothing)
    room = candidate.cluster.device.memory_bytes - full.total_bytes
    # State is allocated once, in few large arrays; what comes and goes leaves gaps.
    gaps = fragmentation_bytes(volatile, room, candidate.stack.memory)
    if room >= gaps and full.total_bytes + gaps > candidate.cluster.device.memory_bytes:  # by rounding
        gaps = math.nextafter(gaps, 0.0)
    return replace(full, fragmentation_bytes=gaps)


def stage_peak(candidate: Candidate, trace: Trace, stage: int, *, beside_pieces: bool = True) -> ActivationPeak:
    """The moment of a step at which most activations and buffers are alive; `beside_pieces`: sharding's too."""
    return activation_peak(
        [
            chunk_memory(chunk_pieces_kept(candidate, trace, shape, beside_pieces=beside_pieces))
            for shape in stage_chunks(candidate, stage)
        ],
        _walked(candidate).orders[stage],
        together=candidate.overlaps_exchanges,
    )


def fragmentation_bytes(volatile_bytes: float, room_bytes: float, memory: MemorySpec) -> float:
    """Bytes that the caching allocator reserves beyond those in use.

    phi v, of v bytes that come and go, where the GPU has room for it; else all the room, but not less than phi' v, for
    the fraction phi' that the allocator cannot give back.
    """
    loose, tight = memory.fragmentation_fraction, memory.pressed_fragmentation_fraction
    least = (loose if tight is None else min(tight, loose)) * volatile_bytes
    return max(least, min(loose * volatile_bytes, room_bytes))


def _walked(candidate: Candidate) -> PipelineSchedule:
    """The candidate's schedule, or one of 3 p micro-batches with the same peak.

    The warm-up of a periodic schedule takes fewer than (v + 1) p passes and its steady phase repeats every v p passes,
    so that the step of 3 p micro-batches has the same peak as any longer one.
    """
    schedule = candidate.schedule
    enough = 3 * schedule.num_stages
    return candidate.schedule_of(enough) if schedule.is_periodic and enough < schedule.num_micro_batches else schedule


def num_boundary_buffers(candidate: Candidate) -> int:
    """Boundary tensors alive at once: none without pipelining, else one received and one sent, twice that with overlap.

    Under the interleaved schedule with overlap the next tensor is received while the last is sent, in both directions
    [megatron-core 0.16.1, schedules.py, 2026-11-30].
    """
    if candidate.layout.pipeline_parallel == 1:
        return 0
    return 4 if candidate.layout.virtual_pipeline > 1 and candidate.recipe.overlap_p2p else 2


def stage_chunks(candidate: Candidate, stage: int) -> tuple[ChunkShape, ...]:
    """The chunks of a stage in the order of its virtual pipeline: as its schedule places them."""
    layers, schedule = candidate.chunk_layers, candidate.schedule
    return tuple(
        ChunkShape(
            first_layer=sum(layers[:chunk]),
            num_layers=layers[chunk],
            has_embedding=chunk == 0,
            has_head=chunk == schedule.num_model_chunks - 1,
            recomputed=recomputed_groups(candidate.recipe.recompute, layers[chunk]),
        )
        for chunk in (schedule.placement[stage] % schedule.num_model_chunks).tolist()
    )


def saved_bytes(candidate: Candidate, trace: Trace) -> tuple[tuple[float, ...], ...]:
    """Activation bytes that the forward of one micro-batch leaves for its backward, by stage and chunk of the stage."""
    return tuple(
        tuple(
            chunk_memory(chunk_pieces_kept(candidate, trace, shape)).saved_bytes
            for shape in stage_chunks(candidate, stage)
        )
        for stage in range(candidate.layout.pipeline_parallel)
    )


def chunk_pieces_kept(
    candidate: Candidate, trace: Trace, shape: ChunkShape, *, beside_pieces: bool = True
) -> list[Piece]:
    """The pieces of a chunk with what lies beside them while they run, what it receives and what it has sent: `_sent`.

    What layers save that goes to the host is back on the GPU while they run backward. Beside every layer another one's
    is on its way to the host or back (Transformer Engine 2, cpu_offload.py, 2026-12-01: groups are sent and fetched
    evenly over the layers of a pass), beside embedding and head none.
    """
    pieces, layer = [], shape.first_layer
    buffers = sharding_buffers(candidate, trace) if beside_pieces else ShardingBuffers()
    moved = offload_buffer_bytes(candidate, trace)
    for name in shape.piece_names(trace.layer_kinds):
        piece = beside(piece_of(trace, name), name, buffers)
        if is_layer(name):
            own = piece.saved_bytes if layer < candidate.recipe.offload_layers else 0.0
            piece = replace(
                piece,
                saved_bytes=piece.saved_bytes - own,
                forward_peak_bytes=piece.forward_peak_bytes + moved,
                backward_peak_bytes=piece.backward_peak_bytes + own + moved,
            )
            layer += 1
        pieces.append(piece)
    return _sent(candidate, trace, shape, pieces)


def frees_output(candidate: Candidate, shape: ChunkShape) -> bool:
    """Whether the result of a chunk is freed once the next one has it: its backward needs none of its numbers.

    Megatron sets it to one number after sending (megatron-core 0.16.1, schedules.py, deallocate_output_tensor).
    """
    return candidate.stack.memory.frees_stage_outputs and not shape.has_head


def _sent(candidate: Candidate, trace: Trace, shape: ChunkShape, pieces: list[Piece]) -> list[Piece]:
    """The pieces of a chunk that receives its input, unless it holds the embedding, and sends its result.

    A traced piece saves its result, which is the input of the piece behind it. So the first piece of a chunk has the
    input that came from elsewhere beside it, and the last one no longer saves a result that is freed.
    """
    if not pieces:
        return pieces
    pieces, size = list(pieces), trace.boundary_bytes
    if not shape.has_embedding:
        first = pieces[0]
        pieces[0] = replace(
            first, saved_bytes=first.saved_bytes + size, forward_peak_bytes=first.forward_peak_bytes + size
        )
    if frees_output(candidate, shape):
        last = pieces[-1]
        pieces[-1] = replace(
            last,
            saved_bytes=last.saved_bytes - size,
            forward_peak_bytes=max(last.forward_peak_bytes, last.saved_bytes),
        )
    return pieces


def offload_buffer_bytes(candidate: Candidate, trace: Trace) -> float:
    """Bytes of the layer on its way to the host or back while another runs: what the largest of them saves."""
    kinds = trace.layer_kinds[: candidate.recipe.offload_layers]
    return max((trace.pieces[f"layer.{kind}"].saved_bytes for kind in kinds), default=0.0)


def stage_parameters(candidate: Candidate, trace: Trace, shapes: Sequence[ChunkShape]) -> list[Parameter]:
    """Parameters of a stage; a tied embedding whose two uses lie on the stage counts once.

    Multi-token prediction wants an embedding beside the loss: see `prediction_embedding`.
    """
    names = [name for shape in shapes for name in shape.piece_names(trace.layer_kinds)]
    once = candidate.model.tied_embeddings and "embedding" in names and "head" in names
    return [
        parameter
        for name in names
        for parameter in piece_of(trace, name).parameters
        if not (once and name == "head" and parameter.name.endswith(SHARED_WEIGHT))
    ] + [parameter for shape in shapes for parameter in prediction_embedding(candidate.model, trace, shape)]


def prediction_embedding(model: ModelSpec, trace: Trace, shape: ChunkShape) -> tuple[Parameter, ...]:
    """Parameters of the embedding that multi-token prediction keeps in the chunk of the loss, where it has no other.

    A tied output matrix serves for it [megatron-core 0.16.1, gpt_model.py, 2026-12-01].
    """
    wanted = model.multi_token_prediction_layers > 0 and not model.tied_embeddings
    if not wanted or not shape.has_head or shape.has_embedding:
        return ()
    return trace.pieces["embedding"].parameters


def chunk_memory(pieces: Sequence[Piece]) -> ChunkMemory:
    """Activation bytes of one micro-batch in a chunk, from those of its pieces in forward order.

    The forward peaks in some piece k at sum_{i<k} saved_i + forward_peak_k, the backward at
    sum_{i<=k} saved_i + backward_peak_k, as pieces free what they saved from the last to the first.
    """
    saved = forward = backward = 0.0
    for piece in pieces:
        forward = max(forward, saved + piece.forward_peak_bytes)
        saved += piece.saved_bytes
        backward = max(backward, saved + piece.backward_peak_bytes)
    return ChunkMemory(
        saved_bytes=saved,
        forward_peak_bytes=max(forward, saved),
        backward_peak_bytes=max(backward, saved),
        pieces=tuple((p.saved_bytes, p.forward_peak_bytes, p.backward_peak_bytes) for p in pieces),
    )


assert {f.name for f in fields(StageMemory)} == {"stage", "in_flight", *StageMemory.PARTS}
