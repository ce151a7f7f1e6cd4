"""Fit the interference model to kernels measured alone and beside a collective, and write its calibration file."""

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import tomli_w

from echo_explore.core import SpecError, write_atomic
from echo_explore.core.home import find_data_file
from echo_explore.interference.coefficients import (
    InterferenceCoefficients,
    SharingCoefficients,
    load_coefficients,
    user_coefficients,
)
from echo_explore.interference.measured import MeasuredOverlap, Scene, read_overlaps, scenes_of
from echo_explore.interference.overlap_score import OverlapScore, judged_rows, score_overlap
from echo_explore.interference.residual import Residual

_LEAST, _MOST, _STEPS = 0.25, 16.0, 97
"""Packets ahead that are tried: a sixteenth of an octave apart, because the error has flat parts and many minima."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFit:
    """Fitted constants and how well they do.

    Attributes:
        sharing: fitted.
        score: on the rows that they were fitted on.
        held_back: error of each group (GPU and class) under constants fitted on all other groups.
        num_rows: rows that count.
    """

    sharing: SharingCoefficients
    score: OverlapScore
    held_back: dict[str, float]
    num_rows: int


def fit_overlap(
    tables: Sequence[Path], *, start: InterferenceCoefficients, progress: Callable[[str], None] = lambda text: None
) -> OverlapFit:
    """The constants with the least mean error over groups, and their error on groups held back.

    Args:
        tables: CSV or CSV.gz files; columns as docs/interference.md says.
        start: counts and chunk sizes to use, and the constant that is counted, not fitted.
        progress: told what is going on.

    Raises:
        SpecError: a bad table, or fewer than one group of rows that count.
    """
    rows = [row for table in tables for row in read_overlaps(table)]
    scenes = scenes_of(rows, start)
    counted = [i for i in judged_rows(rows) if scenes[i] is not None]
    groups = sorted({_group(rows[i]) for i in counted if _size(rows, counted, _group(rows[i])) >= 5})
    if not groups:
        raise SpecError(
            "measured",
            len(rows),
            "has no group of at least 5 rows that count",
            "measure more; see docs/interference.md",
        )
    progress(f"{len(counted)} rows count, {len(groups)} groups")
    sharing = _fit(rows, scenes, counted, start.sharing)
    held_back = {}
    for group in groups if len(groups) > 1 else ():
        rest = [i for i in counted if _group(rows[i]) != group]
        own = [i for i in counted if _group(rows[i]) == group]
        held_back[group] = _error(rows, scenes, own, _fit(rows, scenes, rest, start.sharing))
        progress(f"{group} held back: {held_back[group]:.3f}")
    return OverlapFit(
        sharing=sharing,
        score=_score(rows, scenes, counted, sharing),
        held_back=held_back,
        num_rows=len(counted),
    )


def _group(row: MeasuredOverlap) -> str:
    return f"{row.cells['gpu']} {row.cells['compute_class']}"


def _size(rows: Sequence[MeasuredOverlap], counted: Sequence[int], group: str) -> int:
    return sum(_group(rows[i]) == group for i in counted)


def _score(
    rows: Sequence[MeasuredOverlap],
    scenes: Sequence[Scene | None],
    counted: Sequence[int],
    sharing: SharingCoefficients,
) -> OverlapScore:
    chosen = [rows[i] for i in counted]
    predicted = [scene.slowdown(sharing) for i in counted if (scene := scenes[i]) is not None]
    return score_overlap(chosen, predicted, all_count=True)


def _error(
    rows: Sequence[MeasuredOverlap],
    scenes: Sequence[Scene | None],
    counted: Sequence[int],
    sharing: SharingCoefficients,
) -> float:
    return _score(rows, scenes, counted, sharing).model


def _fit(
    rows: Sequence[MeasuredOverlap], scenes: Sequence[Scene | None], counted: Sequence[int], fixed: SharingCoefficients
) -> SharingCoefficients:
    """The one constant that is fitted; of equal errors the least."""
    tried = [replace(fixed, packets_ahead=float(p)) for p in np.geomspace(_LEAST, _MOST, _STEPS)]
    return min(tried, key=lambda sharing: round(_error(rows, scenes, counted, sharing), 6))


def write_calibration(fit: OverlapFit, out: Path, *, source: str) -> None:
    """Write the shipped calibration with the fitted constants in place of its own.

    Args:
        fit: what to write.
        out: file to make; it must not exist.
        source: what it was fitted on, for the comment.

    Raises:
        SpecError: `out` exists or cannot be written.
    """
    shipped = find_data_file("calibrations", "interference")
    if shipped is None:
        raise SpecError("calibrations/interference.toml", "(missing)", "is not installed", "install the package again")
    text = rewritten(shipped.read_text(encoding="utf-8"), fit, source=source)
    _write_new(out, text)
    load_coefficients(out)


def rewritten(text: str, fit: OverlapFit, *, source: str) -> str:
    """The text of a calibration file with the fitted constants and a comment about them."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    sharing = fit.sharing
    text = re.sub(r"(?m)^packets_ahead = .*$", f"packets_ahead = {sharing.packets_ahead:.3g}", text)
    clean = " ".join(source.split())
    comment = f"# {clean}; {fit.num_rows} rows, mean error over groups {fit.score.model:.3f}, {today}"
    return re.sub(r"(?m)^(# [^\n]*\n)?\[sharing\]$", lambda _: f"{comment}\n[sharing]", text)


def write_user_calibration(out: Path, coefficients: InterferenceCoefficients, residual: Residual | None) -> None:
    """Write constants and a residual as a calibration file for `predict --calibration`.

    Args:
        out: file to make; it must not exist.
        coefficients: of the physical model.
        residual: None for none.

    Raises:
        SpecError: `out` exists or cannot be written.
    """
    table: dict[str, object] = {
        "schema": 1,
        "sharing": asdict(coefficients.sharing),
        "channels": dict(coefficients.num_channels),
        "chunk": {name: f"{size / 1024:.6g} KiB" for name, size in coefficients.chunk_bytes.items()},
    }
    if residual is not None:
        table["residual"] = residual.to_toml()
    _write_new(out, tomli_w.dumps({"schema": 1, "interference": table}))
    user_coefficients(out)


def _write_new(out: Path, text: str) -> None:
    try:
        write_atomic(out, text.encode(), overwrite=False)
    except FileExistsError:
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file") from None
    except OSError as error:
        raise SpecError("out", str(out), f"cannot be written: {error.strerror}", "give another folder") from None
