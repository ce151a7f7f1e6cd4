"""Names that become paths, and what to suggest for a wrong one."""

import difflib
import re
from collections.abc import Iterable

from echo_explore.core.errors import SpecError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")


def check_name(name: str, *, field: str) -> str:
    """`name` itself, if it is safe as a file name.

    Raises:
        SpecError: it is not 1 to 80 of `A-Z a-z 0-9 . _ -`, or it is `.` or `..`.
    """
    if not _NAME.fullmatch(name) or name.strip(".") == "":
        raise SpecError(
            field, name, "must match [A-Za-z0-9._-]{1,80}", "use letters, digits, dots, dashes, underscores"
        )
    return name


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The `count` names of `known` most like `name`, best first."""
    names = sorted(set(known))
    scored = sorted(names, key=lambda k: -difflib.SequenceMatcher(None, name.lower(), k.lower()).ratio())
    return scored[:count]
