"""`echo-explore trace`: the whole execution graph of one rank."""

from pathlib import Path
from typing import Annotated

import typer

from echo_explore.cli import predict
from echo_explore.core import SpecError
from echo_explore.specs import JobOptions, candidate_of


def trace_command(
    model: predict.ModelOption,
    layout: predict.LayoutOption,
    rank: Annotated[int, typer.Option("--rank", help="Global rank to play.")],
    out: Annotated[Path, typer.Option("--out", help="File to write (.npz).")],
    global_batch_size: predict.GlobalBatch,
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
    file_format: Annotated[str, typer.Option("--format", help="native.")] = "native",
    sets: predict.Sets = None,
) -> int:
    """Trace one iteration of one rank of a job: every op, collective and wait."""
    if file_format != "native":
        raise SpecError("format", file_format, "is not written in this version", "use native")
    if out.exists():
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file or delete it")
    if not out.absolute().parent.is_dir():
        raise SpecError("out", str(out), "its folder does not exist", "make the folder first")
    candidate = candidate_of(
        JobOptions(
            model=model,
            cluster=cluster,
            layout=layout,
            num_gpus=num_gpus,
            global_batch_size=global_batch_size,
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
            overrides=tuple(sets or ()),
        )
    )
    if not 0 <= rank < candidate.num_gpus:
        raise SpecError("rank", rank, f"must be 0 to {candidate.num_gpus - 1}", "choose a rank of the job")
    from echo_explore.graph.storage import save_graph
    from echo_explore.tracing import TraceService

    with TraceService() as service:
        graph = service.trace_rank(candidate, rank)
    save_graph(out, graph)
    print(f"{out.absolute()}: {graph.num_ops:,} rows, {int(graph.is_collective.sum()):,} collectives")
    return 0
