"""Reads the output of nccl-tests and rccl-tests: one row a size, with ranks and hosts from its header.

A log may hold several tables, of several types (-d), thread counts (-t) and hosts, with warnings and errors in between.
Rows whose check failed (#wrong above 0) are left out. A table that a failure cut short is left out; a log that holds
nothing else is an error that names the failure.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from echo_explore.core import SpecError

_TESTS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "alltoall",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
_NAME = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast|reduce)_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*\bon\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s*(.*)")
_FAILURE = re.compile(r"Test (?:NCCL|CUDA|HIP|RCCL) failure|Test failure|Segmentation fault|\bAborted\b|Primary job")
_HEADER = re.compile(r"#\s+size\s+count\s+type")
_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+(.*)")
_END = re.compile(r"#\s*(?:Avg bus bandwidth|Out of bounds values)")
_TIMES_IN_ROW = 8
"""Numbers of a full row after the root: time, algbw, busbw, #wrong, out of place and in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One measured size.

    Attributes:
        collective: as measured tables name it.
        time_s: out of place; None where it was not measured.
        in_place_s: in place; None where it was not measured.
    """

    collective: str
    dtype: str
    size_bytes: float
    num_ranks: int
    num_hosts: int
    time_s: float | None
    in_place_s: float | None


@dataclass(slots=True, kw_only=True)
class _Table:
    collective: str | None
    hosts: list[str]
    rows: list[LogRow] = field(default_factory=list)
    ended: bool = False


def read_nccl_log(path: Path, *, collective: str | None = None) -> tuple[LogRow, ...]:
    """The rows of a log.

    Args:
        path: what the test printed.
        collective: which test it was, where the log does not say so itself (older versions).

    Raises:
        SpecError: not readable, no table, a failed run, ranks or collective unknown.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SpecError("log", str(path), f"cannot be read: {error.strerror}", "give the output of a test") from None
    return _Parser(path.name, collective).rows(text.splitlines())


class _Parser:
    """State of one pass over a log."""

    def __init__(self, name: str, collective: str | None) -> None:
        self._name = name
        self._given = collective
        self._named: str | None = None
        self._ranks: dict[int, str] = {}
        self._listing = False
        self._table: _Table | None = None
        self._finished: list[_Table] = []
        self._failure: tuple[int, str] | None = None

    def rows(self, lines: Iterable[str]) -> tuple[LogRow, ...]:
        """All rows of tables that were not cut short."""
        for number, line in enumerate(lines, start=1):
            self._line(number, line)
        self._close()
        rows = [row for table in self._finished for row in table.rows]
        if not rows and self._failure is not None:
            number, text = self._failure
            raise SpecError(f"{self._name}: line {number}", text, "the run failed", "give the log of a whole run")
        if not rows:
            raise SpecError("log", self._name, "holds no table of nccl-tests", "give the output of a test")
        return tuple(rows)

    def _line(self, number: int, line: str) -> None:
        if match := _NAME.search(line):
            self._named = _TESTS[match[1]]
        if match := _RANK.search(line):
            if not self._listing:
                self._close()
                self._ranks = {}
            self._listing = True
            self._ranks[int(match[1])] = match[2]
        elif _FAILURE.search(line):
            self._failure = (number, " ".join(line.split())[:120])
            self._table = None
        elif _HEADER.search(line):
            self._close()
            self._listing = False
            hosts = [self._ranks[rank] for rank in sorted(self._ranks)]
            self._table = _Table(collective=self._given or self._named, hosts=hosts)
        elif _END.search(line):
            self._close()
        elif self._table is not None and (match := _ROW.fullmatch(line)):
            row = self._row(number, match, self._table)
            if row is not None:
                self._table.rows.append(row)

    def _close(self) -> None:
        if self._table is not None and self._table.rows:
            self._finished.append(self._table)
        self._table = None

    def _row(self, number: int, match: re.Match[str], table: _Table) -> LogRow | None:
        cells = match[4].split()
        while cells and not _is_number(cells[0]):  # the operation
            cells.pop(0)
        if len(cells) % 4 == 1:  # the root
            cells.pop(0)
        if len(cells) not in (4, _TIMES_IN_ROW):
            return None
        if table.collective is None:
            rule = "the log does not say which test it was"
            raise SpecError(f"{self._name}: line {number}", "collective", rule, "give --collective")
        if not table.hosts:
            rule = "the log does not list its ranks (lines '# Rank 0 ...')"
            raise SpecError(f"{self._name}: line {number}", "ranks", rule, "keep the header of the output")
        times = [_time_s(cells[i : i + 4]) for i in range(0, len(cells), 4)]
        if all(time is None for time in times):
            return None
        return LogRow(
            collective=table.collective,
            dtype=match[3],
            size_bytes=float(match[1]),
            num_ranks=len(table.hosts),
            num_hosts=len(set(table.hosts)),
            time_s=times[0],
            in_place_s=times[1] if len(times) > 1 else None,
        )


def _time_s(cells: list[str]) -> float | None:
    """Seconds of one half of a row; None where it was not measured or its check failed."""
    time_us, wrong = cells[0], cells[3]
    if not _is_number(time_us) or float(time_us) <= 0:
        return None
    if _is_number(wrong) and "e" not in wrong.lower() and float(wrong) > 0:
        return None
    return float(time_us) * 1e-6


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.lower() not in ("nan", "inf", "-inf")
