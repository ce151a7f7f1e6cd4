"""A clean Python child that traces; the caller never imports torch, whether it has done so already or not."""

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from echo_explore.core import MissingExtra, TraceError
from echo_explore.graph import Trace, load_trace
from echo_explore.tracing import wire
from echo_explore.tracing.request import TraceRequest

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 300.0  # imports on a loaded machine, and one compilation
_TAIL_BYTES = 2000


def framework_versions() -> dict[str, str]:
    """Versions of torch and megatron-core, read without importing them.

    Raises:
        MissingExtra: one of them is not installed.
    """
    try:
        # A local part such as +cpu says how torch was built, not what it does.
        return {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "megatron-core")}
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("tracing a model", "trace") from None


class TraceService:
    """Serves traces from a child process, which starts with the first request and is started anew if it dies.

    It may be used from several threads; requests run one after the other.
    """

    def __init__(self, *, timeout_s: float = 900.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._owner = os.getpid()
        self._number = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child; later requests are refused."""
        with self._lock:
            self._closed = True
            self._stop()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._stop()

    # -- requests -----------------------------------------------------------------------------------------------------

    def prepare(self) -> float:
        """Start the child and let it import the frameworks; the seconds of its imports."""
        return float(self.call("prepare", {})["prepare_s"])

    def trace(self, request: TraceRequest, path: Path | None = None) -> Trace:
        """The trace of a request.

        Args:
            request: what to trace.
            path: where to keep it; None keeps no file.

        Raises:
            TraceError: it can't be traced.
            MissingExtra: torch or megatron-core is not installed.
        """
        with contextlib.ExitStack() as stack:
            if path is None:
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-explore-trace-")), "trace.npz")
            self.call("trace", {"request": request.to_json(), "path": str(path.absolute())})
            return load_trace(path)

    def call(self, operation: str, arguments: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """One request to the child and its answer.

        Raises:
            TraceError: the child refuses, fails, dies twice or does not answer in time.
            MissingExtra: torch or megatron-core is not installed.
        """
        framework_versions()
        with self._lock:
            for attempt in (1, 2):
                try:
                    return self._once(operation, arguments, timeout_s or self._timeout_s)
                except wire.Closed:
                    tail = self._tail()
                    self._stop()
                    if attempt == 2:
                        raise TraceError(f"tracing process: ended while it worked ({tail}); fix: see its message") from None
                except wire.TimedOut:
                    self._stop()
                    raise TraceError(
                        f"timeout_s = {timeout_s or self._timeout_s:.0f}: the tracing process did not answer {operation} in time; "
                        "fix: allow more, or trace fewer micro-batches"
                    ) from None
                except BaseException:  # Ctrl-C in the middle of an answer: the next request must not read its rest
                    if self._child is not None and not self._idle:
                        self._stop()
                    raise
        raise AssertionError("unreachable")

    _idle = True

    def _once(self, operation: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        self._number += 1
        self._idle = False
        wire.send(child.stdin.fileno(), {"id": self._number, "operation": operation, "arguments": arguments})
        answer = wire.receive(child.stdout.fileno(), timeout_s=timeout_s)
        self._idle = True
        if answer.get("id") != self._number:
            raise wire.Closed("the answer belongs to another request")
        if "missing_extra" in answer:
            raise MissingExtra(*answer["missing_extra"])
        if "error" in answer:
            raise TraceError(answer["error"])
        result = answer["ok"]
        assert isinstance(result, dict)
        return result

    # -- the child ----------------------------------------------------------------------------------------------------

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise TraceError("trace service: is closed; fix: make a new one")
        if self._owner != os.getpid():  # a fork: the child belongs to the other process
            self._child, self._log, self._owner = None, None, os.getpid()
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._stop()
        environment = dict(os.environ)
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        for name in ("PYTHONSTARTUP", "PYTHONINSPECT", "TORCH_LOGS", "TORCH_COMPILE_DEBUG", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        self._log = tempfile.TemporaryFile(prefix="echo-explore-child-")
        try:
            self._child = subprocess.Popen(
                # -P: a torch.py in the caller's folder is not torch.
                [sys.executable, "-P", "-m", "echo_explore.tracing.child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0, env=environment,
                start_new_session=True,  # Ctrl-C is for the caller, who ends the child
            )  # fmt: skip
        except OSError as error:
            raise TraceError(f"tracing process = {sys.executable}: cannot be started ({error}); fix: check the interpreter") from error
        return self._child

    def _tail(self) -> str:
        if self._log is None:
            return "no message"
        with contextlib.suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - _TAIL_BYTES))
            lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
            if lines:
                return lines[-1]
        return "no message"

    def _stop(self) -> None:
        child, log = self._child, self._log
        self._child = self._log = None
        self._idle = True
        if self._owner != os.getpid():
            return
        if child is not None:
            for pipe in _pipes(child):
                with contextlib.suppress(OSError):
                    pipe.close()
            child.kill()
            child.wait()
        if log is not None:
            log.close()


def _pipes(child: subprocess.Popen[bytes]) -> Iterator[IO[bytes]]:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            yield pipe
