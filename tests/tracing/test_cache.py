"""The trace cache; no torch is needed."""

import errno
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_explore.core import MissingExtra, SpecError
from echo_explore.graph import Trace, load_trace, save_trace
from echo_explore.tracing import CachedTracer, TraceRequest, TraceService, cache, child
from tests.graph.test_storage import trace as any_trace
from tests.tracing.models import GPT, MOE, request

VERSIONS = {"torch": "2.13.0", "megatron-core": "0.16.1"}


class CountingService(TraceService):
    """Makes the same small trace for every request."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def trace(self, request: TraceRequest, path: Path | None = None) -> Trace:
        self.count += 1
        made = replace(any_trace(), key=request.key(VERSIONS), layer_kinds=request.model.layer_kinds)
        assert path is not None
        save_trace(path, made)
        return made


@pytest.fixture(autouse=True)
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "framework_versions", lambda: VERSIONS)


def test_each_request_is_traced_once(tmp_path: Path) -> None:
    service = CountingService()
    for _ in range(2):
        with CachedTracer(tmp_path, service=service) as tracer:
            for tensor in (1, 2, 1):
                tracer.trace(request(tensor_parallel=tensor))
    assert service.count == 2
    assert len(list(tmp_path.glob("*.npz"))) == 2


def test_number_of_layers_and_name_share_a_trace(tmp_path: Path) -> None:
    service = CountingService()
    tracer = CachedTracer(tmp_path, service=service)
    deeper = GPT.model_copy(update={"num_layers": 12, "name": "deeper"})
    assert len(tracer.trace(request()).layer_kinds) == 8
    assert len(tracer.trace(request(deeper)).layer_kinds) == 12
    assert service.count == 1


def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    service = CountingService()
    CachedTracer(tmp_path, service=service).trace(request())
    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(b"not a trace")
    CachedTracer(tmp_path, service=service).trace(request())
    assert service.count == 2
    assert load_trace(path).key == path.stem


def test_another_version_is_another_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = CountingService()
    tracer = CachedTracer(tmp_path, service=service)
    tracer.trace(request())
    monkeypatch.setattr(cache, "framework_versions", lambda: VERSIONS | {"torch": "2.14.0"})
    tracer.trace(request())
    assert service.count == 2


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    service = CountingService()
    CachedTracer(tmp_path, service=service).trace(request(tensor_parallel=1))
    size = sum(p.stat().st_size for p in tmp_path.glob("*.npz"))
    paths = {p.name for p in tmp_path.glob("*.npz")}
    tracer = CachedTracer(tmp_path, service=service, most_bytes=2 * size + size // 2)
    tracer.trace(request(tensor_parallel=2))
    for path in tmp_path.glob("*.npz"):
        os.utime(path, (1, 1) if path.name in paths else (2, 2))
    CachedTracer(tmp_path, service=service).trace(request(tensor_parallel=1))  # used again: young once more
    tracer.trace(request(tensor_parallel=4))
    left = {p.name for p in tmp_path.glob("*.npz")}
    assert len(left) == 2
    assert paths < left


def test_missing_frameworks_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise MissingExtra("tracing a model", "trace")

    monkeypatch.setattr(cache, "framework_versions", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'echo-explore\[trace\]'"):
        CachedTracer(tmp_path).trace(request())


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_EXPLORE_HOME", "/dev/null/home")
    with pytest.raises(SpecError, match="ECHO_EXPLORE_HOME = '/dev/null/home': must be writable"):
        CachedTracer(service=CountingService()).trace(request())


class _MadeService(TraceService):
    """As the real one, with a child that writes the same small trace for every request."""

    def call(self, operation: str, arguments: dict[str, Any], **_: Any) -> dict[str, Any]:
        made = replace(any_trace(), key=request().key(VERSIONS), layer_kinds=request().model.layer_kinds)
        save_trace(Path(arguments["path"]), made)
        return {}


def test_a_trace_that_cannot_be_kept_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder lies in its place; another full disk or missing right is no different."""
    key = request().key(VERSIONS)
    (tmp_path / f"{key}.npz").mkdir()
    assert CachedTracer(tmp_path, service=_MadeService()).trace(request()).key == key
    assert "used but not kept" in caplog.text
    assert "Is a directory" in caplog.text


def test_what_the_machine_refuses_is_not_the_frameworks_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arguments: dict[str, Any]) -> dict[str, Any]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(child.OPERATIONS, "trace", full)
    answer = child._answer({"id": 1, "operation": "trace", "arguments": {"path": "/somewhere/trace.npz"}})
    assert answer == {"id": 1, "os_error": ["/somewhere", "No space left on device"]}


def test_a_temporary_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(SpecError, match=r"gone': cannot be read or written \(No such file or directory\)"):
        TraceService().trace(request())


def test_fields_that_say_nothing_leave_the_key_alone() -> None:
    """So that traces made before a field came are still found."""
    plain = request(MOE)
    for name in ("pads_experts", "lora_dropout", "yarn_scaling_factor"):
        assert name not in json.dumps(plain.canonical())
    padded = request(MOE, pads_experts=True)
    stretched = request(MOE.model_copy(update={"yarn_scaling_factor": 32.0}))
    dropping = request(MOE, lora_dropout=True)
    assert len({r.key({}) for r in (plain, padded, stretched, dropping)}) == 4


def test_only_jobs_with_transformer_engines_attention_have_keys_of_their_own_for_its_layout() -> None:
    assert "attention_layout" in request(MOE, fusion="fused").canonical()
    for changes in ({"fusion": "norm"}, {"attention": "unfused"}, {"framework": "fsdp2"}):
        assert "attention_layout" not in request(MOE, **({"fusion": "fused"} | changes)).canonical()
