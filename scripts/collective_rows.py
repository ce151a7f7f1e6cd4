"""Rows of measured collectives for fits: read, parted into curves held back, thinned, written with predictions."""

import csv
import gzip
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Row = Mapping[str, str]
MOST_SIZES = 160
"""Of a group's, in a fit."""
CURVE = ("gpu", "fabric", "collective", "dtype", "num_gpus", "nodes", "lib", "tool", "algo")


def read_rows(path: Path) -> list[Row]:
    """Every measured row with a time."""
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if float(row["latency_us"] or 0) > 0]


def curve_of(row: Row) -> str:
    """The curve that a row is a point of."""
    return "|".join(row[name] for name in CURVE)


def folds(rows: Sequence[Row], num_folds: int, seed: int) -> np.ndarray:
    """Part of each row's curve, 0 to num_folds - 1: by the order of seeded hashes in a gpu, fabric and collective."""
    groups: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for row in rows:
        groups[row["gpu"], row["fabric"], row["collective"], row["algo"]].add(curve_of(row))
    part: dict[str, int] = {}
    for curves in groups.values():
        order = sorted(curves, key=lambda curve: zlib.crc32(f"{seed}|{curve}".encode()))
        part |= {curve: place % num_folds for place, curve in enumerate(order)}
    return np.array([part[curve_of(row)] for row in rows])


def worst_curves(rows: Sequence[Row], predicted: Sequence[float | None], count: int) -> str:
    """The curves with the largest mean errors, a line each."""
    found: dict[str, list[float]] = defaultdict(list)
    for row, value in zip(rows, predicted, strict=True):
        if value is not None:
            found[curve_of(row)].append(value / float(row["latency_us"]) - 1)
    ranked = sorted(found.items(), key=lambda item: -float(np.mean(np.abs(item[1]))))[:count]
    return "\n".join(f"{np.mean(np.abs(e)):7.1%} {np.mean(e):+7.1%} {len(e):5d} rows  {curve}" for curve, e in ranked)


def thinned(cells: Sequence[tuple[float, ...]]) -> tuple[list[tuple[float, ...]], dict[tuple[float, ...], int]]:
    """Every k-th size of groups with many, and k by group: tables of a thousand sizes a curve say no more."""
    groups: dict[tuple[float, ...], list[tuple[float, ...]]] = defaultdict(list)
    for cell in cells:
        groups[cell[:2]].append(cell)
    stride = {group: -(-len(own) // MOST_SIZES) for group, own in groups.items()}
    kept = [cell for group, own in groups.items() for cell in sorted(own, key=lambda c: c[2])[:: stride[group]]]
    return kept, stride


def write_rows(path: Path, rows: Sequence[Row], predicted: Sequence[float | None]) -> None:
    """The judged rows with a column predicted_us."""
    with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], "predicted_us"])
        writer.writeheader()
        writer.writerows(
            {**row, "predicted_us": "" if value is None else value} for row, value in zip(rows, predicted, strict=True)
        )
