"""Ctrl-C: once stops the search cleanly, twice ends the process at once. The ledger loses nothing either way."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

_FIRST = b"\nstopping: what is counted is kept, evaluations under way are dropped; press Ctrl-C again to end at once\n"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
temporary_folders: set[Path] = set()
"""Folders of this process that are deleted also when it ends at once."""


class Interrupts:
    """Handles SIGINT and SIGTERM while it is entered; calling it says whether the search should stop."""

    def __init__(self) -> None:
        self._count = 0
        self._raises = False
        self._before: dict[int, Any] = {}

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let the first signal raise KeyboardInterrupt, for work that does not ask whether it should stop.

        Raises:
            KeyboardInterrupt: a signal came, also where what ran swallowed the exception.
        """
        if self():
            raise KeyboardInterrupt
        self._raises = True
        try:
            yield
        finally:
            self._raises = False
        if self():
            raise KeyboardInterrupt

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self._count > 0

    def __enter__(self) -> Self:
        self.install()
        return self

    def install(self) -> None:
        """Handle the signals, also after a library put its own handlers in; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            with contextlib.suppress(OSError):
                os.write(2, _FIRST)
            if self._raises:
                raise KeyboardInterrupt
            return
        kill_descendants()
        for folder in temporary_folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + signal.SIGINT)


def kill_descendants(*, among: frozenset[int] | None = None) -> None:
    """Kill the processes that this one started, and theirs, by their ids.

    Args:
        among: only these ids; by default all.
    """
    stopped: list[int] = []
    # Stopped first, so that none starts another one meanwhile, which would then belong to nobody.
    while new := [pid for pid in descendants() if pid not in stopped and (among is None or pid in among)]:
        for pid in new:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped += new
    for pid in stopped:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def descendants() -> list[int]:
    """Ids of the processes that this one started, and theirs; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for pid, parent in _processes():
        children.setdefault(parent, []).append(pid)
    found, stack = [], [os.getpid()]
    while stack:
        for pid in children.get(stack.pop(), []):
            found.append(pid)
            stack.append(pid)
    return found


def _processes() -> Iterator[tuple[int, int]]:
    """Id and parent's id of every process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in brackets may hold anything; what follows the last bracket is: state, parent, ...
            yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
