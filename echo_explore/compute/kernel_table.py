"""Tables of measured kernels: CSV columns, what they must hold, and which kind of kernel they time.

Columns are described in docs/compute_model.md. Times are microseconds in `latency_us`, and nothing else.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError, plain_bytes

Floats = npt.NDArray[np.float64]
Kind = Literal["gemm", "attention", "elementwise"]
REQUIRED: Mapping[Kind, tuple[str, ...]] = {
    "gemm": ("gpu", "dtype", "m", "n", "k", "latency_us"),
    "attention": (
        "gpu", "dtype", "batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal", "pass", "latency_us",
    ),
    "elementwise": ("gpu", "op", "rows", "cols", "latency_us"),
}  # fmt: skip
"""Columns that each kind of table must have."""
DEFAULTS: Mapping[str, str] = {
    "batch": "1", "source": "", "kernel": "", "kv_dtype": "", "pass": "fwd", "dtype": "bfloat16", "approx_bytes": "",
}  # fmt: skip
"""What a column that is left out stands for."""
_MARKS: Mapping[Kind, frozenset[str]] = {
    "gemm": frozenset(("m", "n", "k")),
    "attention": frozenset(("heads", "seq_q", "head_dim")),
    "elementwise": frozenset(("op", "rows", "cols")),
}
PASSES = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """A table as columns of text.

    Attributes:
        name: file name, for messages.
        kind: what it times.
        columns: (num_rows,) texts by column, as read.
    """

    name: str
    kind: Kind
    columns: Mapping[str, Sequence[str]]

    @property
    def num_rows(self) -> int:
        """Rows below the header."""
        return len(self.columns["latency_us"])

    def text(self, column: str) -> Sequence[str]:
        """(num_rows,) texts of a column, or its default."""
        return self.columns.get(column) or [DEFAULTS[column]] * self.num_rows

    def numbers(self, column: str) -> Floats:
        """(num_rows,) positive whole numbers of a column.

        Raises:
            SpecError: a cell is none.
        """
        cells = self.text(column)
        try:
            values = np.array(cells, dtype=np.float64)
        except ValueError:
            values = np.array([_number(cell) for cell in cells])
        wrong = ~(np.isfinite(values) & (values >= 1) & (values == np.floor(values)))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise SpecError(
                f"{self.name}: row {row + 2}: {column}", cells[row], "must be a whole number from 1 up", "correct it"
            )
        return values

    def check_heads(self) -> None:
        """Refuse rows of attention whose query heads share keys unevenly.

        Raises:
            SpecError: kv_heads does not divide heads.
        """
        heads, kv_heads = self.numbers("heads"), self.numbers("kv_heads")
        if (wrong := np.flatnonzero(heads % kv_heads)).size:
            row = int(wrong[0])
            raise SpecError(
                f"{self.name}: row {row + 2}: kv_heads", self.text("kv_heads")[row],
                f"must divide heads = {heads[row]:.0f}", "correct one of them",
            )  # fmt: skip

    def bytes_or_zero(self) -> Floats:
        """(num_rows,) approx_bytes; 0 where a row does not state them.

        Raises:
            SpecError: a cell is no finite number from 0 up.
        """
        cells = self.text("approx_bytes")
        values = np.array([_number(cell) if cell.strip() else 0.0 for cell in cells])
        for row, (cell, value) in enumerate(zip(cells, values.tolist(), strict=True)):
            if not 0 <= value < math.inf:
                raise SpecError(
                    f"{self.name}: row {row + 2}: approx_bytes", cell, "must be a number from 0 (not known) up",
                    "correct it, or leave it empty",
                )  # fmt: skip
        return values

    def latency_us(self) -> Floats:
        """(num_rows,) measured microseconds; 0 where a row has no time or one that is not above 0.

        Raises:
            SpecError: a cell is no number, or carries a unit.
        """
        cells = self.columns["latency_us"]
        values = np.array([_number(cell) if cell.strip() else 0.0 for cell in cells])
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise SpecError(
                f"{self.name}: row {row + 2}: latency_us", cells[row], "must be a number of microseconds, no unit",
                "convert all times to microseconds",
            )  # fmt: skip
        return np.asarray(np.maximum(values, 0.0), dtype=np.float64)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_kernel_table(path: Path) -> KernelTable:
    """A table of kernels from a CSV or CSV.gz.

    Raises:
        SpecError: unreadable, empty, of no known kind, a column missing, or times in more than one unit.
    """
    try:
        data = path.read_bytes()
        text = plain_bytes(data).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""))
        header = [name.strip() for name in next(reader, [])]
        rows = [row for row in reader if row]
    except FileNotFoundError:
        raise SpecError("file", str(path), "does not exist", "check the path") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError("file", str(path), f"cannot be read as CSV: {error}", "give a CSV or CSV.gz in UTF-8") from None
    if not rows:
        raise SpecError("file", str(path), "has no rows", "give a table with a header and at least one row")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise SpecError(f"{path.name}: row {number}", len(row), f"has not {len(header)} cells", "quote its commas")
    times = [name for name in header if name.startswith(("latency", "time", "duration"))]
    if len(times) > 1:
        raise SpecError(
            f"{path.name}", ", ".join(times), "holds times in more than one column", "keep latency_us alone"
        )
    kind = _kind(path.name, header)
    if missing := [name for name in REQUIRED[kind] if name not in header]:
        found = f"; {times[0]} is not read" if times and times[0] != "latency_us" else ""
        raise SpecError(
            f"{path.name}: {missing[0]}", "(missing)", f"is a column that a {kind} table must have{found}",
            f"add {', '.join(missing)}",
        )  # fmt: skip
    return KernelTable(
        name=path.name, kind=kind, columns=dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
    )


def _kind(name: str, header: Sequence[str]) -> Kind:
    shared = {kind: len(marks & set(header)) for kind, marks in _MARKS.items()}
    best = max(shared, key=lambda kind: shared[kind])
    if shared[best] == 0:
        known = "; ".join(f"{kind}: {', '.join(columns)}" for kind, columns in REQUIRED.items())
        raise SpecError(
            f"{name}", ", ".join(header)[:60], "is no table of gemm, attention or elementwise kernels", known
        )
    return best
