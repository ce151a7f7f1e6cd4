"""`echo-explore trace`: the whole execution graph of one rank, of a described job or of a script of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from echo_explore.cli import graph_files, predict
from echo_explore.cli.predict_graph import script_step, transformers_job, transformers_step
from echo_explore.core import SpecError
from echo_explore.graph import RankTrace
from echo_explore.specs import Candidate, JobOptions, candidate_of
from echo_explore.tracing.transformers_request import PARALLELISMS


def trace_command(
    rank: Annotated[int, typer.Option("--rank", help="Global rank to play.")],
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
    model: Annotated[str | None, typer.Option("--model", help=predict.MODEL_HELP)] = None,
    layout: Annotated[str | None, typer.Option("--layout", help=predict.LAYOUT_HELP)] = None,
    global_batch_size: Annotated[int | None, typer.Option("--global-batch-size", help="Sequences a step.")] = None,
    micro_batch_size: predict.MicroBatch = 1,
    cluster: predict.ClusterOption = "h100-ndr",
    num_gpus: predict.NumGpus = None,
    sequence_length: predict.Sequence = None,
    recompute: predict.Recompute = "none",
    precision: predict.Precision = "bf16",
    attention: predict.Attention = None,
    schedule: predict.Schedule = "auto",
    framework: predict.Framework = "megatron",
    stack: predict.Stack = None,
    fusion: predict.Fusion = None,
    layer_split: predict.LayerSplit = None,
    routing: predict.Routing = None,
    script: predict.Script = None,
    world: predict.World = None,
    file_format: Annotated[str, typer.Option("--format", help="native (.npz) or chakra (.et).")] = "native",
    sets: predict.Sets = None,
) -> int:
    """Trace one iteration of one rank of a job: every op, collective and wait."""
    if file_format not in graph_files.WRITERS:
        raise SpecError("format", file_format, "must be native or chakra", "write --format native")
    graph_files.check_out(out)
    if script is not None:
        predict.refuse_beside_script(
            model=model, layout=layout, global_batch_size=global_batch_size, num_gpus=num_gpus, stack=stack,
            sequence_length=sequence_length, recompute=recompute, precision=precision, attention=attention,
            schedule=schedule, framework=framework, fusion=fusion, layer_split=layer_split, routing=routing,
            set=tuple(sets) if sets else None,
        )  # fmt: skip
        trace = script_step(script, world, rank)
    else:
        if world is not None:
            raise SpecError("world", world, "is the size of a script's job", "use --num-gpus, or give --script")
        options = JobOptions(
            model=predict.given("model", model),
            cluster=cluster,
            layout=predict.given("layout", layout),
            num_gpus=num_gpus,
            global_batch_size=predict.given("global-batch-size", global_batch_size),
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            recompute=recompute,
            precision=precision,
            attention=attention,
            schedule=schedule,
            framework=framework,
            stack=stack,
            fusion=fusion,
            layer_split=layer_split,
            routing=routing,
            overrides=tuple(sets or ()),
        )
        if framework in PARALLELISMS:
            trace = transformers_step(transformers_job(options), rank)
        else:
            trace = _job_step(candidate_of(options), rank)
    graph_files.WRITERS[file_format](out, trace)
    print(f"{out.absolute()}: {graph_files.summary(trace)}")
    return 0


def _job_step(candidate: Candidate, rank: int) -> RankTrace:
    if not 0 <= rank < candidate.num_gpus:
        raise SpecError("rank", rank, f"must be 0 to {candidate.num_gpus - 1}", "choose a rank of the job")
    from echo_explore.tracing import TraceService

    with TraceService() as service:
        return service.rank_step(candidate, rank)
