"""Can a schedule run? Every pass once, none waiting for what never comes, no deadlock."""

from collections import Counter

from echo_explore.core import SpecError
from echo_explore.specs.schedules.passes import PassKind, PipelineSchedule

_LETTER = {
    PassKind.FORWARD: "F",
    PassKind.BACKWARD: "B",
    PassKind.BACKWARD_INPUT: "I",
    PassKind.BACKWARD_WEIGHT: "W",
}
_Done = tuple[str, int, int]
"""("F" | "D" for the gradient of an input, micro-batch, chunk of the model)."""
_SHOWN = 6


def pass_name(kind: int, micro_batch: int, model_chunk: int) -> str:
    """`2F0`: forward of micro-batch 0 in chunk 2 of the model; B, I, W for backwards (torch's notation)."""
    return f"{model_chunk}{_LETTER[PassKind(kind)]}{micro_batch}"


def check_orders(schedule: PipelineSchedule) -> None:
    """Refuse a schedule that cannot run.

    Raises:
        SpecError: a pass that is missing, twice or out of place; a receive without a send; a deadlock, with the passes
            and stages that wait.
    """
    _check_passes(schedule)
    _check_deadlock(schedule)


def _check_passes(schedule: PipelineSchedule) -> None:
    all_micro_batches = range(schedule.micro_batches_of_chunk)
    for stage, order in enumerate(schedule.orders):
        found = Counter(zip(order.phase.tolist(), order.micro_batch.tolist(), order.chunk.tolist(), strict=True))
        twice = [key for key, count in found.items() if count > 1]
        beyond = [key for key in found if not 0 <= key[1] < schedule.micro_batches_of_chunk]
        for keys, rule in (
            (twice, "runs twice"),
            (beyond, f"is beyond the {schedule.micro_batches_of_chunk} micro-batches of the step"),
        ):
            if keys:
                raise SpecError(_field(stage), _named(schedule, stage, keys[0]), rule, "correct the order")
        for chunk in range(schedule.num_chunks):
            for m in all_micro_batches:
                kinds = {kind for kind in PassKind if (kind, m, chunk) in found}
                if kinds not in (
                    {PassKind.FORWARD, PassKind.BACKWARD},
                    {PassKind.FORWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT},
                ):
                    model_chunk = int(schedule.placement[stage, chunk])
                    rule = f"chunk {model_chunk} needs F and either B or both I and W for it, and has "
                    have = "".join(_LETTER[kind] for kind in sorted(kinds)) or "nothing"
                    fix = "write each pass that is missing, and none twice"
                    raise SpecError(_field(stage), f"micro-batch {m}", rule + have, fix)


def _check_deadlock(schedule: PipelineSchedule) -> None:
    num_chunks = schedule.num_model_chunks
    done: set[_Done] = set()
    at = [0] * schedule.num_stages
    passes = [
        list(zip(o.phase.tolist(), o.micro_batch.tolist(), o.chunk.tolist(), strict=True)) for o in schedule.orders
    ]
    joined = [set(order.joined.tolist()) for order in schedule.orders]
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(passes):
            while at[stage] < len(order):
                step = order[at[stage] : at[stage] + 1 + (at[stage] in joined[stage])]
                places = [(kind, m, int(schedule.placement[stage, chunk])) for kind, m, chunk in step]
                if not all(_needs(*place, num_chunks) <= done for place in places):
                    break
                done |= {
                    ("F" if kind == PassKind.FORWARD else "D", m, chunk)
                    for kind, m, chunk in places
                    if kind != PassKind.BACKWARD_WEIGHT
                }
                at[stage] += len(step)
                moved = True
    stuck = [stage for stage, order in enumerate(passes) if at[stage] < len(order)]
    if not stuck:
        return
    waits = []
    for stage in stuck[:_SHOWN]:
        step = passes[stage][at[stage] : at[stage] + 1 + (at[stage] in joined[stage])]
        places = [(kind, m, int(schedule.placement[stage, chunk])) for kind, m, chunk in step]
        kind, m, model_chunk = next(place for place in places if not _needs(*place, num_chunks) <= done)
        missing = sorted(_needs(kind, m, model_chunk, num_chunks) - done)[0]
        what = "forward" if missing[0] == "F" else "backward"
        waits.append(
            f"stage {stage} at {pass_name(kind, m, model_chunk)} for the {what} of micro-batch {m} in chunk "
            f"{missing[2]}"
        )
    rest = sum(len(order) - at[stage] for stage, order in enumerate(passes))
    rule = f"deadlocks with {rest} passes left: {'; '.join(waits)}"
    raise SpecError("schedule", schedule.name, rule, "put each of these behind what it waits for")


def _needs(kind: int, m: int, model_chunk: int, num_chunks: int) -> set[_Done]:
    if kind == PassKind.FORWARD:
        return {("F", m, model_chunk - 1)} if model_chunk % num_chunks else set()
    if kind == PassKind.BACKWARD_WEIGHT:
        return {("D", m, model_chunk)}
    own: set[_Done] = {("F", m, model_chunk)}
    return own if (model_chunk + 1) % num_chunks == 0 else own | {("D", m, model_chunk + 1)}


def _field(stage: int) -> str:
    return f"schedule[{stage}]"


def _named(schedule: PipelineSchedule, stage: int, key: tuple[int, int, int]) -> str:
    kind, m, chunk = key
    return pass_name(kind, m, int(schedule.placement[stage, chunk]))
