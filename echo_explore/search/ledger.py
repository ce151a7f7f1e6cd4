"""The ledger: one JSON line for each trial, in trial order, synced in batches. It is the truth about a study.

Line 1 says what the study is; equal studies have equal first lines. Every later line is a trial or says that the search
had come to its end there. A line that was torn by a kill or a full disk is cut off when the study goes on; whole lines
are never changed. One driver at a time: the file is locked while it is open for writing.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from echo_explore.core import StudyError, canonical_json
from echo_explore.core.versions import LEDGER_SCHEMA
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Outcome, TrialRecord

Header = Mapping[str, Any]
_NOT_COMPARED = ("written_by", "space")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerContents:
    """What a ledger file holds.

    Attributes:
        header: what the study is.
        records: trials 0, 1, 2, ...
        end: what the last line says if the search had come to its end there, else None.
        num_whole_bytes: length of the file up to the end of its last whole line.
    """

    header: Header
    records: tuple[TrialRecord, ...]
    end: Mapping[str, Any] | None
    num_whole_bytes: int


def record_to_json(record: TrialRecord) -> dict[str, Any]:
    """The JSON object of a trial; floats keep every digit."""
    line: dict[str, Any] = {"trial": record.trial, "point": record.point.params(), "state": record.state}
    line |= {"values": list(record.values), "memory_overshoot": record.memory_overshoot}
    if record.reason:
        line["reason"] = record.reason
    if record.outcome is not None:
        line["outcome"] = asdict(record.outcome)
    return line


def record_from_json(line: Mapping[str, Any]) -> TrialRecord:
    """The trial that a line holds."""
    outcome = line.get("outcome")
    if outcome is not None:
        outcome = Outcome(**{**outcome, "warnings": tuple(outcome["warnings"])})
    return TrialRecord(
        trial=line["trial"],
        point=SearchPoint.from_params(line["point"]),
        state=line["state"],
        values=tuple(line["values"]),
        memory_overshoot=line["memory_overshoot"],
        reason=line.get("reason", ""),
        outcome=outcome,
    )


def read_ledger(path: Path) -> LedgerContents | None:
    """What the ledger holds, without locking it; None if there is none or not even its first line was written.

    Raises:
        StudyError: it cannot be read, is not a ledger, of another schema, or damaged before its last lines.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    return _parse(path, data)


class Ledger:
    """A ledger open for writing, locked; use it as a context manager."""

    def __init__(self, path: Path, header: Header) -> None:
        """Open or make the ledger of the study that `header` describes.

        Raises:
            StudyError: another driver writes it, it belongs to another search, it is damaged, or cannot be opened.
        """
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._lock()
            contents = self._take_over(header)
        except BaseException:
            os.close(self._handle)
            raise
        self.header = contents.header
        self.records = list(contents.records)
        self.end = contents.end

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyError(
                "study", self.path.parent.name, "another driver is writing it", "wait for it, or give another --study"
            ) from None

    def _take_over(self, header: Header) -> LedgerContents:
        size = os.fstat(self._handle).st_size
        contents = _parse(self.path, os.pread(self._handle, size, 0))
        if contents is None:
            os.ftruncate(self._handle, 0)
            first = canonical_json(dict(header)) + "\n"
            self._write(first)
            _sync_folder(self.path.parent)
            return LedgerContents(header=header, records=(), end=None, num_whole_bytes=len(first))
        check_same_study(contents.header, header, self.path)
        if contents.num_whole_bytes < size:
            os.ftruncate(self._handle, contents.num_whole_bytes)
            os.fsync(self._handle)
        return contents

    def append(self, records: Sequence[TrialRecord]) -> None:
        """Write the next trials and sync them to disk; after it returns, a kill does not lose them."""
        if not records:
            return
        numbers = [record.trial for record in records]
        assert numbers == list(range(len(self.records), len(self.records) + len(records))), numbers
        self._write("".join(canonical_json(record_to_json(record)) + "\n" for record in records))
        self.records.extend(records)
        self.end = None

    def append_end(self, end: Mapping[str, Any]) -> None:
        """Note that the search came to its end here."""
        if self.end != end:
            self._write(canonical_json({"end": dict(end)}) + "\n")
            self.end = dict(end)

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        start = os.lseek(self._handle, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)
        except OSError as error:  # a full disk: leave no half line behind
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, start)
            raise StudyError(
                "study",
                str(self.path),
                f"cannot be written ({error.strerror})",
                "free space, then start the same command",
            ) from error

    def close(self) -> None:
        """Unlock and close."""
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_same_study(have: Header, want: Header, path: Path) -> None:
    """Refuse a ledger that another search wrote.

    Raises:
        StudyError: names the first field that differs.
    """
    name = path.parent.name
    for field in sorted({*have, *want} - set(_NOT_COMPARED)):
        if have.get(field) != want.get(field):
            raise StudyError(
                f"study {name}: {field}",
                want.get(field, "(none)"),
                f"the study of that name has {have.get(field, '(none)')}",
                "give another name with --study, or repeat the options that it was made with",
            )


def _parse(path: Path, data: bytes) -> LedgerContents | None:
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].splitlines()
    if not lines:
        if data and not data.startswith(b'{"'):
            raise _not_a_ledger(path)
        return None
    header = _object(lines[0])
    if header is None or "space_hash" not in header:
        raise _not_a_ledger(path)
    if header.get("schema") != LEDGER_SCHEMA:
        raise StudyError(
            f"{path}: schema", header.get("schema"), f"this version reads {LEDGER_SCHEMA}", "give another --study name"
        )
    records: list[TrialRecord] = []
    end: Mapping[str, Any] | None = None
    good = len(lines[0]) + 1
    for number, raw in enumerate(lines[1:], start=1):
        line = _object(raw)
        if line is None:
            if any(_object(later) is not None for later in lines[number + 1 :]):
                raise StudyError(
                    str(path), f"line {number + 1}", "is damaged", "restore the file or give another --study"
                )
            break
        good += len(raw) + 1
        if "end" in line:
            end = line["end"]
            continue
        end = None
        records.append(_record(path, number, line, len(records)))
    return LedgerContents(header=header, records=tuple(records), end=end, num_whole_bytes=good)


def _record(path: Path, number: int, line: Mapping[str, Any], expected: int) -> TrialRecord:
    try:
        record = record_from_json(line)
    except (KeyError, TypeError, ValueError):
        record = None
    if record is None or record.trial != expected:
        raise StudyError(
            str(path), f"line {number + 1}", f"should hold trial {expected}", "restore the file or give another --study"
        )
    return record


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _not_a_ledger(path: Path) -> StudyError:
    return StudyError("study", str(path), "is not a ledger", "give another --study name")


def _unusable(path: Path, error: OSError) -> StudyError:
    why = f"cannot be opened ({error.strerror or error})"
    return StudyError("study", str(path), why, "check path and rights, or give another --study")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
