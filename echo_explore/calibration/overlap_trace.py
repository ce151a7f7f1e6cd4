"""Kernels alone and beside collectives from a trace of the PyTorch profiler (Kineto): rows as of an overlap table.

A kernel counts as communication by its name (NCCL, RCCL, DeepEP); others are grouped by name, grid and block. Launches
beside no communication give the time alone, launches beside some the time and the share overlapped.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from echo_explore.calibration.kineto import read_events
from echo_explore.core import SpecError
from echo_explore.interference.measured import MeasuredOverlap

COMMUNICATION = re.compile(r"nccl|rccl|\bep::|deep_ep|DeepEP")
CLASSES = (
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    ("norm", re.compile(r"norm|GammaBeta", re.IGNORECASE)),
    ("gemm", re.compile(r"gemm|cutlass|cublas|nvjet|wgrad|dgrad|conv", re.IGNORECASE)),
    ("elementwise", re.compile(r"elementwise|reduce|copy|cat|fill|softmax|dropout|triton", re.IGNORECASE)),
)
"""Class by the name of a kernel; first match, else `other`."""
LEAST_OVERLAP = 0.5
MOST_ALONE = 0.02
"""Overlap up to which a launch counts as alone."""


def overlaps_of_trace(path: Path) -> list[MeasuredOverlap]:
    """The kernels that a trace shows both alone and beside communication, a row each.

    Raises:
        SpecError: no trace, no GPU kernels, or none that ran both ways.
    """
    trace = read_events(path)
    kernels = [e for e in trace.events if str(e.get("cat", "")).lower() == "kernel" and _lasts(e)]
    if not kernels:
        raise SpecError(f"{path.name}: traceEvents", 0, "holds no GPU kernels", "profile on a GPU")
    rows: list[MeasuredOverlap] = []
    for device in sorted({_device(e) for e in kernels}):
        own = [e for e in kernels if _device(e) == device]
        rows += _device_rows(own, trace.gpu_name(device), path.name)
    if not rows:
        raise SpecError(
            f"{path.name}: traceEvents", len(kernels), "no kernel ran both alone and beside communication",
            "profile several steps that overlap communication",
        )  # fmt: skip
    return rows


def _lasts(event: dict[str, Any]) -> bool:
    return all(isinstance(event.get(name), int | float) for name in ("ts", "dur")) and event["dur"] > 0


def _device(event: dict[str, Any]) -> int:
    arguments = event.get("args")
    device = arguments.get("device", 0) if isinstance(arguments, dict) else 0
    return device if isinstance(device, int) else 0


def _device_rows(events: Sequence[dict[str, Any]], gpu: str, source: str) -> list[MeasuredOverlap]:
    communication = [e for e in events if COMMUNICATION.search(str(e.get("name")))]
    communication.sort(key=lambda event: float(event["ts"]))
    start = np.array([float(e["ts"]) for e in communication])
    end = start + np.array([float(e["dur"]) for e in communication])
    launches: dict[tuple[str, str, str], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        name = str(event.get("name"))
        if COMMUNICATION.search(name):
            continue
        at, until = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        beside = np.flatnonzero((start < until) & (end > at))
        share = _covered(start[beside], end[beside], at, until) / (until - at)
        arguments = event.get("args") if isinstance(event.get("args"), dict) else {}
        key = (name, str((arguments or {}).get("grid", "")), str((arguments or {}).get("block", "")))
        other = str(communication[int(beside[0])].get("name")) if beside.size else ""
        launches[key].append((until - at, share, other))
    rows = []
    for (name, grid, block), found in launches.items():
        alone = [took for took, share, _ in found if share <= MOST_ALONE]
        beside_some = [item for item in found if item[1] >= LEAST_OVERLAP]
        if not alone or not beside_some:
            continue
        alone_us, slowed_us = median(alone), median(took for took, _, _ in beside_some)
        share = float(np.mean([s for _, s, _ in beside_some]))
        cells = {
            "gpu": gpu, "compute_class": _class(name), "compute_kernel": name, "grid": grid, "block": block,
            "comm_kernel": beside_some[0][2], "n_alone": str(len(alone)), "n_overlap": str(len(beside_some)),
            "source": source,
        }  # fmt: skip
        rows.append(
            MeasuredOverlap(cells=cells, alone_s=alone_us * 1e-6, overlap_fraction=share, slowdown=slowed_us / alone_us)
        )
    return rows


def _covered(start: Any, end: Any, at: float, until: float) -> float:
    """Microseconds of [at, until] that the intervals, sorted by start, cover together."""
    covered, reached = 0.0, at
    for a, b in zip(np.maximum(start, at).tolist(), np.minimum(end, until).tolist(), strict=True):
        if b > reached:
            covered += b - max(a, reached)
            reached = b
    return covered


def _class(name: str) -> str:
    return next((kind for kind, pattern in CLASSES if pattern.search(name)), "other")
