"""The load of experts from a text file."""

from pathlib import Path

from echo_explore.core import SpecError

LARGEST_FILE_BYTES = 2**20
"""A line an expert; no model has a hundred thousand."""


def read_load(path: Path) -> tuple[float, ...]:
    """Relative load of each expert, in order: numbers on lines or with commas; `#` starts a comment.

    Raises:
        SpecError: no such file, too large, not text, empty, or something that is not a number.
    """
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise SpecError("routing", str(path), "is larger than 1 MiB", "give one number an expert")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("routing", str(path), "is not a text file that can be read", "check the path") from error
    load = []
    for number, line in enumerate(text.splitlines(), start=1):
        for word in line.partition("#")[0].replace(",", " ").split():
            try:
                load.append(float(word))
            except ValueError as error:
                field = f"routing, line {number}"
                raise SpecError(field, word, "is not a number", "give one number an expert") from error
    if not load:
        raise SpecError("routing", str(path), "holds no number", "give one number an expert")
    return tuple(load)
