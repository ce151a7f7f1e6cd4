"""Where a mirrored study is kept: a journal file, or a database by URL with its password from the environment."""

import contextlib
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend

from echo_explore.core import SpecError
from echo_explore.search.storage_name import masked, with_environment

_PACKAGES: Final = {"MySQLdb": "mysqlclient"}
"""Packages whose modules are called otherwise."""
_STALE_LOCK_S: Final = 10.0
"""A journal lock older than this was left by a killed process: no write takes a second."""


def open_storage(storage: str, *, mend: bool = False) -> BaseStorage:
    """The Optuna storage of a resolved `storage`.

    Args:
        storage: as `resolve_storage` gives it.
        mend: undo what a kill may have left in a journal; only for its one writer.

    Raises:
        SpecError: a variable is not set, or the file or database cannot be opened.
    """
    if "://" not in storage:
        return _open_journal(Path(storage), mend=mend)
    url = with_environment(storage)
    url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)  # psycopg 3 is what the extra installs
    try:
        return RDBStorage(url)
    except (Exception, SystemExit) as error:  # SQLAlchemy, the driver and Alembic raise dozens of kinds
        # Only the kind: the text may hold the URL with its password.
        cause = error.__cause__ or error
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            package = _PACKAGES.get(cause.name, cause.name)
            raise SpecError(
                "storage", masked(storage), f"needs the Python package {package}", f"pip install {package}"
            ) from None
        kind = type(cause).__name__
        raise SpecError(
            "storage", masked(storage), f"cannot be opened ({kind})", "check server, path and rights"
        ) from None


class BatchingBackend(BaseJournalBackend):
    """A journal file to which `batch` writes everything at once, so that it is synced once and not for every trial."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._backend = JournalFileBackend(str(path))
        self._held: list[dict[str, Any]] | None = None
        self._num_before = 0

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """What the file holds, then what the open batch holds."""
        if self._held is None:
            yield from self._backend.read_logs(log_number_from)
            return
        if log_number_from < self._num_before:
            yield from self._backend.read_logs(log_number_from)
        yield from self._held[max(0, log_number_from - self._num_before) :]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Hold the logs back while a batch is open."""
        if self._held is None:
            self._backend.append_logs(logs)
        else:
            self._held.extend(logs)

    def begin(self) -> None:
        """Hold back what is appended from now on."""
        self._num_before = self._num_logs()
        self._held = []

    def end(self) -> bool:
        """Write what was held back, with one sync.

        Returns:
            False if somebody else (the dashboard) wrote meanwhile: then the storage must be opened anew.
        """
        held, self._held = self._held or [], None
        if held:
            self._backend.append_logs(held)
        return self._num_logs() == self._num_before + len(held)

    def _num_logs(self) -> int:
        with self._path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _open_journal(path: Path, *, mend: bool) -> JournalStorage:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if mend:
            _mend_journal(path)
        return JournalStorage(BatchingBackend(path))
    except (OSError, ValueError, KeyError, optuna.exceptions.OptunaError) as error:
        raise SpecError(
            "storage", str(path), f"cannot be opened ({error})", "check path and rights, or move it away"
        ) from error


def _mend_journal(path: Path) -> None:
    """Undo what a kill may leave: a torn last line, a lock that nobody holds."""
    with contextlib.suppress(FileNotFoundError):
        lock = Path(f"{path}.lock")
        if time.time() - lock.lstat().st_mtime > _STALE_LOCK_S:
            lock.unlink()
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
