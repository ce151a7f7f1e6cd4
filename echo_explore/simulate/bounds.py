"""What no prediction of a candidate can be below, from its dimensions: no trace, about a millisecond."""

from dataclasses import dataclass

from echo_explore.compute.flop import layer_forward_flop, logits_forward_flop, masked_fraction, recomputed_flop
from echo_explore.memory import memory_lower_bound
from echo_explore.simulate.layer_bound import LayerProducts
from echo_explore.simulate.slowest import slowest_factor
from echo_explore.specs import Candidate
from echo_explore.specs.model import feed_forward_kind
from echo_explore.specs.recompute import recompute_of_layers
from echo_explore.timeline import cheap_bound

_PASSES = 3.0
"""A forward, and a backward of twice its FLOP."""
_WHOLE_BACKWARDS = ("no-pipelining", "1f1b", "interleaved", "gpipe")
"""Schedules that start with a forward of each micro-batch and end with a whole backward, and so have its bubble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBounds:
    """Bounds of one candidate.

    Attributes:
        step_time_s: at most the predicted step time at fidelity `kernel` and `block`.
        peak_memory_bytes: at most the predicted peak.
    """

    step_time_s: float
    peak_memory_bytes: float


def lower_bounds(candidate: Candidate, products: LayerProducts | None = None) -> LowerBounds:
    """The bounds; admissible because no kernel is priced above the peak rate of its stage's slowest GPU.

    The work of a stage is the executed FLOP of its layers (recomputation included, a causal flash kernel at half) and,
    on the last, of the logits, at the peak; of dense layers the products as they are priced, and the exchanges that
    nothing hides. Where chunks are equal the 1F1B bubble of the layers alone is a second bound.

    Args:
        candidate: the candidate.
        products: of a dense layer on the mean GPU; None: at the peak, without exchanges.
    """
    layout = candidate.layout
    recompute = candidate.recipe.recompute
    words = {word for count in candidate.chunk_layers for word in recompute_of_layers(recompute, count)}
    layer_kinds = candidate.model.layer_kinds
    kinds = set(layer_kinds)
    peak = _peak_flop_per_s(candidate)
    stage_gpus = candidate.num_gpus // layout.pipeline_parallel
    slowest = slowest_factor(stage_gpus, candidate.cluster.device.clock_spread_fraction)
    layer = {(kind, word): slowest * _layer_flop(candidate, kind, word) / peak for kind in kinds for word in words}
    if products is not None:
        for kind, word in layer:
            if feed_forward_kind(kind) == "dense":
                times = 2 if word == "full" else 1
                layer[kind, word] += slowest * _beyond_peak_s(products, peak, times) + times * products.exchanges_s
    stages = [0.0] * layout.pipeline_parallel
    first = 0
    chunks = []
    schedule = candidate.schedule
    stage_of, _ = schedule.stage_and_chunk()
    for count in candidate.chunk_layers:
        here = layer_kinds[first : first + count]
        chunks.append(sum(layer[pair] for pair in zip(here, recompute_of_layers(recompute, count), strict=True)))
        first += count
    for place, stage in enumerate(stage_of.tolist()):  # of two copies each does half of the micro-batches
        stages[stage] += chunks[place % len(chunks)] / schedule.num_copies
    m = candidate.num_micro_batches
    equal = min(chunks) * layout.virtual_pipeline
    bubble_s = _bound(candidate, [equal * m] * layout.pipeline_parallel, equal=True)
    for stage in stage_of[len(chunks) - 1 :: len(chunks)].tolist():
        stages[stage] += slowest * _logits_flop(candidate) / peak / schedule.num_copies
    if candidate.schedule.name in _WHOLE_BACKWARDS:
        step_time_s = max(bubble_s, _bound(candidate, [work * m for work in stages], equal=False))
    else:
        step_time_s = _bound(candidate, [max(stages) * m], equal=False)
    return LowerBounds(step_time_s=step_time_s, peak_memory_bytes=memory_lower_bound(candidate))


def _peak_flop_per_s(candidate: Candidate) -> float:
    peak, precision = candidate.cluster.device.peak_flop_per_s, candidate.recipe.precision
    return max(peak.values()) if precision not in ("bf16", "fp16") else peak[precision]


def _beyond_peak_s(products: LayerProducts, peak_flop_per_s: float, forwards: int) -> float:
    """What a layer's products take longer than at the peak."""
    forward_s = products.forward_s - products.flop / peak_flop_per_s
    return forwards * forward_s + products.backward_s - 2.0 * products.flop / peak_flop_per_s


def _bound(candidate: Candidate, work_s: list[float], *, equal: bool) -> float:
    return cheap_bound(
        flop=work_s,
        bytes_moved=[0.0] * len(work_s),
        peak_flop_per_s=1.0,
        memory_bandwidth_bytes_per_s=1.0,
        num_micro_batches=candidate.num_micro_batches,
        virtual_pipeline=candidate.layout.virtual_pipeline,
        equal_stages=equal,
    )


def _tokens(candidate: Candidate) -> int:
    return candidate.recipe.micro_batch_size * candidate.recipe.sequence_length


def _share(candidate: Candidate) -> float:
    return 1.0 / (candidate.layout.tensor_parallel * candidate.layout.context_parallel)


def _layer_flop(candidate: Candidate, kind: str, recompute: str) -> float:
    """Executed FLOP of one layer, with what it runs again, for one micro-batch on one rank."""
    recipe, model = candidate.recipe, candidate.model
    fused = recipe.attention == "flash"
    fraction = masked_fraction(model, kind, sequence_length=recipe.sequence_length) if fused else 1.0
    forward = layer_forward_flop(
        model,
        kind=feed_forward_kind(kind),
        sequence_length=recipe.sequence_length,
        num_tokens=_tokens(candidate),
        attended_fraction=fraction,
    )
    again = recomputed_flop(
        model,
        kind=feed_forward_kind(kind),
        recompute=recompute,
        sequence_length=recipe.sequence_length,
        num_tokens=_tokens(candidate),
        attended_fraction=fraction,
    )
    # An expert whose capacity is below its fair share does less; so then may the whole layer.
    taken = min(1.0, recipe.expert_capacity_factor or 1.0) if feed_forward_kind(kind) == "moe" else 1.0
    return (forward * _PASSES + again) * _share(candidate) * taken


def _logits_flop(candidate: Candidate) -> float:
    padded = candidate.stack.framework == "megatron"  # others do not pad the vocabulary
    rows = candidate.model.padded_vocab_size(candidate.layout.tensor_parallel)
    vocab = rows if padded else candidate.model.vocab_size
    forward = logits_forward_flop(candidate.model, num_tokens=_tokens(candidate), padded_vocab_size=vocab)
    return forward * _PASSES * _share(candidate)
