"""The order in which a pipeline stage runs its passes, by name of the schedule, for people to read."""

from typing import Literal

from echo_explore.specs.schedules import PassKind, build_schedule, resolved_schedule

PassName = Literal["forward", "backward", "backward input", "backward weight"]

PASS_NAMES: dict[PassKind, PassName] = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.BACKWARD_INPUT: "backward input",
    PassKind.BACKWARD_WEIGHT: "backward weight",
}


def schedule_order(
    pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int, rank: int, schedule: str = "auto"
) -> list[tuple[PassName, int, int]]:
    """(pass, micro-batch, chunk of the stage) of everything that pipeline stage `rank` runs in a step, in order.

    Raises:
        SpecError: see `specs.schedules.build_schedule`.
    """
    order = build_schedule(
        resolved_schedule(schedule, pipeline_parallel, virtual_pipeline),
        pipeline_parallel=pipeline_parallel,
        virtual_pipeline=virtual_pipeline,
        num_micro_batches=num_micro_batches,
    ).orders[rank]
    return [
        (PASS_NAMES[PassKind(kind)], int(m), int(c))
        for kind, m, c in zip(order.phase, order.micro_batch, order.chunk, strict=True)
    ]
