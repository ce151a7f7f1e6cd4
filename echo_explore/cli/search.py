"""`echo-explore search`: the best layouts of a space."""

import json
from typing import Annotated

import typer

from echo_explore.search.options import SearchOptions


def search_command(
    space: Annotated[str, typer.Argument(help="Name or TOML file of the search space.")],
    study: Annotated[str | None, typer.Option("--study", help="Name of the study.")] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="Journal file or database URL.")] = None,
    address: Annotated[str, typer.Option("--address", help="auto, local, none, or of a Ray cluster.")] = "auto",
    workers: Annotated[int | None, typer.Option("--workers", help="Evaluators; default: one a CPU.")] = None,
    trials: Annotated[int | None, typer.Option("--trials", help="Trials after which to end.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampler.")] = 0,
    window: Annotated[int | None, typer.Option("--window", help="Trials that proposals lag behind results.")] = None,
    sampler: Annotated[
        str, typer.Option("--sampler", help="auto, enumerate, tpe, nsga2, qmc, cmaes or random.")
    ] = "auto",
    objective: Annotated[str | None, typer.Option("--objective", help="step_time, cost, energy; with commas.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a study; try what failed again.")] = False,
    calibration: Annotated[str | None, typer.Option("--calibration", help="Calibration file of your own.")] = None,
    interference: Annotated[
        str | None, typer.Option("--interference", help="physical, learned, constant or none; default: physical.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Find the fastest or cheapest layout; the same command again goes on, or prints the finished result."""
    from echo_explore.search.run import run_search

    result = run_search(
        SearchOptions(
            space=space,
            study=study,
            storage=storage,
            address=address,
            workers=workers,
            trials=trials,
            seed=seed,
            window=window,
            sampler=sampler,
            objective=objective,
            resume=resume,
            calibration=calibration,
            interference=interference,
        )
    )
    print(json.dumps(result.to_json(), allow_nan=False) if as_json else result.to_text())
    return result.exit_code
