"""`echo-explore predict`: one candidate, one prediction."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from echo_explore.cli.comparison import Comparison, with_comparison
from echo_explore.cli.predict_graph import GraphOptions, predict_graph, transformers_job
from echo_explore.cli.report import prediction_text
from echo_explore.core import SpecError
from echo_explore.specs import Candidate, JobOptions, candidate_of
from echo_explore.tracing.transformers_request import PARALLELISMS

ClusterOption = Annotated[str, typer.Option("--cluster", help="Name or TOML file of the cluster.")]
MicroBatch = Annotated[int, typer.Option("--micro-batch-size", help="Sequences a micro-batch.")]
NumGpus = Annotated[int | None, typer.Option("--num-gpus", help="GPUs of the job; default: product of the layout.")]
Sequence = Annotated[int | None, typer.Option("--sequence-length", help="Tokens a sequence; default: the model's.")]
Recompute = Annotated[
    str, typer.Option("--recompute", help="none, selective, full, full:block:N, full:uniform:N or selective:MODULE,...")
]
Precision = Annotated[str, typer.Option("--precision", help="bf16, fp16, fp8, fp32, mxfp8 or nvfp4.")]
Attention = Annotated[str | None, typer.Option("--attention", help="flash or unfused; default: the stack's.")]
Schedule = Annotated[
    str,
    typer.Option("--schedule", help="auto, a name of docs/timeline.md, or a CSV file of orders."),
]
Framework = Annotated[
    str, typer.Option("--framework", help="megatron, torchtitan, fsdp2, ddp, transformers-fsdp2 or -ddp.")
]
Stack = Annotated[str | None, typer.Option("--stack", help="Name or TOML file of a stack profile.")]
Fusion = Annotated[str | None, typer.Option("--fusion", help="eager, norm or fused kernels; default: the stack's.")]
LayerSplit = Annotated[str | None, typer.Option("--layer-split", help="Layers of every chunk, with commas.")]
PlacementOption = Annotated[
    str | None, typer.Option("--placement", help="Order of axes (tp-cp-ep-dp-pp), GPUs of ranks (0-3,8-11), or a file.")
]
Routing = Annotated[
    str | None, typer.Option("--routing", help="File with the relative load of each expert; default: balanced.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="path=value over model, cluster, stack or recipe.")]


MODEL_HELP = "Name, TOML file or Hugging Face config.json of the model; not with --script."
LAYOUT_HELP = "tp=8,pp=12[,vpp=,cp=,ep=,dp=,sp=]."
SCRIPT_HELP = "FILE.py:function that returns your training step. This runs your code."
Script = Annotated[str | None, typer.Option("--script", help=SCRIPT_HELP)]
World = Annotated[int | None, typer.Option("--world", help="Ranks of the script's job.")]
T = TypeVar("T")


def given(name: str, value: T | None) -> T:
    """An option that only --script can do without.

    Raises:
        SpecError: it is missing.
    """
    if value is None:
        raise SpecError(name, "(missing)", "must be given", f"add --{name}, or give a --script")
    return value


_DEFAULTS = {
    "recompute": "none",
    "precision": "bf16",
    "schedule": "auto",
    "framework": "megatron",
    "fidelity": "kernel",
}


def refuse_beside_script(**values: object) -> None:
    """Refuse options that describe a job where a script or a file does; those at their defaults are taken as not given.

    Raises:
        SpecError: names the option.
    """
    for name, value in values.items():
        if value not in (None, False, _DEFAULTS.get(name)):
            option = name.replace("_", "-")
            raise SpecError(option, value, "says nothing beside --script, whose code decides", "leave it out")


def predict_command(
    cluster: ClusterOption,
    model: Annotated[str | None, typer.Option("--model", help=MODEL_HELP)] = None,
    layout: Annotated[str | None, typer.Option("--layout", help=LAYOUT_HELP)] = None,
    global_batch_size: Annotated[int | None, typer.Option("--global-batch-size", help="Sequences a step.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option("--micro-batch-size", help="Sequences a micro-batch.")] = None,
    script: Script = None,
    graph: Annotated[Path | None, typer.Option("--graph", help="What `trace --script` wrote, instead.")] = None,
    world: World = None,
    rank: Annotated[int, typer.Option("--rank", help="Rank of the script that stands for all.")] = 0,
    num_gpus: NumGpus = None,
    sequence_length: Sequence = None,
    recompute: Recompute = "none",
    precision: Precision = "bf16",
    attention: Attention = None,
    schedule: Schedule = "auto",
    framework: Framework = "megatron",
    stack: Stack = None,
    fusion: Fusion = None,
    layer_split: LayerSplit = None,
    placement: PlacementOption = None,
    routing: Routing = None,
    fidelity: Annotated[str, typer.Option("--fidelity", help="kernel or block.")] = "kernel",
    no_fold: Annotated[bool, typer.Option("--no-fold", help="Simulate every op of every micro-batch.")] = False,
    what_if: Annotated[list[str] | None, typer.Option("--what-if", help="NAME=FACTOR on one cause.")] = None,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Accept a device without measured coefficients.")
    ] = False,
    interference: Annotated[
        str | None,
        typer.Option("--interference", help="physical, learned, constant or none; default: physical."),
    ] = None,
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Calibration file of your own.")] = None,
    sets: Sets = None,
    timeline: Annotated[Path | None, typer.Option("--timeline", help="Write a Perfetto trace here.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Critical path, exposed transfers, bubbles.")] = False,
    require_fit: Annotated[bool, typer.Option("--require-fit", help="Exit 1 if it does not fit in memory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved candidate and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Predict step time and memory of one training job."""
    if script is not None or graph is not None:
        refuse_beside_script(
            model=model, layout=layout, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size,
            num_gpus=num_gpus, sequence_length=sequence_length, recompute=recompute, precision=precision,
            attention=attention, schedule=schedule, framework=framework, fusion=fusion, layer_split=layer_split,
            placement=placement, routing=routing, fidelity=fidelity, no_fold=no_fold, explain=explain, dry_run=dry_run,
        )  # fmt: skip
    elif world is not None:
        raise SpecError("world", world, "is the size of a script's job", "use --num-gpus, or give --script")
    options = None
    if script is None and graph is None:
        options = JobOptions(
            model=given("model", model),
            cluster=cluster,
            layout=given("layout", layout),
            num_gpus=num_gpus,
            global_batch_size=given("global-batch-size", global_batch_size),
            micro_batch_size=given("micro-batch-size", micro_batch_size),
            sequence_length=sequence_length,
            recompute=recompute,
            precision=precision,
            attention=attention,
            schedule=schedule,
            framework=framework,
            stack=stack,
            fusion=fusion,
            layer_split=layer_split,
            placement=placement,
            routing=routing,
            overrides=tuple(sets or ()),
            allow_fallback=allow_fallback,
        )
    if options is None or framework in PARALLELISMS:
        _check_writable(timeline)
        return predict_graph(
            GraphOptions(
                script=script,
                graph=graph,
                transformers=None if options is None else transformers_job(options),
                world=world,
                rank=rank,
                cluster=cluster,
                stack=stack,
                overrides=tuple(sets or ()),
                interference="constant" if interference is None else interference,
                what_if=tuple(what_if or ()),
                allow_fallback=allow_fallback,
                calibration=calibration,
                timeline=timeline,
                require_fit=require_fit,
                as_json=as_json,
            )
        )
    candidate = candidate_of(options)
    if fidelity not in ("kernel", "block"):
        raise SpecError("fidelity", fidelity, "must be kernel or block", "write --fidelity kernel")
    _check_writable(timeline)
    if calibration is not None and not calibration.is_file():
        raise SpecError("calibration", str(calibration), "does not exist or is not a file", "check the path")
    if what_if:
        from echo_explore.simulate import parse_what_if

        parse_what_if(what_if)
    if dry_run:
        print(json.dumps(_resolved(candidate), indent=2))
        return 0
    return _predict(
        candidate,
        fidelity=fidelity,
        fold=not no_fold,
        what_if=tuple(what_if or ()),
        allow_fallback=allow_fallback,
        interference=interference,
        calibration=calibration,
        timeline=timeline,
        explain=explain,
        require_fit=require_fit,
        as_json=as_json,
    )


