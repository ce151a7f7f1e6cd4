"""Reads the output of nccl-tests and rccl-tests: one row a size, with ranks and hosts from its header.

A log may hold several tables, of several types (-d), thread counts (-t) and hosts, with warnings and errors in between.
Rows whose check failed (#wrong above 0) are left out. A table that a failure cut short is left out; a log that holds
nothing else is an error that names the failure's first cause. A table that just stops, without the closing lines that
every test prints, is an error. Launchers' marks before each line (`mpirun --tag-output`, `srun -l`) are read over.
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
_CAUSE = re.compile(r"Test (?:NCCL|CUDA|HIP|RCCL) failure")
_FAILURE = re.compile(_CAUSE.pattern + r"|Test failure|Segmentation fault|\bAborted\b|Primary job")
_MARK = re.compile(r"\s*(?:\[[^\]\s]*\d+,\s*\d+\][^<>]*<std(?:out|err|diag)>:|\d+:|\[\d+\])(?=\s|$|#) ?")
"""What a launcher puts before a line: `[1,0]<stdout>:` (Open MPI), `0: ` (Slurm), `[0] ` (MPICH)."""
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
        devices: names of the GPUs as the log lists them, sorted; empty where it does not.
    """

    collective: str
    dtype: str
    size_bytes: float
    num_ranks: int
    num_hosts: int
    time_s: float | None
    in_place_s: float | None
    devices: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Table:
    line: int
    collective: str | None
    hosts: list[str]
    devices: tuple[str, ...]
    rows: list[LogRow] = field(default_factory=list)


def read_nccl_log(path: Path, *, collective: str | None = None) -> tuple[LogRow, ...]:
    """The rows of a log.

    Args:
        path: what the test printed.
        collective: which test it was, where the log does not say so itself (older versions).

    Raises:
        SpecError: not readable, no table, a failed run, a table cut short, every check failed, a rank listed twice,
            ranks or collective unknown.
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
        self._ranks: dict[int, tuple[str, str]] = {}
        self._listing = False
        self._table: _Table | None = None
        self._finished: list[_Table] = []
        self._failure: tuple[int, str] | None = None
        self._num_wrong = 0

    def rows(self, lines: Iterable[str]) -> tuple[LogRow, ...]:
        """All rows of tables that were not cut short."""
        for number, line in enumerate(lines, start=1):
            self._line(number, _MARK.sub("", line, count=1))
        self._close(ended=False)
        rows = [row for table in self._finished for row in table.rows]
        if not rows and self._failure is not None:
            number, text = self._failure
            raise SpecError(f"{self._name}: line {number}", text, "the run failed", "give the log of a whole run")
        if not rows and self._num_wrong:
            rule = f"all {self._num_wrong} rows failed their check (#wrong above 0)"
            raise SpecError("log", self._name, rule, "repair the machine and measure again")
        if not rows:
            raise SpecError("log", self._name, "holds no table of nccl-tests", "give the output of a test")
        return tuple(rows)

    def _line(self, number: int, line: str) -> None:
        if match := _NAME.search(line):
            self._named = _TESTS[match[1]]
        if match := _RANK.search(line):
            self._list(number, int(match[1]), match[2], match[4].strip())
        elif _FAILURE.search(line):
            if self._failure is None or (_CAUSE.search(line) and not _CAUSE.search(self._failure[1])):
                self._failure = (number, " ".join(line.split())[:120])
            self._table = None
            self._listing = False
        elif _HEADER.search(line):
            self._close(ended=False)
            self._listing = False
            seats = [self._ranks[rank] for rank in sorted(self._ranks)]
            self._table = _Table(
                line=number,
                collective=self._given or self._named,
                hosts=[host for host, _ in seats],
                devices=tuple(sorted({device for _, device in seats if device})),
            )
        elif _END.search(line):
            self._close(ended=True)
        elif self._table is not None and (match := _ROW.fullmatch(line)):
            row = self._row(number, match, self._table)
            if row is not None:
                self._table.rows.append(row)

    def _list(self, number: int, rank: int, host: str, device: str) -> None:
        if not self._listing:
            self._close(ended=False)
            self._ranks = {}
        self._listing = True
        if rank in self._ranks:
            rule = "is listed twice: each process ran a test of its own"
            raise SpecError(f"{self._name}: line {number}", f"Rank {rank}", rule, "build the tests with MPI=1")
        self._ranks[rank] = (host, device)

    def _close(self, *, ended: bool) -> None:
        table, self._table = self._table, None
        if table is None or not table.rows:
            return
        if not ended:
            rule = f"stops after {len(table.rows)} rows, without its closing line '# Out of bounds values'"
            raise SpecError(f"{self._name}: line {table.line}", "table", rule, "give the log of a whole run")
        self._finished.append(table)

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
            self._num_wrong += any(_is_wrong(cells[i + 3]) for i in range(0, len(cells), 4))
            return None
        return LogRow(
            collective=table.collective,
            dtype=match[3],
            size_bytes=float(match[1]),
            num_ranks=len(table.hosts),
            num_hosts=len(set(table.hosts)),
            time_s=times[0],
            in_place_s=times[1] if len(times) > 1 else None,
            devices=table.devices,
        )


def _time_s(cells: list[str]) -> float | None:
    """Seconds of one half of a row; None where it was not measured or its check failed."""
    time_us, wrong = cells[0], cells[3]
    if not _is_number(time_us) or float(time_us) <= 0:
        return None
    return None if _is_wrong(wrong) else float(time_us) * 1e-6


def _is_wrong(cell: str) -> bool:
    """A count of wrong values above 0; older versions print an error such as 2e-07 instead."""
    return _is_number(cell) and "e" not in cell.lower() and float(cell) > 0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.lower() not in ("nan", "inf", "-inf")
