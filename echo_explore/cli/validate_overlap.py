"""`echo-explore validate overlap`: predict kernels measured beside collectives and score the predictions."""

from pathlib import Path
from typing import Annotated

import typer


def overlap(
    measured: Annotated[Path, typer.Argument(help="Kernels alone and beside collectives, CSV or CSV.gz.")],
    out: Annotated[Path, typer.Option("--out", help="Table with predicted_slowdown to write, CSV or CSV.gz.")],
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Calibration file of your own.")] = None,
) -> int:
    """Predict the slowdown of every measured kernel; GPUs that are not known are left empty."""
    from echo_explore.interference.coefficients import shipped_coefficients, user_coefficients
    from echo_explore.validation.overlap import validate_overlap

    coefficients = user_coefficients(calibration) if calibration else shipped_coefficients()
    print(validate_overlap(measured, out, coefficients))
    return 0
