"""Arrays that FSDP2 holds whole for a while: gathered parameters, and gradients on their way to be reduced."""

from echo_explore.graph import Trace
from echo_explore.memory.static_state import GRADIENT_BYTES, PARAMETER_BYTES
from echo_explore.specs import Candidate


def sharding_buffer_bytes(candidate: Candidate, trace: Trace) -> float:
    """Bytes beside sharded state and activations at the peak, which is in a backward.

    For n_r parameters of embedding and head, n of the largest layer, N of all layers, g and r bytes of an element
    gathered and reduced: n_r 2 g (parameters and gradients of the root), 2 n g (the layer that runs and the next) or
    N g where layers stay whole, and 2 n r (one reduction under way and the next). The gradients of the layer that runs
    are in its trace. Where parameters are gathered and reduced one by one (`sharding.slices`), the next layer and the
    reductions are those of the largest parameter.

    0 unless the stack shards parameters and there are several replicas.
    """
    if not candidate.stack.fully_sharded or candidate.num_replicas == 1:
        return 0.0
    wide = candidate.recipe.precision == "fp32"
    gathered = PARAMETER_BYTES["fp32" if wide else candidate.stack.sharding.gather_dtype]
    reduced = GRADIENT_BYTES["fp32" if wide else candidate.stack.gradient_dtype]
    layers = [trace.pieces[f"layer.{kind}"].num_parameters for kind in trace.layer_kinds]
    root = trace.pieces["embedding"].num_parameters + trace.pieces["head"].num_parameters
    if candidate.model.tied_embeddings:
        root -= candidate.model.vocab_size * candidate.model.hidden_size // candidate.layout.tensor_parallel
    largest = ahead = max(layers)
    if candidate.stack.sharding.slices is not None:
        ahead = max(p.num_elements for kind in trace.layer_kinds for p in trace.pieces[f"layer.{kind}"].parameters)
    whole = sum(layers) if candidate.recipe.reshard_after_forward is False else min(largest + ahead, sum(layers))
    return 2 * root * gathered + whole * gathered + 2 * ahead * reduced
