"""`echo-explore validate`: predict measured runs and score the predictions."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_explore.core import content_hash
from echo_explore.core.versions import MODEL_VERSION

app = typer.Typer(help="Predict measured runs and print how wrong the predictions are.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Predict measured runs and print how wrong the predictions are."""


@app.command("steps")
def steps(
    measured: Annotated[Path, typer.Argument(help="Measured steps, CSV or CSV.gz.")],
    out: Annotated[Path, typer.Option("--out", help="Predictions to write, CSV or CSV.gz.")],
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Calibration file of your own.")] = None,
    interference: Annotated[
        str | None, typer.Option("--interference", help="physical, learned, constant or none; default: as predict.")
    ] = None,
    routing: Annotated[
        Path | None, typer.Option("--routing", help="Load of experts, a number a line, where a row has none.")
    ] = None,
) -> int:
    """Predict every measured step; what cannot be represented is declined with a reason."""
    from echo_explore.simulate import DEFAULT_INTERFERENCE, default_simulator
    from echo_explore.specs.routing_file import read_load
    from echo_explore.tracing import CachedTracer
    from echo_explore.validation import validate_steps

    load = read_load(routing) if routing is not None else ()
    with CachedTracer() as tracer:
        name = interference or DEFAULT_INTERFERENCE
        simulator = default_simulator(tracer=tracer, interference=name, calibration=calibration, allow_fallback=True)
        scores = validate_steps(
            measured,
            out,
            simulator.predict,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
            expert_load=load,
            settings={
                "calibration": content_hash(simulator.calibration),
                "interference": name,
                "model_version": str(MODEL_VERSION),
            },
        )
    print(scores.text())
    return 0


@app.command("kernels")
def kernels(
    measured: Annotated[Path, typer.Argument(help="Measured gemm, attention or elementwise kernels, CSV or CSV.gz.")],
    out: Annotated[Path, typer.Option("--out", help="Table with predicted_us to write, CSV or CSV.gz.")],
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Calibration file of your own.")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", help="NAME=CLUSTER: the GPU that a table calls NAME is this cluster's.")
    ] = None,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Price kernels without a model by the roofline.")
    ] = False,
) -> int:
    """Predict every measured kernel; what has no model is declined with a reason."""
    from echo_explore.compute import load_calibration, shipped_calibration
    from echo_explore.compute.chip import chip_of
    from echo_explore.core import SpecError
    from echo_explore.specs import load_cluster
    from echo_explore.validation import validate_kernels

    chips = {}
    for text in gpu or ():
        name, found, cluster = text.partition("=")
        if not (name and found and cluster):
            raise SpecError("gpu", text, "must be NAME=CLUSTER", "write --gpu MyGPU=my_cluster.toml")
        chips[name] = chip_of(load_cluster(cluster).device)
    coefficients = load_calibration(calibration) if calibration else shipped_calibration()
    print(validate_kernels(measured, out, coefficients, chips=chips, allow_fallback=allow_fallback).text())
    return 0


@app.command("collectives")
def collectives(
    measured: Annotated[Path, typer.Argument(help="Measured collectives, CSV or CSV.gz.")],
    out: Annotated[Path, typer.Option("--out", help="Predictions to write, CSV or CSV.gz.")],
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Calibration file of your own.")] = None,
) -> int:
    """Predict every measured collective; what is not known is declined with a reason."""
    from echo_explore.comm import HierarchicalModel
    from echo_explore.validation import validate_collectives

    model = HierarchicalModel.from_file(calibration) if calibration else HierarchicalModel.shipped()
    print(validate_collectives(measured, out, model).text())
    return 0
