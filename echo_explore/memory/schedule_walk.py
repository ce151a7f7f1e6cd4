"""The most memory that is alive while a pipeline stage runs its passes in the order of its schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from echo_explore.specs.schedules import PassKind, StageOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMemory:
    """Activation bytes of one micro-batch in one model chunk.

    Attributes:
        saved_bytes: that stay from the end of its forward to the start of its backward.
        forward_peak_bytes: most alive during its forward above what was alive before.
        backward_peak_bytes: most alive during its backward, its saved activations included.
        pieces: saved bytes, forward peak and backward peak of each piece, in forward order.
    """

    saved_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    pieces: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPeak:
    """The moment at which most activations are alive on a stage.

    Attributes:
        saved_bytes: saved for backwards to come, by all micro-batches in flight.
        transient_bytes: alive only within the pass that runs at that moment.
        in_flight: micro-batches in flight at that moment, by chunk; the one whose pass runs counts.
    """

    saved_bytes: float
    transient_bytes: float
    in_flight: tuple[int, ...]


def activation_peak(chunks: Sequence[ChunkMemory], order: StageOrder, *, together: bool = False) -> ActivationPeak:
    """The peak over a step of a stage that holds `chunks` and runs its passes in `order`.

    With `together` a forward runs beside the backward of another micro-batch behind it, layer by layer: one saves while
    the other frees [megatron-core 0.16.1, model_chunk_schedule_plan.py, `run`, 2026-12-01].

    # Approximation: what a forward saved stays until the gradients of weights are made, also where gradients of inputs
    # are made apart and need some of it no more (over-estimates).
    """
    in_flight = [0] * len(chunks)
    saved, best, best_saved, best_flight = 0.0, -1.0, 0.0, tuple(in_flight)
    passes = list(zip(order.phase.tolist(), order.chunk.tolist(), order.micro_batch.tolist(), strict=True))
    beside: ChunkMemory | None = None
    for (kind, index, micro_batch), (then, behind, other) in pairwise([*passes, (PassKind.FORWARD, 0, 0)]):
        chunk = chunks[index]
        if kind == PassKind.FORWARD:
            in_flight[index] += 1
            pair = together and then == PassKind.BACKWARD and (behind, other) != (index, micro_batch)
            beside = chunks[behind] if pair else None
            if beside:
                kept, most = _together(chunk, beside)
                held, level = saved - beside.saved_bytes + kept, saved - beside.saved_bytes + most
            else:
                held, level = saved + chunk.saved_bytes, saved + max(chunk.forward_peak_bytes, chunk.saved_bytes)
            saved += chunk.saved_bytes
        else:
            level = 0.0 if beside else saved + max(chunk.backward_peak_bytes - chunk.saved_bytes, 0.0)
            held, beside = saved, None
        if level > best:
            best, best_saved, best_flight = level, held, tuple(in_flight)
        if kind in (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT):
            in_flight[index] -= 1
            saved -= chunk.saved_bytes
    return ActivationPeak(saved_bytes=best_saved, transient_bytes=max(best - best_saved, 0.0), in_flight=best_flight)


def _together(forward: ChunkMemory, backward: ChunkMemory) -> tuple[float, float]:
    """Saved bytes and all bytes of two passes at their highest moment, the k-th piece of one beside the k-th last."""
    kept, remaining = 0.0, backward.saved_bytes
    best_saved = best = 0.0
    for number in range(max(len(forward.pieces), len(backward.pieces))):
        saves, ahead, frees, back = 0.0, 0.0, 0.0, 0.0
        if number < len(forward.pieces):
            saves, ahead, _ = forward.pieces[number]
        if number < len(backward.pieces):
            frees, _, back = backward.pieces[-1 - number]
        level = kept + max(ahead, saves) + remaining + back
        if level > best:
            best, best_saved = level, kept + saves + remaining
        kept, remaining = kept + saves, remaining - frees
    return best_saved, best
