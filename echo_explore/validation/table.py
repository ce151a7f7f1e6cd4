"""A table of measured runs as text: lines, cells and quotes, before anything is known of their meaning."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from echo_explore.core import SpecError, plain_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row as text.

    Attributes:
        cells: by the name of their column; those that the row leaves out are empty.
        further: cells beyond those of the header.
        num_missing: cells that the row leaves out.
    """

    cells: dict[str, str]
    further: tuple[str, ...] = ()
    num_missing: int = 0

    def check(self, *, where: str) -> None:
        """Refuses a row whose cells are not those of its header.

        Raises:
            SpecError: it has more of them, or a quote that swallows the lines behind it.
        """
        if self.further:
            text = ", ".join(self.further)
            raise SpecError(f"{where}: cells", text[:80], "are more than the header has", "quote its commas")
        name = next((name for name, cell in self.cells.items() if "\n" in cell), None)
        if self.num_missing and name is not None:
            first, *others = self.cells[name].splitlines()
            rule = f"has a quote that is not closed: {len(others)} lines behind it are in this cell"
            raise SpecError(f"{where}: {name}", first[:80], rule, "close the quote")


def read_table(path: Path) -> list[TableRow]:
    """The rows of a CSV or CSV.gz as text.

    Raises:
        SpecError: missing, unreadable, not UTF-8, without rows, or two columns of one name.
    """
    try:
        data = path.read_bytes()
        text = plain_bytes(data).decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError("file", str(path), "does not exist", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("file", str(path), f"cannot be read as CSV: {error}", "give a CSV or CSV.gz in UTF-8") from None
    limit = csv.field_size_limit(max(len(text), 1))  # the text is in memory as it is: no cell is too long
    try:
        names, *rows = [line for line in csv.reader(io.StringIO(text, newline="")) if line] or [[]]
    finally:
        csv.field_size_limit(limit)
    if len(names) == 1 and (found := next((mark for mark in ";\t|" if names[0].count(mark) > 1), "")):
        rule = "separates the cells, where it must be a comma"
        raise SpecError(f"{path.name}: separator", repr(found), rule, "save the table as CSV with commas")
    rows = [row for row in rows if any(cell.strip() for cell in row)]  # spreadsheets end in lines of commas
    if not rows:
        raise SpecError("file", str(path), "has no rows", "give a table with a header and at least one row")
    twice = [name for number, name in enumerate(names) if name and name in names[:number]]
    if twice:
        raise SpecError(f"{path.name}: {twice[0]}", "(header)", "is the name of two columns", "rename or delete one")
    return [
        TableRow(
            cells=dict(zip(names, row + [""] * len(names), strict=False)),
            further=tuple(row[len(names) :]),
            num_missing=max(0, len(names) - len(row)),
        )
        for row in rows
    ]
