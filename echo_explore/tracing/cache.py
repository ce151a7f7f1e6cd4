"""Traces by content: the same request under the same versions is traced once on a machine."""

import contextlib
import os
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Self

from echo_explore.core import SpecError
from echo_explore.core.home import state_folder
from echo_explore.graph import Trace, load_trace
from echo_explore.tracing.request import TraceRequest
from echo_explore.tracing.service import TraceService
from echo_explore.tracing.versions import framework_versions

MOST_BYTES = 20 * 10**9
"""Size of the cache on disk; beyond it the traces used longest ago go."""
_IN_MEMORY = 32


class CachedTracer:
    """A tracer with a cache on disk and a small one in memory; starts a tracing process only for what is not there.

    Args:
        cache_folder: where traces lie; default: the state folder.
        service: what makes traces; default: one of its own.
        most_bytes: size of the cache.
    """

    def __init__(
        self, cache_folder: Path | None = None, *, service: TraceService | None = None, most_bytes: int = MOST_BYTES
    ) -> None:
        self._folder = cache_folder
        self._service = service
        self._owns_service = service is None
        self._most_bytes = most_bytes
        self._memory: OrderedDict[str, Trace] = OrderedDict()
        self._lock = threading.Lock()

    def trace(self, request: TraceRequest) -> Trace:
        """The trace of a request, from the cache or made now.

        Raises:
            TraceError: it can't be traced.
            MissingExtra: torch or megatron-core is not installed.
            SpecError: the cache folder can't be written.
        """
        key = request.key(framework_versions())
        with self._lock:
            trace = self._memory.get(key)
            if trace is None:
                trace = self._from_disk(key) or self._make(request, key)
                self._memory[key] = trace
            self._memory.move_to_end(key)
            while len(self._memory) > _IN_MEMORY:
                self._memory.popitem(last=False)
        kinds = request.model.layer_kinds  # the number of layers is not part of the key
        return trace if trace.layer_kinds == kinds else replace(trace, layer_kinds=kinds)

    def holds(self, request: TraceRequest) -> bool:
        """Whether the trace is in the cache."""
        key = request.key(framework_versions())
        return key in self._memory or self._path(key).is_file()

    def close(self) -> None:
        """End the tracing process, if there is one."""
        if self._service is not None and self._owns_service:
            self._service.close()
            self._service = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _path(self, key: str) -> Path:
        if self._folder is None:
            self._folder = state_folder("traces")
        return self._folder / f"{key}.npz"

    def _from_disk(self, key: str) -> Trace | None:
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            trace = load_trace(path)
        except SpecError:  # damaged, or of an older schema: made anew
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: the last to go
        return trace if trace.key == key else None

    def _make(self, request: TraceRequest, key: str) -> Trace:
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            folder, why = str(path.parent), f"cannot be made ({error.strerror})"
            raise SpecError("cache folder", folder, why, "choose another") from error
        if self._service is None:
            self._service = TraceService()
        trace = self._service.trace(request, path)
        self._shrink(path.parent)
        return trace

    def _shrink(self, folder: Path) -> None:
        files = []
        for path in folder.glob("*.npz"):
            with contextlib.suppress(OSError):  # another process may delete it
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._most_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
