"""`echo-explore predict --script` and `--graph`: the step time of a program of one's own."""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from echo_explore.cli import graph_files
from echo_explore.cli.comparison import Comparison, with_comparison
from echo_explore.cli.report import graph_text
from echo_explore.core import SpecError, TraceError
from echo_explore.graph import RankTrace
from echo_explore.specs import JobOptions, load_cluster, load_stack
from echo_explore.specs.base import read_json
from echo_explore.specs.layout import parse_layout
from echo_explore.specs.overrides import parse_overrides
from echo_explore.tracing.transformers_request import PARALLELISMS, TransformersJob, language_model

DEFAULT_STACK = "torch-ddp"
"""Host costs and libraries of eager PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """What `predict` is asked about a script or a graph file."""

    script: str | None
    graph: Path | None
    transformers: TransformersJob | None
    world: int | None
    rank: int
    cluster: str
    stack: str | None
    overrides: tuple[str, ...]
    interference: str
    what_if: tuple[str, ...]
    allow_fallback: bool
    calibration: Path | None
    timeline: Path | None
    require_fit: bool
    as_json: bool


def script_step(script: str, world: int | None, rank: int) -> RankTrace:
    """One step of `FILE.py:function` as a rank of a world; the script's traceback goes to stderr if it raises.

    Raises:
        SpecError: the file, the function's name, the world or the rank is wrong.
        TraceError: the script raised or can't be traced.
    """
    file, colon, function = script.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise SpecError("script", script, "must be FILE.py:function", "write --script train_step.py:build")
    if not Path(file).is_file():
        raise SpecError("script", file, "does not exist or is not a file", "check the path")
    if world is None or world < 1:
        raise SpecError("world", world or "(missing)", "must be 1 or more with --script", "add --world 1024")
    from echo_explore.tracing import TraceService

    with TraceService() as service:
        try:
            return service.script_step(Path(file), function, world_size=world, rank=rank)
        except TraceError as error:
            for note in getattr(error, "__notes__", ()):
                print(note, file=sys.stderr)
            raise


def transformers_job(options: JobOptions) -> TransformersJob:
    """The model of the transformers package that the options describe.

    Raises:
        SpecError: an option that says nothing here, a config that is no file, other axes than tp, ep and dp, a batch
            that does not divide.
    """
    for name in ("attention", "fusion", "layer_split", "placement", "routing"):
        if (value := getattr(options, name)) is not None:
            raise SpecError(name.replace("_", "-"), value, "is not modelled for transformers", "leave it out")
    if options.schedule != "auto":
        raise SpecError("schedule", options.schedule, "is not modelled for transformers", "leave it out")
    layout = parse_layout(options.layout)
    others = {
        "pp": layout.pipeline_parallel,
        "cp": layout.context_parallel,
        "vpp": layout.virtual_pipeline,
        "etp": layout.expert_tensor_parallel,
    }
    for axis, degree in others.items():
        if degree > 1:
            raise SpecError(f"layout.{axis}", degree, "is not traced for transformers", "use tp, ep and dp")
    if layout.sequence_parallel:
        rule = "is not in the plans of transformers 5.24 (`enable_sequence_parallel` does nothing there)"
        raise SpecError("layout.sp", 1, rule, "leave it out")
    if not options.model.endswith(".json"):
        raise SpecError("model", options.model, "must be a Hugging Face config.json here", "give its path")
    whole = read_json(Path(options.model))
    config = language_model(whole)
    if config is not whole:
        taken = f"{config['model_type']} of {whole.get('model_type')}"
        print(f"warning: config: text_config is traced ({taken}); what reads images or sound is not", file=sys.stderr)
    least = math.lcm(layout.tensor_parallel, layout.expert_parallel)
    size = options.num_gpus or (layout.tensor_parallel * layout.data_parallel or least)
    replicas = size // layout.tensor_parallel
    if layout.data_parallel not in (0, replicas):
        raise SpecError("layout.dp", layout.data_parallel, f"does not make {size} GPUs", "leave dp out")
    samples = replicas * options.micro_batch_size
    if options.global_batch_size % samples:
        raise SpecError(
            "global_batch_size", options.global_batch_size, f"must be a multiple of dp * micro-batch = {samples}",
            "change one of them",
        )  # fmt: skip
    length = options.sequence_length or config.get("max_position_embeddings") or config.get("n_positions")
    if not isinstance(length, int):
        raise SpecError("sequence_length", "(missing)", "is not in the config", "add --sequence-length")
    return TransformersJob(
        config=config,
        parallelism=PARALLELISMS[options.framework],
        tensor_parallel=layout.tensor_parallel,
        expert_parallel=layout.expert_parallel,
        world_size=size,
        num_micro_batches=options.global_batch_size // samples,
        micro_batch_size=options.micro_batch_size,
        sequence_length=length,
        recompute=options.recompute,
        precision=options.precision,
    )


def transformers_step(job: TransformersJob, rank: int) -> RankTrace:
    """One step of the job as one of its ranks."""
    from echo_explore.tracing import TraceService

    with TraceService() as service:
        return service.transformers_step(job, rank)


def predict_graph(options: GraphOptions) -> int:
    """Predict the step of a traced program; the exit code."""
    if options.script is not None and options.graph is not None:
        raise SpecError("graph", str(options.graph), "says the same as --script", "give one of the two")
    if options.graph is not None and options.world is not None:
        raise SpecError("world", options.world, "is written in the graph file", "leave it out")
    changes = parse_overrides(options.overrides)
    cluster = load_cluster(options.cluster, changes)
    stack = load_stack(options.stack or DEFAULT_STACK, changes)
    from echo_explore.simulate import SimulationOptions, default_simulator, parse_what_if, predict_trace
    from echo_explore.tracing import CachedTracer

    if options.transformers is not None:
        trace = transformers_step(options.transformers, options.rank)
        label = f"{options.transformers.config['model_type']} of transformers under {options.transformers.parallelism}"
    elif options.script is not None:
        trace, label = script_step(options.script, options.world, options.rank), options.script
    else:
        assert options.graph is not None
        trace, label = graph_files.read_trace(options.graph), options.graph.name
    with CachedTracer() as tracer:
        simulator = default_simulator(
            tracer=tracer, interference=options.interference, calibration=options.calibration,
            allow_fallback=options.allow_fallback,
        )  # fmt: skip
        plain = SimulationOptions()
        what_if = replace(plain, what_if=parse_what_if(options.what_if))
        prediction = predict_trace(
            trace, cluster=cluster, stack=stack, simulator=simulator, options=what_if, label=label,
            timeline=options.timeline,
        )  # fmt: skip
        compared = None
        if options.what_if:
            baseline = predict_trace(trace, cluster=cluster, stack=stack, simulator=simulator, options=plain)
            compared = Comparison(
                what_if=options.what_if, baseline_step_time_s=baseline.step_time_s, step_time_s=prediction.step_time_s
            )
    for line in prediction.warnings:
        print(f"warning: {line}", file=sys.stderr)
    print(
        json.dumps(prediction.to_json() | (compared.to_json() if compared else {}), allow_nan=False)
        if options.as_json
        else with_comparison(graph_text(cluster.device.name, prediction), compared)
    )
    return 1 if options.require_fit and not prediction.fits else 0
