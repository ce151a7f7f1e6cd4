"""What the dashboard says on the page of the best trial: the layout as launch arguments, and where its time goes."""

from collections.abc import Sequence

from echo_explore.core import format_bytes, format_seconds
from echo_explore.search.ports import PARTS_OF_COMPUTE, TrialRecord
from echo_explore.search.space import ResolvedSpace
from echo_explore.specs.placement import DEFAULT_ORDER
from echo_explore.specs.recompute import modules_of, recomputes_layers


def megatron_arguments(record: TrialRecord, space: ResolvedSpace) -> list[str]:
    """The layout and batch of a trial as arguments of Megatron-LM's pretrain scripts."""
    point, recipe = record.point, space.space.recipe
    arguments = [
        f"--tensor-model-parallel-size {point.tensor_parallel}",
        f"--pipeline-model-parallel-size {point.pipeline_parallel}",
        f"--context-parallel-size {point.context_parallel}",
        f"--micro-batch-size {point.micro_batch_size}",
        f"--global-batch-size {recipe.global_batch_size}",
        f"--seq-length {recipe.sequence_length}",
    ]
    if point.context_parallel > 1:
        arguments.append(f"--cp-comm-type {recipe.context_exchange}")
    layers = space.candidate(point).chunk_layers
    if len(set(layers)) > 1:
        arguments.append(f"--pipeline-model-parallel-layout '{pipeline_layout(layers)}'")
    elif point.virtual_pipeline > 1:
        arguments.append(f"--num-layers-per-virtual-pipeline-stage {layers[0]}")
    if point.schedule != "auto":
        arguments.append(f"# schedule {point.schedule}: not Megatron's, no argument says it")
    if point.expert_parallel > 1:
        arguments.append(f"--expert-model-parallel-size {point.expert_parallel} --expert-tensor-parallel-size 1")
    if point.sequence_parallel:
        arguments.append("--sequence-parallel")
    if point.placement == "tp-cp-ep-pp-dp":
        arguments.append("--use-tp-pp-dp-mapping")
    elif point.placement != DEFAULT_ORDER:
        arguments.append(f"# placement {point.placement}: initialize_model_parallel(order=...), no argument says it")
    if modules := modules_of(point.recompute):
        arguments.append(f"--recompute-granularity selective --recompute-modules {' '.join(modules)}")
    if recomputes_layers(point.recompute):
        _, method, count = (point.recompute if ":" in point.recompute else "full:uniform:1").split(":")
        arguments.append(f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {count}")
    for name, value in (("NCCL_ALGO", space.stack.nccl_algo), ("NCCL_PROTO", space.stack.nccl_proto)):
        if value:
            arguments.append(f"# {name}={value} in the environment")
    return arguments


def pipeline_layout(chunk_layers: Sequence[int]) -> str:
    """Layers of the chunks, in model order, as Megatron-core 0.16 reads them (pipeline_parallel_layer_layout.py, 2025).

    Embedding E and loss L lie on the first and last chunk; `t*7` are seven layers; `|` parts chunks.
    """
    chunks = [f"t*{count}" if count else "" for count in chunk_layers]
    return "|".join(["E" + chunks[0], *chunks[1:-1], chunks[-1] + "L"] if len(chunks) > 1 else [f"E{chunks[0]}L"])


def launch_note(record: TrialRecord, space: ResolvedSpace) -> str:
    """Markdown for the page of a trial."""
    outcome = record.outcome
    assert outcome is not None
    lines = [f"**{record.point.label()}** on {space.cluster.name}, {space.model.name}", ""]
    lines.append(
        f"step {format_seconds(outcome.step_time_s)} "
        f"({format_seconds(outcome.step_time_low_s)} to {format_seconds(outcome.step_time_high_s)})"
    )
    lines.append(f"MFU {outcome.mfu:.1%}, peak memory {format_bytes(outcome.peak_memory_bytes)}")
    lines += ["", "```", *megatron_arguments(record, space), "```", ""]
    lines += ["| part | time | of the step |", "|---|---|---|"]
    for name, value in outcome.breakdown.items():
        if value:
            part = " (in compute)" if name in PARTS_OF_COMPUTE else ""
            share = f"{value / outcome.step_time_s:.1%}"
            lines.append(f"| {name.removesuffix('_s')}{part} | {format_seconds(value)} | {share} |")
    return "\n".join(lines)
