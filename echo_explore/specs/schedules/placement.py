"""Which schedule a layout means, and which chunks of the model a stage holds."""

V_SHAPED = ("zbv", "dualpipev", "dualpipe")
"""Schedules whose stage s of p holds places s and 2 p - 1 - s, so that the last is on stage 0."""


def default_schedule(pipeline_parallel: int, virtual_pipeline: int) -> str:
    """What Megatron runs with these stages and chunks: no-pipelining, 1f1b or interleaved."""
    if pipeline_parallel == 1 and virtual_pipeline == 1:
        return "no-pipelining"
    return "interleaved" if virtual_pipeline > 1 else "1f1b"


def resolved_schedule(name: str, pipeline_parallel: int, virtual_pipeline: int) -> str:
    """The name, with `auto` replaced."""
    return default_schedule(pipeline_parallel, virtual_pipeline) if name == "auto" else name


def is_v_shaped(schedule: str) -> bool:
    """Whether the chunks go down the stages and up again."""
    return schedule in V_SHAPED


def chunks_of_stage(schedule: str, *, stage: int, pipeline_parallel: int, virtual_pipeline: int) -> tuple[int, ...]:
    """Chunks of the model on a stage, by its own number: v p + s in loops, s and 2 p - 1 - s in a V."""
    if is_v_shaped(schedule):
        return (stage, 2 * pipeline_parallel - 1 - stage)
    return tuple(range(stage, pipeline_parallel * virtual_pipeline, pipeline_parallel))
