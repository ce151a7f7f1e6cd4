"""The tracing process: it is clean, it dies with its caller, and what goes wrong is one line."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from echo_explore.core import MissingExtra, TraceError
from echo_explore.tracing import TraceService, child, guard, wire
from echo_explore.tracing import service as service_module
from tests.tracing.models import request

pytestmark = pytest.mark.torch


def run(script: str, *args: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout


def test_torch_of_the_caller_stays_as_it_is(tmp_path: Path) -> None:
    script = """
        import sys, torch
        before = dict(vars(torch.cuda))
        available, compiled = torch.cuda.is_available, torch.compile
        from pathlib import Path
        from echo_explore.tracing import CachedTracer
        from tests.tracing.models import request
        with CachedTracer(Path(sys.argv[1])) as tracer:
            print(tracer.trace(request()).pieces["layer.dense"].forward.num_ops)
        assert dict(vars(torch.cuda)) == before
        assert torch.cuda.is_available is available and not available()
        assert torch.compile is compiled
        assert "megatron" not in sys.modules
    """
    assert int(run(script, str(tmp_path))) > 5


def test_a_dead_child_is_replaced(service: TraceService) -> None:
    service.prepare()
    assert service.child_pid is not None
    os.kill(service.child_pid, signal.SIGKILL)
    assert service.schedule_order(1, 1, 1, 0) == [("forward", 0, 0), ("backward", 0, 0)]


def test_a_deleted_working_directory_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        Path.cwd()
    child.leave_deleted_folder()
    assert Path.cwd().is_dir()


def test_threads_share_a_service(service: TraceService) -> None:
    answers: dict[int, int] = {}

    def ask(count: int) -> None:
        answers[count] = len(service.schedule_order(2, 1, count, 0))

    threads = [threading.Thread(target=ask, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {1: 2, 2: 4, 3: 6}


def test_the_child_dies_with_its_caller_who_does_not_import_torch(tmp_path: Path) -> None:
    """In the middle of a trace, whose folder goes too."""
    script = """
        import os, signal, sys, threading, time
        from pathlib import Path
        from echo_explore.tracing import TraceService
        from tests.tracing.models import request
        service = TraceService()
        service.prepare()
        print(service.child_pid, "torch" in sys.modules, flush=True)
        threading.Thread(target=service.trace, args=(request(),), daemon=True).start()
        while not list(Path(sys.argv[1]).glob("echo-explore-trace-*")):
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, timeout=200,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    child, has_torch = done.stdout.split()
    assert has_torch == "False"
    end = time.monotonic() + 20
    while _runs(Path("/proc", child)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not _runs(Path("/proc", child))
    assert not list(tmp_path.glob("echo-explore-trace-*"))


def _runs(process: Path) -> bool:
    try:
        return "State:\tZ" not in (process / "status").read_text()  # a zombie: nobody reaps it in a container
    except OSError:
        return False


def test_a_request_that_takes_too_long() -> None:
    with TraceService() as impatient:
        with pytest.raises(TraceError, match=r"timeout_s = 0: the tracing process did not answer prepare in time"):
            impatient.call("prepare", {}, timeout_s=0.05)
        assert impatient.child_pid is None


def test_a_closed_service_refuses() -> None:
    closed = TraceService()
    closed.close()
    with pytest.raises(TraceError, match="trace service: is closed"):
        closed.prepare()


def test_missing_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise MissingExtra("tracing a model", "trace")

    monkeypatch.setattr(service_module, "framework_versions", missing)
    with TraceService() as useless, pytest.raises(MissingExtra, match="tracing a model needs packages"):
        useless.prepare()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with TraceService() as service, pytest.raises(TraceError, match=r"apt-get install -y g\+\+") as caught:
        service.trace(request())
    assert "\n" not in str(caught.value)


def test_a_damaged_helper_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = """
        import torch
        from echo_explore.tracing import guard
        path = guard.build(torch)
        size = path.stat().st_size
        path.write_bytes(b"a full disk")
        guard.install(torch)
        print(path.stat().st_size == size, path)
    """
    intact, path = run(script).split(maxsplit=1)
    assert intact == "True"
    assert path.startswith(str(tmp_path))


def test_a_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = guard.cache_folder()
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path)
    assert folder.stat().st_mode & 0o022 == 0


def test_messages_cross_a_pipe_whole() -> None:
    reading, writing = os.pipe()
    try:
        message = {"text": "ä" * 1000, "list": [1, 2.5, None]}
        wire.send(writing, message)
        assert wire.receive(reading, timeout_s=1) == message
        with pytest.raises(wire.TimedOut):
            wire.receive(reading, timeout_s=0.01)
        os.write(writing, (2**40).to_bytes(8, "big"))
        with pytest.raises(wire.Closed, match="no message of ours"):
            wire.receive(reading, timeout_s=1)
    finally:
        os.close(writing)
        os.close(reading)
