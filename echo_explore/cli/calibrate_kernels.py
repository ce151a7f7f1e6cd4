"""`echo-explore calibrate kernels`: corrections of kernel times from a profile, traces or tables."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_explore.core import SpecError


def kernels(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Tables (CSV, CSV.gz) or PyTorch profiler traces (JSON, JSON.gz).")
    ] = None,
    cluster: Annotated[str, typer.Option("--cluster", help="Name or TOML file of the cluster with that GPU.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Calibration file to write.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Time a short suite on this machine's GPU.")] = False,
    torch_device: Annotated[
        str, typer.Option("--torch-device", help="Where --profile runs: cuda, cuda:1, cpu.")
    ] = "cuda",
) -> int:
    """Fit a calibration file that `predict --calibration` uses, from your own measurements."""
    from echo_explore.calibration.kernel_fit import fit_kernels, write_corrections
    from echo_explore.calibration.kernel_rows import MeasuredKernels, measured_table
    from echo_explore.calibration.kineto import read_profiler_trace
    from echo_explore.compute import shipped_calibration
    from echo_explore.compute.kernel_table import read_kernel_table
    from echo_explore.specs import load_cluster

    if not cluster:
        raise SpecError("cluster", cluster, "says which GPU the measurements are of", "give --cluster NAME")
    if out is None:
        raise SpecError("out", "", "is the calibration file to write", "give --out FILE.toml")
    if out.exists():
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file")
    if not files and not profile:
        raise SpecError("files", "", "there is nothing to fit", "give tables or traces, or --profile")
    device = load_cluster(cluster).device
    measured: list[MeasuredKernels] = []
    for path in files or ():
        if ".json" in path.suffixes:
            measured.append(read_profiler_trace(path))
        else:
            measured.append(measured_table(read_kernel_table(path), device))
    if profile:
        from echo_explore.calibration.profiler import profile_kernels

        measured.append(profile_kernels(torch_device))
    fit = fit_kernels(measured, device, shipped_calibration())
    write_corrections(out, fit)
    print(fit.text())
    print(f"written: {out.absolute()}; use it with: echo-explore predict ... --calibration {out}", file=sys.stderr)
    return 0
