"""The Python entry points; the commands are thin over the same functions.

>>> import echo_explore
>>> prediction = echo_explore.predict(model="gpt3-175b", cluster="h800-ndr", layout="tp=8,pp=12", global_batch_size=192)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo_explore.specs import Candidate, candidate_of, job_options

if TYPE_CHECKING:
    from echo_explore.search.run import SearchResult
    from echo_explore.simulate import GraphPrediction, Prediction, SimulationOptions


def predict(
    candidate: Candidate | None = None,
    *,
    options: "SimulationOptions | None" = None,
    timeline: str | Path | None = None,
    calibration: str | Path | None = None,
    interference: str | None = None,
    **job: Any,
) -> "Prediction":
    """The predicted step of one training job.

    Args:
        candidate: what to predict; else it is made from `job`.
        options: fidelity, folding and what-if factors.
        timeline: file to write a Perfetto trace to.
        calibration: a calibration file whose coefficients replace the shipped ones.
        interference: physical (the default), constant or none.
        job: the fields of JobOptions: model, cluster, layout, global_batch_size, micro_batch_size, ...

    Raises:
        SpecError: something in `job` is wrong.
        TraceError, MissingExtra: the program could not be traced.
    """
    from echo_explore.simulate import DEFAULT_INTERFERENCE, SimulationOptions, default_simulator
    from echo_explore.tracing import CachedTracer

    if candidate is None:
        candidate = candidate_of(job_options({"micro_batch_size": 1, **job}))
    with CachedTracer() as tracer:
        simulator = default_simulator(
            tracer=tracer,
            interference=interference or DEFAULT_INTERFERENCE,
            calibration=Path(calibration) if calibration else None,
        )
        return simulator.predict(
            candidate, options or SimulationOptions(), timeline=Path(timeline) if timeline else None
        )


def predict_script(
    script: str | Path,
    function: str = "build",
    *,
    cluster: str,
    world_size: int,
    rank: int = 0,
    stack: str = "torch-ddp",
    timeline: str | Path | None = None,
    calibration: str | Path | None = None,
) -> "GraphPrediction":
    """The predicted step of a training script of one's own; this runs the script's code in a process of its own.

    Args:
        script: Python file.
        function: its function that returns the step; see examples/train_step.py.
        cluster: name or file of what it runs on.
        world_size: ranks of the job.
        rank: that is traced and stands for all.
        stack: profile whose host costs and libraries count.
        timeline: file to write a Perfetto trace to.
        calibration: a calibration file whose coefficients replace the shipped ones.

    Raises:
        SpecError: something is wrong with the arguments.
        TraceError, MissingExtra: the script raised or could not be traced.
    """
    from echo_explore.simulate import default_simulator, predict_trace
    from echo_explore.specs import load_cluster, load_stack
    from echo_explore.tracing import CachedTracer, TraceService

    with TraceService() as service, CachedTracer() as tracer:
        trace = service.script_step(Path(script), function, world_size=world_size, rank=rank)
        return predict_trace(
            trace,
            cluster=load_cluster(cluster),
            stack=load_stack(stack),
            simulator=default_simulator(tracer=tracer, calibration=Path(calibration) if calibration else None),
            label=f"{Path(script).name}:{function}",
            timeline=Path(timeline) if timeline else None,
        )


def search(space: str | Path, **options: Any) -> "SearchResult":
    """The best layouts of a search space; `options` are the fields of search.run.SearchOptions."""
    from echo_explore.search.run import SearchOptions, run_search

    return run_search(SearchOptions(space=str(space), **options))
