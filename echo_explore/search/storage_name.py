"""How a storage is named: a journal file, or a database by URL with its password from the environment."""

import os
import re
from pathlib import Path
from typing import Final

from echo_explore.core import SpecError
from echo_explore.core.home import refuse_job_copy

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PASSWORD: Final = re.compile(r"(://[^:/@]*):([^/]*)@")


def masked(storage: str) -> str:
    """`storage` with its password replaced by `***`, for messages and files."""
    return _PASSWORD.sub(r"\1:***@", storage)


def resolve_storage(storage: str) -> str:
    """`storage` as it is used: an absolute journal path, or a URL with `${NAME}` still in it.

    Raises:
        SpecError: a password is written out, the file is a folder, or it lies in the throw-away copy of a Ray job.
    """
    if "://" not in storage:
        path = Path(storage).expanduser().resolve()
        refuse_job_copy(path, field="storage")
        if path.is_dir():
            raise SpecError("storage", storage, "is a folder", "give the name of a file in it")
        return str(path)
    password = _PASSWORD.search(storage)
    if password and not _VARIABLE.fullmatch(password[2]):
        raise SpecError(
            "storage",
            masked(storage),
            "the password is written out, where every user of the machine can read it",
            "put it into a variable and write user:${NAME}@host, or use PGPASSWORD",
        )
    scheme, _, rest = storage.partition("://")
    if scheme.partition("+")[0] not in ("sqlite", "postgresql", "postgres", "mysql"):
        raise SpecError(
            "storage", masked(storage), "is not a known kind", "give a file, sqlite:///FILE or postgresql://..."
        )
    if scheme == "sqlite" and rest.startswith("/") and not rest.startswith("//"):
        path = Path(rest[1:]).expanduser().resolve()
        refuse_job_copy(path, field="storage")
        return f"sqlite:///{path}"
    return storage


def with_environment(storage: str) -> str:
    """`storage` with every `${NAME}` replaced by that variable: never print it.

    Raises:
        SpecError: a variable is not set.
    """
    return _VARIABLE.sub(_from_environment, storage)


def _from_environment(match: re.Match[str]) -> str:
    value = os.environ.get(match[1])
    if value is None:
        raise SpecError("storage", match[0], "is not set in the environment", f"export {match[1]}=...")
    return value
