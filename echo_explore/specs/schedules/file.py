"""Schedules from files, in the notation of torch.distributed.pipelining.

A line a stage, its passes between commas in order: `0F0,0F1,0B0,...`. A pass is the chunk of the model, F (forward),
B (backward), I (gradient of its inputs) or W (gradient of its weights), and the micro-batch; `(0F4;3B1)OVERLAP_F_B` is
a forward and a backward that torch runs together; an empty cell is a bubble and means nothing. That is what torch's
`_dump_csv(..., format="compute_only")` writes.

References:
    torch 2.13 `distributed/pipelining/schedules.py`, `_Action.from_str`, `_load_csv`.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from echo_explore.core import SpecError
from echo_explore.specs.schedules.checks import check_orders
from echo_explore.specs.schedules.passes import PassKind, PipelineSchedule, orders_of

_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,9})")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_KIND = {
    "F": PassKind.FORWARD,
    "B": PassKind.BACKWARD,
    "I": PassKind.BACKWARD_INPUT,
    "W": PassKind.BACKWARD_WEIGHT,
}
_Cell = tuple[int, PassKind, int]
"""(chunk of the model, kind, micro-batch)."""
LARGEST_FILE_BYTES = 64 * 2**20


def read_orders(path: Path) -> tuple[str, ...]:
    """The lines of a schedule file that hold something.

    Raises:
        SpecError: no such file, too large, not text, or empty.
    """
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise SpecError("schedule", str(path), "is larger than 64 MiB", "give a schedule of fewer micro-batches")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("schedule", str(path), "is not a text file that can be read", "check the path") from error
    lines = tuple(line.strip() for line in text.splitlines() if line.strip(" \t,\"'"))
    if not lines:
        raise SpecError("schedule", str(path), "holds no line with passes", "write a line a stage, such as 0F0,0B0")
    return lines


def parse_orders(
    lines: Sequence[str], *, pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int
) -> PipelineSchedule:
    """The schedule of these lines, checked.

    Raises:
        SpecError: a pass that cannot be read, another number of stages or chunks than the layout's; see
            `checks.check_orders`.
    """
    if len(lines) != pipeline_parallel:
        raise SpecError(
            "schedule",
            f"{len(lines)} lines",
            f"was made for {len(lines)} stages, and the layout has pp = {pipeline_parallel}",
            f"use pp={len(lines)}, or a schedule of {pipeline_parallel} lines",
        )
    cells = [_cells(line, stage) for stage, line in enumerate(lines)]
    placement = _placement(cells, pipeline_parallel, virtual_pipeline)
    local = [{int(c): v for v, c in enumerate(row)} for row in placement]
    schedule = PipelineSchedule(
        name="custom",
        num_micro_batches=num_micro_batches,
        placement=placement,
        orders=orders_of([[(k, m, local[s][c]) for c, k, m in stage] for s, stage in enumerate(cells)]),
        is_periodic=False,
    )
    check_orders(schedule)
    return schedule


def _cells(line: str, stage: int) -> list[_Cell]:
    cells: list[_Cell] = []
    for text in (part.strip().strip("\"'") for part in line.split(",")):
        overlap = _OVERLAP.fullmatch(text)
        for part in overlap.group(1).split(";") if overlap else [text]:
            if not part:
                continue
            match = _ACTION.fullmatch(part)
            if match is None:
                raise SpecError(
                    f"schedule[{stage}]", part, "is not a pass", "write chunk, F, B, I or W, and micro-batch: 0F3"
                )
            cells.append((int(match.group(1)), _KIND[match.group(2)], int(match.group(3))))
    return cells


def _placement(cells: Sequence[Sequence[_Cell]], p: int, v: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """(p, v) chunks of the model that the lines name, in increasing order on every stage."""
    owner: dict[int, int] = {}
    for stage, line in enumerate(cells):
        for chunk in sorted({chunk for chunk, _, _ in line}):
            if owner.setdefault(chunk, stage) != stage:
                rule = f"chunk {chunk} is on stage {owner[chunk]} already"
                raise SpecError(f"schedule[{stage}]", f"chunk {chunk}", rule, "give every chunk one stage")
    rows = [sorted(chunk for chunk, stage in owner.items() if stage == s) for s in range(p)]
    wrong = next((s for s, row in enumerate(rows) if len(row) != v), None)
    if wrong is not None or sorted(owner) != list(range(p * v)):
        where = 0 if wrong is None else wrong
        raise SpecError(
            f"schedule[{where}]",
            str(rows[where]),
            f"the layout has {v} chunks a stage, numbered 0 to {p * v - 1} over all stages",
            "change vpp of the layout, or the schedule",
        )
    placement = np.array(rows, dtype=np.int64)
    placement.setflags(write=False)
    return placement
