"""`echo-explore validate overlap`: predict kernels measured beside collectives and score the predictions."""

from pathlib import Path
from typing import Annotated

import typer


def overlap(
    measured: Annotated[Path, typer.Argument(help="Kernels alone and beside collectives, CSV or CSV.gz.")],
    out: Annotated[Path, typer.Option("--out", help="Table with predicted_slowdown to write, CSV or CSV.gz.")],
    interference: Annotated[str, typer.Option("--interference", help="physical or learned.")] = "physical",
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Calibration file of your own.")] = None,
) -> int:
    """Predict the slowdown of every measured kernel; GPUs that are not known are left empty."""
    from echo_explore.core import SpecError
    from echo_explore.interference.coefficients import shipped_coefficients, user_coefficients, with_residual
    from echo_explore.validation.overlap import validate_overlap

    if interference not in ("physical", "learned"):
        raise SpecError("interference", interference, "must be one of physical, learned", "name one of them")
    coefficients = user_coefficients(calibration) if calibration else shipped_coefficients()
    if interference == "learned":
        coefficients = with_residual(coefficients)
    print(validate_overlap(measured, out, coefficients))
    return 0
