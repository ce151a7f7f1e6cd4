"""What other libraries' functions looked like when the tracer's patches of them were written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_explore.core import TraceError

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]

COMPARE = """
import warnings
warnings.simplefilter("ignore")
from echo_explore.tracing.upstream import PATCHED, digest_of
for patched in PATCHED:
    try:
        found = digest_of(patched.target)
    except (ImportError, AttributeError) as error:
        found = f"gone: {error}"
    if found != patched.digest:
        print(f"{patched.target} is not what echo_explore/tracing/{patched.where}.py was written for ({found}):"
              " read its source, adapt the patch, then change the digest in tracing/upstream.py")
"""


def test_patched_functions_are_what_they_were() -> None:
    """In a process of its own: nothing is patched there."""
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "", done.stdout


def test_another_source_is_noticed() -> None:
    changed = COMPARE.replace("digest_of(patched.target)", '"0123456789abcdef"')
    done = subprocess.run([sys.executable, "-c", changed], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "torch.nn.modules.module:Module._apply is not what echo_explore/tracing/fake_device.py" in done.stdout


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"torch": "2.12.1", "megatron-core": "0.16.1"}, r"torch = 2\.12\.1: .* know 2\.13, 2\.14; fix: pip install"),
        ({"torch": "2.13.0", "megatron-core": "0.17.0"}, r"megatron-core = 0\.17\.0: .*megatron-core==0\.16\.1"),
        ({"torch": "2.130.0", "megatron-core": "0.16.1"}, r"torch = 2\.130\.0"),
    ],
)
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], message: str) -> None:
    from echo_explore.tracing import upstream

    monkeypatch.setattr(upstream, "framework_versions", lambda: versions)
    with pytest.raises(TraceError, match=message):
        upstream.check_versions()


SAME_STAGE = """
import sys
from pathlib import Path
from echo_explore.graph import save_graph
from echo_explore.tracing import TraceService
from tests.tracing.models import request
from tests.tracing.test_folding import rank_request
with TraceService() as service:
    whole = rank_request(request(tensor_parallel=2, sequence_parallel=True), rank=4, data_parallel=2)
    save_graph(Path(sys.argv[1]), service.trace_rank_request(whole))
"""


@pytest.mark.slow
def test_another_build_of_torch_traces_the_same(tmp_path: Path) -> None:
    """The Python of an environment with the other build (CPU or CUDA) is named by ECHO_EXPLORE_OTHER_TORCH."""
    other = os.environ.get("ECHO_EXPLORE_OTHER_TORCH")
    if not other:
        pytest.skip("ECHO_EXPLORE_OTHER_TORCH names no Python with the other build of torch")
    from echo_explore.graph import load_graph
    from tests.tracing.test_folding import rows_of

    graphs = []
    for number, python in enumerate((sys.executable, other)):
        path = tmp_path / f"{number}.npz"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [python, "-c", SAME_STAGE, str(path)], capture_output=True, text=True, cwd=ROOT, env=environment
        )
        assert done.returncode == 0, f"{python}: {done.stderr[-500:]}"
        graphs.append(load_graph(path))
    ours, theirs = (rows_of(graph, graph.kind >= 0) for graph in graphs)
    assert ours == theirs
