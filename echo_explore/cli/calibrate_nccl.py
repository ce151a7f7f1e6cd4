"""`echo-explore calibrate nccl-tests`: constants of a cluster's links from logs of collectives."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_explore.core import SpecError, format_bytes, write_atomic


def nccl_tests(
    logs: Annotated[list[Path], typer.Argument(help="Output of nccl-tests or rccl-tests, one file or more.")],
    cluster: Annotated[str, typer.Option("--cluster", help="Cluster they were measured on, name or file.")],
    out: Annotated[Path | None, typer.Option("--out", help="Calibration file to write, for --calibration.")] = None,
    collective: Annotated[
        str | None, typer.Option("--collective", help="Which test it was, where a log does not say so.")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Fit the in-place times instead.")] = False,
    library: Annotated[str, typer.Option("--library", help="nccl-VERSION or rccl.")] = "nccl-2.27",
) -> int:
    """Fit the constants of a cluster's links to logs of nccl-tests, and print the fit by size."""
    from echo_explore.calibration.nccl_log import read_nccl_log
    from echo_explore.calibration.nccl_tests import calibrate_links
    from echo_explore.comm.coefficient_file import shipped_coefficients
    from echo_explore.comm.libraries import library as library_named
    from echo_explore.specs import load_cluster

    spec = load_cluster(cluster)
    rows = [row for log in logs for row in read_nccl_log(log, collective=collective)]
    print(f"{len(rows)} rows from {len(logs)} logs; fitting", file=sys.stderr, flush=True)
    found = calibrate_links(
        rows, spec, shipped_coefficients(), in_place=in_place, library_name=library_named(library).name
    )
    print(f"{'collective':16s} {'GPUs':>5s} {'hosts':>5s} {'below':>10s} {'rows':>5s} {'error':>7s} {'before':>7s}")
    for s in found.sizes:
        below = "any" if s.below_bytes == float("inf") else format_bytes(s.below_bytes)
        counts = f"{s.collective:16s} {s.num_ranks:5d} {s.num_hosts:5d} {below:>10s} {s.num_rows:5d}"
        print(f"{counts} {s.error:7.1%} {s.before:7.1%}")
    if found.num_skipped:
        print(f"{found.num_skipped} rows left out: not measured, or no constants of their own", file=sys.stderr)
    if out is not None:
        try:
            write_atomic(out, found.text.encode())
        except OSError as error:
            raise SpecError("out", str(out), f"cannot be written: {error.strerror}", "give a folder of yours") from None
        print(f"wrote {out.absolute()}", file=sys.stderr)
    return 0
