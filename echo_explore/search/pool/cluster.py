"""Which Ray a search runs on, and its clean end: the job's cluster, a given one, or one of its own on this machine."""

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray

from echo_explore.core import SpecError
from echo_explore.search.interrupts import descendants, kill_descendants, temporary_folders
from echo_explore.search.ray_environment import starts_local

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES: Final = 150 * 2**20
"""Of a local Ray: traces and models are a few MiB each. Ray's own minimum is 75 MiB [ray 2.60, 2026-11-30]."""
_PROBE_S: Final = 10.0
_TEMP_PREFIX: Final = "ee-ray-"
_TEMP_LIMIT: Final = 43
"""Longest folder from which Ray can make its socket paths of at most 107 bytes [ray 2.60, 2026-11-30]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection to a Ray cluster; `close` undoes what `connect` did.

    Attributes:
        temporary: folder of a Ray that was started here; None if it was not.
        started: ids of the processes that were started here.
        owned: whether this call connected at all (else the caller's connection is used).
    """

    temporary: Path | None = None
    started: frozenset[int] = frozenset()
    owned: bool = False

    def close(self) -> None:
        """Disconnect; a Ray of our own ends, and no process of it stays."""
        if not self.owned:
            return
        started = self.started | (frozenset(descendants()) if self.temporary is not None else frozenset())
        with contextlib.suppress(Exception):  # a dead cluster must not hide the result
            ray.shutdown()
        if self.temporary is not None:
            kill_descendants(among=started)
            _remove(self.temporary)


def connect(address: str, *, num_cpus: int | None) -> Connection:
    """Connect to the Ray that `address` means.

    Args:
        address: `auto`: the cluster of the job that this process is, else as `local`; `local`: a Ray of our own that
            listens on 127.0.0.1 only; else the address of a cluster. A cluster that happens to run on this machine is
            never joined unasked.
        num_cpus: of a Ray of our own; None: the CPUs that this process may use.

    Raises:
        SpecError: the cluster cannot be reached or started.
    """
    if ray.is_initialized():
        return Connection()
    if starts_local(address):
        return _start_local(num_cpus or len(os.sched_getaffinity(0)))
    if address == "auto":
        address = os.environ["RAY_ADDRESS"]
    _probe(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise SpecError(
            "address", address, f"cannot be reached ({reason})", "check it, or use --address local"
        ) from error
    return Connection(owned=True)


@contextlib.contextmanager
def connected(address: str, *, num_cpus: int | None) -> Iterator[None]:
    """Stay connected for several searches; see `connect`."""
    connection = connect(address, num_cpus=num_cpus)
    try:
        yield
    finally:
        connection.close()


def _probe(address: str) -> None:
    """Refuse an address where nothing listens, which Ray would try for half a minute."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(
            "address", address, f"nothing answers there ({reason})", "check it, or use --address local"
        ) from error


def _start_local(num_cpus: int) -> Connection:
    before = frozenset(descendants())
    temporary = _short_folder()
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(temporary),
    }
    try:
        ray.init(address="local", **options)
    except BaseException as error:
        with contextlib.suppress(Exception):
            ray.shutdown()
        kill_descendants(among=frozenset(descendants()) - before)
        _remove(temporary)
        if not isinstance(error, Exception):
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise SpecError("address", "local", f"Ray does not start ({reason})", "use --address none") from error
    return Connection(temporary=temporary, started=frozenset(descendants()) - before, owned=True)


def _short_folder() -> Path:
    """A new folder whose path is short enough for Ray's sockets."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(parent) + len(_TEMP_PREFIX) + 9 <= _TEMP_LIMIT and os.access(parent, os.W_OK):
            folder = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=parent))
            temporary_folders.add(folder)
            return folder
    raise SpecError("TMPDIR", tempfile.gettempdir(), "is too long a path for Ray's sockets", "set TMPDIR=/tmp")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    temporary_folders.discard(folder)


def num_cluster_cpus() -> int:
    """CPUs of all nodes, at least 1."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return max(1, int(resources.get("CPU", 1)))
