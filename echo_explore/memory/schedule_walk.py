"""The most memory that is alive while a pipeline stage runs its passes in the order of its schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from echo_explore.specs.schedules import PassKind, StageOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMemory:
    """Activation bytes of one micro-batch in one model chunk.

    Attributes:
        saved_bytes: that stay from the end of its forward to the start of its backward.
        forward_peak_bytes: most alive during its forward above what was alive before.
        backward_peak_bytes: most alive during its backward, its saved activations included.
    """

    saved_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float


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


def activation_peak(chunks: Sequence[ChunkMemory], order: StageOrder) -> ActivationPeak:
    """The peak over a step of a stage that holds `chunks` and runs its passes in `order`.

    # Approximation: what a forward saved stays until the gradients of weights are made, also where gradients of inputs
    # are made apart and need some of it no more (over-estimates).
    """
    in_flight = [0] * len(chunks)
    saved, best, best_saved, best_flight = 0.0, -1.0, 0.0, tuple(in_flight)
    for kind, index in zip(order.phase.tolist(), order.chunk.tolist(), strict=True):
        chunk = chunks[index]
        if kind == PassKind.FORWARD:
            in_flight[index] += 1
            level = saved + max(chunk.forward_peak_bytes, chunk.saved_bytes)
            saved += chunk.saved_bytes
        else:
            level = saved + max(chunk.backward_peak_bytes - chunk.saved_bytes, 0.0)
        if level > best:
            best, best_saved, best_flight = level, saved, tuple(in_flight)
        if kind in (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT):
            in_flight[index] -= 1
            saved -= chunk.saved_bytes
    return ActivationPeak(saved_bytes=best_saved, transient_bytes=max(best - best_saved, 0.0), in_flight=best_flight)