def _predict(
    candidate: Candidate,
    *,
    fidelity: str,
    fold: bool,
    what_if: tuple[str, ...],
    allow_fallback: bool,
    interference: str | None,
    calibration: Path | None,
    timeline: Path | None,
    explain: bool,
    require_fit: bool,
    as_json: bool,
) -> int:
    from echo_explore.simulate import DEFAULT_INTERFERENCE, SimulationOptions, default_simulator, parse_what_if
    from echo_explore.tracing import CachedTracer

    options = SimulationOptions(fidelity=fidelity, fold=fold, what_if=parse_what_if(what_if), explain=explain)  # type: ignore[arg-type]
    with CachedTracer() as tracer:
        simulator = default_simulator(
            tracer=tracer,
            interference=DEFAULT_INTERFERENCE if interference is None else interference,
            calibration=calibration,
            allow_fallback=allow_fallback,
        )
        prediction = simulator.predict(candidate, options, timeline=timeline)
        compared = None
        if what_if:
            plain = replace(options, what_if=parse_what_if(()), explain=False)
            baseline_s = simulator.predict(candidate, plain).step_time_s
            compared = Comparison(what_if=what_if, baseline_step_time_s=baseline_s, step_time_s=prediction.step_time_s)
        advice = () if prediction.fits else simulator.advice(candidate)
    for line in prediction.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if as_json:
        values = prediction.to_json() | {"advice": list(advice)} | (compared.to_json() if compared else {})
        print(json.dumps(values, allow_nan=False))
    else:
        print(with_comparison(prediction_text(candidate, prediction, advice), compared))
    return 1 if require_fit and not prediction.fits else 0


def _check_writable(timeline: Path | None) -> None:
    if timeline is None:
        return
    from echo_explore.timeline import check_ending

    check_ending(timeline)
    if timeline.exists():
        raise SpecError(
            "timeline", str(timeline), "exists, and nothing is overwritten", "give another file or delete it"
        )
    if not timeline.absolute().parent.is_dir():
        raise SpecError("timeline", str(timeline), "its folder does not exist", "make the folder first")


def _resolved(candidate: Candidate) -> dict[str, Any]:
    return {
        "model": candidate.model.model_dump(mode="json"),
        "cluster": candidate.cluster.model_dump(mode="json"),
        "layout": candidate.layout.model_dump(mode="json"),
        "placement": {"order": candidate.placement.order, "device_of_rank": list(candidate.placement.device_of_rank)},
        "recipe": candidate.recipe.model_dump(mode="json"),
        "stack": candidate.stack.model_dump(mode="json"),
        "chunk_layers": list(candidate.chunk_layers),
        "num_gpus": candidate.num_gpus,
        "num_micro_batches": candidate.num_micro_batches,
        "hash": candidate.hash,
    }
