"""`validate steps`: predict every measured run of a table, keep what is done, print the scores.

Nothing is overwritten. While it runs, finished rows are appended to `OUT.partial` (JSON lines, synced one by one),
whose first line names the inputs; the same command again continues there, other inputs are refused. `OUT` appears when
all is done.
"""

import csv
import fcntl
import gzip
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from echo_explore.core import EchoError, SpecError, write_atomic
from echo_explore.core.hashing import content_hash, file_hash
from echo_explore.core.versions import MODEL_VERSION, PACKAGE_VERSION, TRACER_VERSION
from echo_explore.specs import Candidate
from echo_explore.validation.assumptions import assumed_of
from echo_explore.validation.mapping import Capability, Declined, map_row, unsupported
from echo_explore.validation.rows import MeasuredRow, RefusedRow, read_measured
from echo_explore.validation.score import Outcome, Scores, score

_LOG = logging.getLogger(__name__)
COLUMNS = ("id", "step_time_s", "step_time_low_s", "step_time_high_s", "peak_memory_bytes", "fits", "reason", "assumed")
"""Leading columns of the table of predictions; the keys of the breakdown follow."""
REPORT_EVERY_S = 5.0
"""Seconds between lines of progress."""
DOUBTFUL_FACTOR = 100.0
"""A measurement so many times longer or shorter than its prediction has another unit, most likely."""


class StepPrediction(Protocol):
    """What is taken from a prediction."""

    @property
    def step_time_s(self) -> float:
        """Predicted step time."""

    @property
    def step_time_low_s(self) -> float:
        """Lower end of its interval."""

    @property
    def step_time_high_s(self) -> float:
        """Upper end of its interval."""

    @property
    def reserved_memory_bytes(self) -> float:
        """What the allocator of the fullest GPU holds at its peak."""

    @property
    def fits(self) -> bool:
        """The peak is within a GPU's memory."""

    @property
    def breakdown(self) -> Mapping[str, float]:
        """Seconds by cause."""


Predict = Callable[[Candidate], StepPrediction]


def validate_steps(
    measured: Path,
    out: Path,
    predict: Predict,
    *,
    progress: Callable[[str], None] = lambda text: None,
    supported: Capability = unsupported,
    settings: Mapping[str, str] | None = None,
    expert_load: tuple[float, ...] = (),
) -> Scores:
    """Predict the runs of `measured`, write the table `out`, and give the scores of the runs that count.

    Args:
        measured: CSV or CSV.gz of measured steps.
        out: CSV or CSV.gz to write; it must not exist.
        predict: predicts one candidate; its EchoErrors become the reason why a run is declined.
        progress: told what is going on, a line at a time.
        supported: says why a candidate cannot be predicted.
        expert_load: relative load of each expert in runs of mixtures whose own column `routing` is empty.
        settings: whatever else the predictions depend on, such as the hash of a calibration file.

    Raises:
        SpecError: the table is wrong, `out` exists or cannot be written, or `OUT.partial` belongs to other inputs.
    """
    if out.exists():
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file or delete it")
    table = read_measured(measured)
    for refused in table.refused:
        progress(f"declined: {refused.reason}")
    rows = [
        replace(row, expert_load=expert_load) if row.moe_experts and not row.expert_load else row for row in table.rows
    ]
    header: dict[str, Any] = {
        "measured": file_hash(measured),
        "package": PACKAGE_VERSION,
        "model_version": MODEL_VERSION,
        "tracer_version": TRACER_VERSION,
        "settings": dict(settings or {}),
    }
    if any(row.expert_load for row in rows):
        header["routing"] = content_hash([[row.id, *map(repr, row.expert_load)] for row in rows])
    partial = out.with_name(out.name + ".partial")
    with _appended(partial, header) as (done, file):
        if done:
            progress(f"continuing {partial}: {len(done)} of {len(rows)} rows are done")
        results = _predict_all(rows, done, file, predict, supported, progress)
    for row in rows:
        if text := _doubt(row, results[row.id].get("step_time_s")):
            progress(f"doubtful: {measured.name}: {row.id}: {text}")
    results |= {row.id: {"id": row.id, "reason": row.reason} for row in table.refused}
    _write_table(out, [results[name] for name in (*(row.id for row in rows), *(row.id for row in table.refused))])
    every: list[MeasuredRow | RefusedRow] = [*rows, *(row for row in table.refused if row.is_run)]
    partial.unlink(missing_ok=True)
    return score(outcomes_of(every, results))


def _doubt(row: MeasuredRow, predicted_s: float | None) -> str:
    """Why a measured time is hardly in seconds; empty where nothing speaks against it. The row counts all the same."""
    if row.step_time_s is None or predicted_s is None:
        return ""
    if 1 / DOUBTFUL_FACTOR <= row.step_time_s / predicted_s <= DOUBTFUL_FACTOR:
        return ""
    return f"step_time_s = {row.values['step_time_s']}: predicted are {predicted_s:.4g} s; is the unit seconds?"


def outcomes_of(rows: Sequence[MeasuredRow | RefusedRow], results: Mapping[str, Mapping[str, Any]]) -> list[Outcome]:
    """Predictions beside measurements: rows with core=yes where the table has such a column, else all that finished."""
    counted = [row for row in rows if row.values.get("core") == "yes"] or rows
    return [
        Outcome(
            cells=row.values,
            measured_s=row.step_time_s,
            predicted_s=results[row.id].get("step_time_s"),
            low_s=results[row.id].get("step_time_low_s"),
            high_s=results[row.id].get("step_time_high_s"),
            reason=results[row.id].get("reason", ""),
        )
        for row in counted
        if row.step_time_s is not None
    ]


