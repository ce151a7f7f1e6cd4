"""Fit the interference model again and print how well it does; the constants go to a calibration file.

    python -m scripts.fit_interference --data DIR [--out FILE]

DIR holds overlap.csv (columns: docs/interference.md) and, if it is there, overlap_comm_side.csv, which is compared, not
fitted. The raw tables never enter the package.
"""

import argparse
import csv
import sys
from pathlib import Path
from statistics import median

from echo_explore.calibration.overlap import fit_overlap, write_calibration
from echo_explore.interference.coefficients import shipped_coefficients

SOURCE = (
    "Kernels alone and beside collectives: NetX-lab/Echo-slowdown (2024), facebookresearch/HolisticTraceAnalysis (2023)"
)


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    fit = fit_overlap(
        [args.data / "overlap.csv"],
        start=shipped_coefficients(),
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(fit.sharing)
    print(fit.score.text())
    for group, error in fit.held_back.items():
        print(f"held back {group}: {error:.3f}")
    side = args.data / "overlap_comm_side.csv"
    if side.exists():
        _print_comm_side(side)
    if args.out is not None:
        write_calibration(fit, args.out, source=SOURCE)


def _print_comm_side(path: Path) -> None:
    """Median slowdown of collectives of 1 MiB and more; the model's lie between 1 and 2 / (2 - 1) = 2."""
    groups: dict[tuple[str, str], list[float]] = {}
    with path.open(encoding="utf-8-sig", newline="") as handle:
        for row in csv.DictReader(handle):
            if float(row["size_bytes"]) >= 2**20:
                groups.setdefault((row["gpu"], row["contention"]), []).append(float(row["slowdown"]))
    for (gpu, level), values in sorted(groups.items()):
        print(f"collective side, {gpu}, {level}: median {median(values):.2f}")


if __name__ == "__main__":
    main()
