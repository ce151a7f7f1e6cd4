"""The order in which a pipeline stage runs forwards and backwards, and the most memory that is alive on the way.

Orders follow megatron-core 0.16.1, pipeline_parallel/schedules.py (`get_pp_rank_microbatches`, `get_schedule_table`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


def num_warmup_passes(*, num_stages: int, stage: int, num_chunks: int, num_micro_batches: int) -> int:
    """Forwards before the first backward's partner: w of Megatron.

    1F1B: min(m, p - i - 1); interleaved: min(m v, 2 (p - i - 1) + (v - 1) p), for stage i of p, v chunks, m
    micro-batches; 0 without pipelining.
    """
    ahead = num_stages - stage - 1
    warmup = ahead if num_chunks == 1 else 2 * ahead + (num_chunks - 1) * num_stages
    return min(warmup if num_stages > 1 else 0, num_micro_batches * num_chunks)


def _forward_chunks(num_stages: int, num_chunks: int, num_micro_batches: int) -> list[int]:
    """Chunk of every forward in order: groups of `num_stages` micro-batches go through all chunks in turn."""
    order: list[int] = []
    for start in range(0, num_micro_batches, num_stages):
        group = min(num_stages, num_micro_batches - start)
        order += [chunk for chunk in range(num_chunks) for _ in range(group)]
    return order


def pass_order(*, num_stages: int, stage: int, num_chunks: int, num_micro_batches: int) -> Iterator[tuple[int, bool]]:
    """(chunk, whether it is a forward) of every pass of a stage in Megatron's order.

    Warm-up forwards, then one forward and one backward in turn, then the backwards that are left.
    """
    forwards = _forward_chunks(num_stages, num_chunks, num_micro_batches)
    backwards = [num_chunks - 1 - chunk for chunk in forwards]
    warmup = num_warmup_passes(
        num_stages=num_stages, stage=stage, num_chunks=num_chunks, num_micro_batches=num_micro_batches
    )
    yield from ((chunk, True) for chunk in forwards[:warmup])
    steady = len(forwards) - warmup
    for position in range(steady):
        yield forwards[warmup + position], True
        yield backwards[position], False
    yield from ((chunk, False) for chunk in backwards[steady:])


def activation_peak(
    chunks: Sequence[ChunkMemory], *, num_stages: int, stage: int, num_micro_batches: int
) -> ActivationPeak:
    """The peak over a step of a stage that holds `chunks`.

    The warm-up takes fewer than (v + 1) p passes and the steady phase repeats every v p passes, so that the step of
    3 p micro-batches has the same peak as any longer one.
    """
    enough = min(num_micro_batches, 3 * num_stages)
    in_flight = [0] * len(chunks)
    saved, best, best_saved, best_flight = 0.0, -1.0, 0.0, tuple(in_flight)
    for index, forward in pass_order(
        num_stages=num_stages, stage=stage, num_chunks=len(chunks), num_micro_batches=enough
    ):
        chunk = chunks[index]
        if forward:
            in_flight[index] += 1
            level = saved + max(chunk.forward_peak_bytes, chunk.saved_bytes)
            saved += chunk.saved_bytes
        else:
            level = saved + max(chunk.backward_peak_bytes - chunk.saved_bytes, 0.0)
        if level > best:
            best, best_saved, best_flight = level, saved, tuple(in_flight)
        if not forward:
            in_flight[index] -= 1
            saved -= chunk.saved_bytes
    return ActivationPeak(saved_bytes=best_saved, transient_bytes=max(best - best_saved, 0.0), in_flight=best_flight)
