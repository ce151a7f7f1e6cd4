"""`echo-explore calibrate overlap`: the interference model fitted to kernels of your own, with a learned residual."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_explore.core import SpecError


def overlap(
    files: Annotated[
        list[Path], typer.Argument(help="Overlap tables (CSV, CSV.gz) or PyTorch profiler traces (JSON, JSON.gz).")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Calibration file to write.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the network's first weights.")] = 0,
) -> int:
    """Train a residual on top of the physical model and write it, if it does better on kernels it has not seen."""
    from echo_explore.calibration.overlap import write_user_calibration
    from echo_explore.calibration.overlap_trace import overlaps_of_trace
    from echo_explore.calibration.residual_fit import fit_residual
    from echo_explore.cli.graph_files import check_out
    from echo_explore.interference.coefficients import shipped_coefficients
    from echo_explore.interference.measured import read_overlaps

    if out is None:
        raise SpecError("out", "", "is the calibration file to write", "give --out FILE.toml")
    check_out(out)
    rows = []
    for path in files:
        rows += overlaps_of_trace(path) if ".json" in path.suffixes else read_overlaps(path)
    coefficients = shipped_coefficients()
    fit = fit_residual(rows, coefficients, source=", ".join(path.name for path in files), seed=seed)
    print(fit.text())
    write_user_calibration(out, coefficients, fit.residual if fit.helps else None)
    worth = "with the residual" if fit.helps else "without a residual: it would not help on kernels it has not seen"
    print(
        f"written {worth}: {out.absolute()}; use it with: echo-explore predict ... --calibration {out}", file=sys.stderr
    )
    return 0
