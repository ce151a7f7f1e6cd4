"""Fit the interference model again and print how well it does; the constants go to a calibration file.

    python -m scripts.fit_interference --data DIR [--out FILE] [--residual FILE]

DIR holds overlap.csv (columns: docs/interference.md) and, if it is there, overlap_comm_side.csv, which is compared, not
fitted. The raw tables never enter the package. `--residual` trains the learned residual, prints how it does on rows
held back, and writes its arrays (needs torch).
"""

import argparse
import csv
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from echo_explore.calibration.overlap import fit_overlap, write_calibration, write_residual
from echo_explore.calibration.residual_fit import fit_residual
from echo_explore.interference.coefficients import shipped_coefficients
from echo_explore.interference.contention import collective_slowdown
from echo_explore.interference.graph_loads import chip_of_device
from echo_explore.interference.loads import KernelLoads, Traffic
from echo_explore.interference.measured import (
    ARITHMETIC_FRACTION,
    LINK_EFFICIENCY,
    MANY_BLOCKS,
    MEMORY_FRACTION,
    read_overlaps,
)
from echo_explore.specs import load_cluster

SOURCE = (
    "Kernels alone and beside collectives: NetX-lab/Echo-slowdown (2024), facebookresearch/HolisticTraceAnalysis (2023)"
)


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--residual", type=Path)
    args = parser.parse_args()
    fit = fit_overlap(
        [args.data / "overlap.csv"],
        start=shipped_coefficients(),
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(fit.sharing, "allowed {:.2f} to {:.2f}".format(*fit.allowed))
    print(fit.score.text())
    for group, error in fit.held_back.items():
        print(f"held back {group}: {error:.3f}")
    side = args.data / "overlap_comm_side.csv"
    if side.exists():
        _print_comm_side(side)
    if args.out is not None:
        write_calibration(fit, args.out, source=SOURCE)
    if args.residual is not None:
        constants = replace(shipped_coefficients(), sharing=fit.sharing)
        residual = fit_residual(read_overlaps(args.data / "overlap.csv"), constants, source=SOURCE)
        print(residual.text())
        write_residual(residual, args.residual)


def _print_comm_side(path: Path) -> None:
    """Median slowdown of collectives of 1 MiB and more, and the model's beside a large product on an A100.

    The products of that table run in another process, which takes turns with the collective: only light load compares.
    """
    cluster, coefficients = load_cluster("a100-40gb-hdr"), shipped_coefficients()
    chip = chip_of_device(cluster.device, coefficients)
    link = cluster.node.link_bandwidth_bytes_per_s
    product = KernelLoads(
        time_s=np.array([np.inf]),
        memory_fraction=np.array([MEMORY_FRACTION["gemm"]]),
        l2_fraction=np.array([0.0]),
        arithmetic_fraction=np.array([ARITHMETIC_FRACTION["gemm"]]),
        num_blocks=np.array([MANY_BLOCKS]),
        blocks_per_sm=np.array([1.0]),
        fixed_grid=np.array([False]),
    )
    ring = Traffic(
        num_channels=24,
        link_bytes_per_s=LINK_EFFICIENCY["simple"] * link,
        link_peak_bytes_per_s=link,
        burst_bytes=0.0,
    )
    factor = collective_slowdown(product, ring, chip, coefficients.sharing)[0]
    print(f"collective side, model, A100 over NVLink beside a large product: {factor:.2f}")
    groups: dict[tuple[str, str], list[float]] = {}
    with path.open(encoding="utf-8-sig", newline="") as handle:
        for row in csv.DictReader(handle):
            if float(row["size_bytes"]) >= 2**20:
                groups.setdefault((row["gpu"], row["contention"]), []).append(float(row["slowdown"]))
    for (gpu, level), values in sorted(groups.items()):
        print(f"collective side, {gpu}, {level}: median {median(values):.2f}")


if __name__ == "__main__":
    main()
