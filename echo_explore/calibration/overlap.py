"""Fit the interference model to kernels measured alone and beside a collective, and write its calibration file."""

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tomli_w

from echo_explore.calibration.residual_fit import ResidualFit
from echo_explore.core import SpecError, write_atomic
from echo_explore.core.home import find_data_file
from echo_explore.interference.coefficients import (
    InterferenceCoefficients,
    SharingCoefficients,
    load_coefficients,
    user_coefficients,
)
from echo_explore.interference.measured import MeasuredOverlap, Scene, read_overlaps, scenes_of
from echo_explore.interference.overlap_score import MIN_ROWS, OverlapScore, judged_rows, score_overlap
from echo_explore.interference.residual import Residual

_LEAST, _MOST, _STEPS = 0.25, 16.0, 97
"""Packets ahead that are tried: a sixteenth of an octave apart, because the error has flat parts and many minima."""
LIKELY = 2.0
"""Packets ahead where tables do not tell: the one that goes out and the one laid ready behind it (assumed, 2026-12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFit:
    """Fitted constants and how well they do.

    Attributes:
        sharing: fitted.
        allowed: least and most packets ahead whose error is within one standard error of the least.
        score: on the rows that they were fitted on.
        held_back: error of each group (GPU and class) under constants fitted on all other groups; and of each group
            under constants fitted on other GPUs alone, named with `, other GPUs`.
        num_rows: rows that count.
    """

    sharing: SharingCoefficients
    allowed: tuple[float, float]
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
    groups = sorted({_group(rows[i]) for i in counted if _size(rows, counted, _group(rows[i])) >= MIN_ROWS})
    if not groups:
        raise SpecError(
            "measured",
            len(rows),
            "has no group of at least 5 rows that count",
            "measure more; see docs/interference.md",
        )
    progress(f"{len(counted)} rows count, {len(groups)} groups")
    fitting = _Fitting(rows, scenes, counted, start.sharing)
    best, allowed = fitting.best(np.ones(len(counted), dtype=np.bool_))
    sharing = replace(start.sharing, packets_ahead=best)
    held_back = {}
    for group in groups if len(groups) > 1 else ():
        gpu = rows[next(i for i in counted if _group(rows[i]) == group)].cells["gpu"]
        own = [i for i in counted if _group(rows[i]) == group]
        for name, is_rest in (
            (group, [_group(rows[i]) != group for i in counted]),
            (f"{group}, other GPUs", [rows[i].cells["gpu"] != gpu for i in counted]),
        ):
            if not fitting.can_fit(np.array(is_rest)):
                continue
            without, _ = fitting.best(np.array(is_rest))
            held_back[name] = _score(rows, scenes, own, replace(start.sharing, packets_ahead=without)).model
            progress(f"{name} held back: {held_back[name]:.3f} at {without:.3g} packets")
    return OverlapFit(
        sharing=sharing,
        allowed=allowed,
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


class _Fitting:
    """Errors of every row that counts at every number of packets ahead that is tried."""

    def __init__(
        self,
        rows: Sequence[MeasuredOverlap],
        scenes: Sequence[Scene | None],
        counted: Sequence[int],
        fixed: SharingCoefficients,
    ) -> None:
        self._tried = np.geomspace(_LEAST, _MOST, _STEPS)
        known = [(rows[i], scene) for i in counted if (scene := scenes[i]) is not None]
        measured = np.log([row.slowdown for row, _ in known])
        self._errors = np.empty((_STEPS, len(known)))
        for step, packets in enumerate(self._tried.tolist()):
            sharing = replace(fixed, packets_ahead=packets)
            guess = np.log([scene.slowdown(sharing) for _, scene in known])
            self._errors[step] = np.abs(guess - measured)
        self._group = np.array([_group(row) for row, _ in known])

    def _groups(self, chosen: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.bool_]]:
        members = [chosen & (self._group == name) for name in np.unique(self._group[chosen])]
        return [is_member for is_member in members if is_member.sum() >= MIN_ROWS]

    def can_fit(self, chosen: npt.NDArray[np.bool_]) -> bool:
        """Whether any group of the chosen rows has enough."""
        return bool(self._groups(chosen))

    def best(self, chosen: npt.NDArray[np.bool_]) -> tuple[float, tuple[float, float]]:
        """Packets ahead, and the range that the chosen rows allow.

        The error is flat over wide ranges, and its least value is an accident of few rows. So of the numbers around
        the least error that are no worse than it by one standard error of the difference, the one nearest to LIKELY.

        References:
            Breiman et al., Classification and Regression Trees (1984), section 3.4.3: the rule of one standard error.
        """
        groups = self._groups(chosen)
        mean = np.mean([self._errors[:, members].mean(axis=1) for members in groups], axis=0)
        least = int(np.argmin(np.round(mean, 6)))
        worse = self._errors - self._errors[least]
        variance = sum(worse[:, members].var(axis=1, ddof=1) / members.sum() for members in groups)
        allowed = mean - mean[least] <= np.sqrt(variance) / len(groups) + 1e-12
        low = high = least
        while low > 0 and allowed[low - 1]:
            low -= 1
        while high < _STEPS - 1 and allowed[high + 1]:
            high += 1
        span = self._tried[low : high + 1]
        nearest = span[np.argmin(np.abs(np.log(span / LIKELY)))]
        return float(nearest), (float(span[0]), float(span[-1]))


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
    low, high = fit.allowed
    comment = (
        f"# {clean}; {fit.num_rows} rows, mean error over groups {fit.score.model:.3f}, they allow {low:.2f} to "
        f"{high:.2f}, {today}"
    )
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
        "l2": dict(coefficients.l2_bytes_per_clock),
    }
    if residual is not None:
        table["residual"] = residual.to_toml()
    _write_new(out, tomli_w.dumps({"schema": 1, "interference": table}))
    user_coefficients(out)


def write_residual(fit: ResidualFit, out: Path) -> None:
    """Write a residual as `interference_learned.toml` has it: its arrays, and how it did on rows held back.

    Args:
        fit: what to write.
        out: file to make; it must not exist.

    Raises:
        SpecError: `out` exists or cannot be written.
    """
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        "# Learned residual of the interference model; meaning: docs/interference.md.",
        f"# Written by scripts/fit_interference.py, {today}.",
        *(f"# {line}" for line in fit.text().splitlines()),
    ]
    _write_new(out, "\n".join([*lines, tomli_w.dumps({"schema": 1, "residual": fit.residual.to_toml()})]))


def _write_new(out: Path, text: str) -> None:
    try:
        write_atomic(out, text.encode(), overwrite=False)
    except FileExistsError:
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file") from None
    except OSError as error:
        raise SpecError("out", str(out), f"cannot be written: {error.strerror}", "give another folder") from None
