"""Predicted slowdowns of measured kernels: the table with one column more, and how wrong they are."""

import csv
import gzip
import io
import math
from collections.abc import Sequence
from pathlib import Path

from echo_explore.core import SpecError, write_atomic
from echo_explore.interference.coefficients import InterferenceCoefficients
from echo_explore.interference.loads import Floats
from echo_explore.interference.measured import MeasuredOverlap, predicted_slowdowns, read_overlaps
from echo_explore.interference.overlap_score import reasons_not, score_overlap

COLUMN = "predicted_slowdown"


def validate_overlap(measured: Path, out: Path, coefficients: InterferenceCoefficients) -> str:
    """Writes the table with `predicted_slowdown` of the whole kernel; a text with the scores comes back.

    Args:
        measured: the table; columns as docs/interference.md says.
        out: CSV or CSV.gz to write; it must not be the table itself.
        coefficients: of the model.

    Raises:
        SpecError: a bad table, or an output that cannot be written.
    """
    if not out.absolute().parent.is_dir():
        raise SpecError("out", str(out), "its folder does not exist", "make the folder first")
    rows = read_overlaps(measured)
    if out.exists() and out.samefile(measured):
        raise SpecError("out", str(out), "is the table itself", "give another file")
    predicted = predicted_slowdowns(rows, coefficients)
    _write(out, rows, predicted)
    known = [row for row in rows if math.isfinite(row.slowdown)]
    lines = ["no measured slowdowns to score against"]
    if known:
        score = score_overlap(rows, predicted.tolist())
        why = reasons_not(rows) if not score.groups else ""
        lines = [score.text() + (f" ({why})" if why else "")]
    lines += totals(rows, predicted)
    missing = int((~(predicted > 0)).sum())
    return "\n".join([*lines, f"rows {len(rows)}, of them {missing} on GPUs that are not known"])


def totals(rows: Sequence[MeasuredOverlap], predicted: Floats) -> list[str]:
    """A line for each source of single launches: the error of the total time of its kernels."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row, guess in zip(rows, predicted.tolist(), strict=True):
        if row.is_single_launch and math.isfinite(row.slowdown) and math.isfinite(guess):
            times = (row.alone_s * row.slowdown, row.alone_s * guess, row.alone_s)
            found.setdefault(row.cells.get("source", ""), []).append(times)
    lines = []
    for source, times_of in found.items():
        truth, model, none = (math.fsum(column) for column in zip(*times_of, strict=True))
        lines.append(
            f"total time of {len(times_of)} single launches of {source}: {model / truth - 1:+.1%}; no slowdown: "
            f"{none / truth - 1:+.1%}"
        )
    return lines


def _write(out: Path, rows: Sequence[MeasuredOverlap], predicted: Floats) -> None:
    names = list(rows[0].cells) if rows else []
    columns = [name for name in names if name != COLUMN] + [COLUMN]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row, guess in zip(rows, predicted.tolist(), strict=True):
        writer.writerow({**row.cells, COLUMN: f"{guess:.6g}" if math.isfinite(guess) else ""})
    data = text.getvalue().encode("utf-8")
    try:
        write_atomic(out, gzip.compress(data, mtime=0) if out.name.endswith(".gz") else data)
    except OSError as error:
        raise SpecError("out", str(out), f"cannot be written: {error.strerror}", "give another folder") from None
