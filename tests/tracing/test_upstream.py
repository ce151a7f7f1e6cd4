"""What other libraries' functions looked like when the tracer's patches of them were written."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from echo_explore.core import TraceError
from echo_explore.tracing import upstream
from echo_explore.tracing.upstream import Patched

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]

COMPARE = """
import importlib.metadata, inspect, json, warnings
warnings.simplefilter("ignore")
from echo_explore.tracing import upstream

def messages():
    versions = {p.package: importlib.metadata.version(p.package).partition("+")[0] for p in upstream.patched()}
    upstream.check_versions(versions)
    found = [(known.target, upstream.moved(known)) for known in upstream.of_installed(versions)]
    return {target: message for target, message in found if message}

as_it_is = messages()
source, doc, schema = inspect.getsource, upstream._doc, upstream._schema
inspect.getsource = lambda value: source(value) + "# changed"
upstream._doc = lambda value: doc(value) + "changed"
upstream._schema = lambda value: schema(value) and schema(value) + "changed"
print(json.dumps([as_it_is, messages()]))
"""
Messages = dict[str, str]


@pytest.fixture(scope="module")
def compared() -> tuple[Messages, Messages]:
    """What is said of functions by target: as they are, and where each is not what it was.

    From a process of its own: nothing is patched there.
    """
    command = [sys.executable, "-c", COMPARE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    as_it_is, altered = json.loads(done.stdout.splitlines()[-1])
    return as_it_is, altered


def test_patched_functions_are_what_they_were(compared: tuple[Messages, Messages]) -> None:
    assert compared[0] == {}


@pytest.mark.parametrize("target", sorted({known.target for known in upstream.patched()}))
def test_another_source_is_noticed(compared: tuple[Messages, Messages], target: str) -> None:
    known = next(known for known in upstream.patched() if known.target == target)
    message = compared[1][target]
    assert f"of {known.package} is not what echo_explore/tracing/{known.where}.py was written for (version" in message
    assert "read its source, adapt the patch, then change the digest in upstream.toml" in message
    assert (ROOT / "echo_explore" / "tracing" / f"{known.where}.py").is_file()


def test_a_function_that_is_gone_is_noticed() -> None:
    gone = Patched(package="torch", version="2.13", target="json:Gone.load", digest="0" * 16, where="fake_device")
    assert "json:Gone.load of torch is not what" in str(upstream.moved(gone))
    assert "now gone: module 'json' has no attribute 'Gone'" in str(upstream.moved(gone))


def test_every_version_lists_the_same_functions() -> None:
    listed: dict[tuple[str, str], set[str]] = {}
    for known in upstream.patched():
        listed.setdefault((known.package, known.version), set()).add(known.target)
    assert set(upstream.known_versions("torch")) == {"2.13", "2.14"}
    assert listed["torch", "2.13"] == listed["torch", "2.14"]


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"torch": "2.12.1", "megatron-core": "0.16.1"}, r"torch = 2\.12\.1: .* know 2\.13, 2\.14; fix: pip install"),
        ({"torch": "2.13.0", "megatron-core": "0.17.0"}, r"megatron-core = 0\.17\.0: .*megatron-core==0\.16\.1"),
        ({"torch": "2.130.0", "megatron-core": "0.16.1"}, r"torch = 2\.130\.0"),
    ],
)
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], message: str) -> None:
    monkeypatch.setattr(upstream, "framework_versions", lambda: versions)
    with pytest.raises(TraceError, match=message):
        upstream.check_versions()


def test_an_optional_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "5.31.0+local")
    message = r"transformers = 5\.31\.0: .* know 5\.24; fix: pip install transformers==5\.24"
    with pytest.raises(TraceError, match=message):
        upstream.check_version("transformers")