@dataclass(slots=True)
class _Ticker:
    """Says now and then how far the work is."""

    progress: Callable[[str], None]
    total: int
    started_s: float
    told_s: float

    def tell(self, number: int, num_declined: int) -> None:
        now = time.monotonic()
        if number < self.total and now - self.told_s < REPORT_EVERY_S:
            return
        self.told_s = now
        rate = number / max(now - self.started_s, 1e-9)
        left = (self.total - number) / rate if rate else 0.0
        self.progress(f"{number}/{self.total} rows, {num_declined} declined, {rate:.1f} rows/s, {left:.0f} s left")


def _predict_all(
    rows: list[MeasuredRow],
    done: dict[str, dict[str, Any]],
    file: TextIO,
    predict: Predict,
    supported: Capability,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """The result of every row by id; new ones are appended to `file` as they come."""
    results = dict(done)
    same: dict[str, dict[str, Any]] = {}
    todo = [row for row in rows if row.id not in results]
    ticker = _Ticker(progress, len(todo), time.monotonic(), time.monotonic())
    for number, row in enumerate(todo, start=1):
        mapped = _mapped(row, supported)
        if isinstance(mapped, Declined):
            result: dict[str, Any] = {"reason": mapped.reason}
        else:
            if mapped.hash not in same:
                same[mapped.hash] = _predict_one(row, mapped, predict)
            result = same[mapped.hash]
        candidate = None if isinstance(mapped, Declined) else mapped
        results[row.id] = {"id": row.id, **result, "assumed": assumed_of(row, candidate)}
        _append(file, results[row.id])
        ticker.tell(number, sum("step_time_s" not in r for r in results.values()))
    return results


def _mapped(row: MeasuredRow, supported: Capability) -> Candidate | Declined:
    try:
        return map_row(row, supported=supported)
    except Exception as error:  # a bug of ours in one row must not lose the others; it is in the log and in the table
        _LOG.exception("row %s", row.id)
        return Declined(reason=f"internal error: {type(error).__name__}: {error}")


def _predict_one(row: MeasuredRow, candidate: Candidate, predict: Predict) -> dict[str, Any]:
    """What is kept of a prediction, or the reason why there is none."""
    try:
        prediction = predict(candidate)
    except EchoError as error:
        return {"reason": str(error)}
    except Exception as error:  # a bug of ours in one row must not lose the others; it is in the log and in the table
        _LOG.exception("row %s", row.id)
        return {"reason": f"internal error: {type(error).__name__}: {error}"}
    if not 0 < prediction.step_time_s < math.inf:
        return {"reason": f"internal error: predicted {prediction.step_time_s} s"}
    return {
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.step_time_low_s,
        "step_time_high_s": prediction.step_time_high_s,
        "peak_memory_bytes": prediction.reserved_memory_bytes,  # what measured tables state
        "fits": prediction.fits,
        "breakdown": dict(prediction.breakdown),
    }


def _append(file: TextIO, value: Mapping[str, Any]) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _appended(path: Path, header: dict[str, Any]) -> Iterator[tuple[dict[str, dict[str, Any]], TextIO]]:
    """The results that `path` holds, by id, and the file open and locked for more.

    A last line that a crash cut short is dropped.

    Raises:
        SpecError: it cannot be written, another run is writing it, or its first line names other inputs.
    """
    try:
        file = path.open("a+", encoding="utf-8", newline="\n")
    except OSError as error:
        raise SpecError("out", str(path), f"cannot be written: {error.strerror}", "give a folder of yours") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SpecError("out", str(path), "is being written by another run", "wait or give another --out") from None
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        done = _finished(path, whole, header)
        file.truncate(sum(map(len, whole)))
        if not whole:
            _append(file, header)
        yield done, file


def _finished(path: Path, lines: list[bytes], header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The results in the lines of a partial file, by id."""
    try:
        found, *results = [json.loads(line) for line in lines] or [header]
        done = {result["id"]: result for result in results}
    except (ValueError, KeyError, TypeError):
        raise SpecError("out", str(path), "is not a file of finished rows", "delete it or give another --out") from None
    if found != header:
        raise SpecError("out", str(path), "was begun with other inputs or versions", "delete it or give another --out")
    return done


def _write_table(out: Path, results: list[dict[str, Any]]) -> None:
    """Write the table of predictions as a whole.

    Raises:
        SpecError: it appeared meanwhile, or cannot be written.
    """
    parts = sorted({key for result in results for key in result.get("breakdown", {})})
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*COLUMNS, *parts])
    for result in results:
        breakdown = result.get("breakdown", {})
        writer.writerow([*(result.get(name, "") for name in COLUMNS), *(breakdown.get(name, "") for name in parts)])
    data = buffer.getvalue().encode()
    try:
        write_atomic(out, gzip.compress(data, mtime=0) if out.suffix == ".gz" else data, overwrite=False)
    except FileExistsError:
        raise SpecError("out", str(out), "exists, and nothing is overwritten", "give another file") from None
    except OSError as error:
        raise SpecError("out", str(out), f"cannot be written: {error.strerror}", "give a folder of yours") from None
