"""Arrays that fully sharded data parallelism holds whole for a while, by the piece beside which they are alive."""

from dataclasses import dataclass, replace

import numpy as np

from echo_explore.graph import Piece, Trace, is_layer
from echo_explore.memory.static_state import GRADIENT_BYTES, PARAMETER_BYTES
from echo_explore.specs import Candidate
from echo_explore.specs.sharding import layers_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingBuffers:
    """Bytes of gathered parameters and of gradients on their way to be reduced, beside the pieces of a rank.

    Attributes:
        head_bytes: while the head runs, and the embedding forward: the root, and the layer gathered ahead.
        forward_bytes: while a layer runs forward: the root, the layer, and the one gathered ahead.
        backward_bytes: while a layer, or the embedding, runs backward: the same, with gradients.
        one_by_one: gradients of a layer are reduced as they are made.
        element_bytes: of a gradient as it is made.
    """

    head_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    one_by_one: bool = False
    element_bytes: float = 0.0


def sharding_buffers(candidate: Candidate, trace: Trace) -> ShardingBuffers:
    """What lies beside the sharded state and the activations of a micro-batch.

    For n_r parameters of embedding and head, n_h of the head, n of the largest layer, N of all layers, g and r bytes of
    an element gathered and reduced: n_r g beside everything; (1 + k) n g (the layer that runs and the k ahead, one but
    for `sharding.ahead_elements`), or N g where layers stay whole; in the backward 2 n r (one reduction under way and
    the next), and n_h g where the root's gradients wait for its end (`sharding.root_reduced_at_end`). The gradients of
    the piece that runs are in its trace. Where parameters are gathered and reduced one by one (`sharding.slices`), n is
    that of the largest parameter, and at most a bucket where it is reduced; the root is gathered where it runs only.

    Nothing unless the stack shards parameters and there are several replicas.
    """
    if not candidate.stack.fully_sharded or candidate.num_replicas == 1:
        return ShardingBuffers()
    sharding, wide = candidate.stack.sharding, candidate.recipe.precision == "fp32"
    gathered = PARAMETER_BYTES["fp32" if wide else sharding.gather_dtype]
    reduced = GRADIENT_BYTES["fp32" if wide else candidate.stack.gradient_dtype]
    layers = [trace.pieces[f"layer.{kind}"] for kind in trace.layer_kinds]
    every = sum(layer.num_parameters for layer in layers)
    slices = sharding.slices
    ahead = max(
        max((p.num_elements for p in layer.parameters), default=0) if slices else layer.num_parameters
        for layer in layers
    )
    under_way = min(ahead, slices.bucket_elements) if slices else ahead
    head = trace.pieces["head"].num_parameters
    root = trace.pieces["embedding"].num_parameters + head
    if candidate.model.tied_embeddings:
        root -= candidate.model.vocab_size * candidate.model.hidden_size // candidate.layout.tensor_parallel
    stays = candidate.recipe.reshard_after_forward is False
    next_ones = layers_ahead(sharding, ahead) * ahead
    forward = ((0 if slices else root) + (every if stays else min(ahead + next_ones, every))) * gathered
    held = head * gathered if sharding.root_reduced_at_end else 0.0
    return ShardingBuffers(
        head_bytes=(root + (every if stays else min(next_ones, every))) * gathered,
        forward_bytes=forward,
        backward_bytes=forward + held + 2 * under_way * reduced,
        one_by_one=slices is not None,
        element_bytes=gathered,
    )


def beside(piece: Piece, name: str, buffers: ShardingBuffers) -> Piece:
    """The piece with the buffers that are alive while it runs in its peaks."""
    forward = buffers.forward_bytes if is_layer(name) else buffers.head_bytes
    backward = buffers.head_bytes if name == "head" else buffers.backward_bytes
    peak = piece.backward_peak_bytes
    if buffers.one_by_one and is_layer(name):
        peak = _peak_with_one_gradient(piece, buffers.element_bytes)
    return replace(piece, forward_peak_bytes=piece.forward_peak_bytes + forward, backward_peak_bytes=peak + backward)


def _peak_with_one_gradient(piece: Piece, element_bytes: float) -> float:
    """The most bytes alive in the backward if every gradient of a parameter is gone when the next one is made.

    A row that allocates exactly as much as a parameter's gradient is taken to make it; one that is not found so stays
    (over-estimates).
    """
    left = sorted(p.num_elements * element_bytes for p in piece.parameters if p.trainable)
    allocated, live = piece.backward.allocated_bytes, piece.backward.live_bytes
    gone, latest = np.zeros_like(live), 0.0
    for row, size in enumerate(allocated.tolist()):
        if size > 0 and size in left:
            left.remove(size)
            gone[row:] += latest
            latest = size
    fewer = float((live - gone).max(initial=0.0))
    return min(piece.backward_peak_bytes, fewer) if len(live) else piece.backward_peak_bytes
