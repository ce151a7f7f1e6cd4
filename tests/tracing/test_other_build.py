"""`make test-all`: the other build of torch traces the same, and its functions are those that the patches know."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echo_explore.graph import ExecutionGraph, load_graph
from echo_explore.graph.execution_graph import COLUMNS, TEXT_COLUMNS

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]

TRACE = """
import sys
from pathlib import Path
from typing import Any
from echo_explore.graph import save_graph
from echo_explore.tracing import TraceService
from tests.tracing.models import request
from tests.tracing.test_folding import rank_request
folder = Path(sys.argv[1])
with TraceService() as service:
    whole = rank_request(request(tensor_parallel=2, sequence_parallel=True), rank=4, data_parallel=2)
    save_graph(folder / "stage.npz", service.trace_rank_request(whole))
    for script in ("ddp_step", "train_step", "tensor_parallel_step"):
        graph = service.trace_script(Path(f"examples/{script}.py"), "build", world_size=16, rank=5)
        save_graph(folder / f"{script}.npz", graph)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    from tests.tracing.other_build import other_python

    return other_python()


def run(python: Path, code: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(python), "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, f"{python}: {done.stderr[-500:]}"
    return done.stdout


def column(graph: ExecutionGraph, name: str) -> list[Any]:
    values = getattr(graph, name).tolist()
    return [graph.strings[i] for i in values] if name in TEXT_COLUMNS else values


def test_it_is_another_build(python: Path) -> None:
    ask = "import torch; print(torch.version.cuda is None)"
    assert run(python, ask).strip() != run(Path(sys.executable), ask).strip()


def test_another_build_of_torch_traces_the_same(python: Path, tmp_path: Path) -> None:
    """One stage of Megatron and the scripts of examples/, every column of every row."""
    for name, interpreter in (("ours", Path(sys.executable)), ("theirs", python)):
        (tmp_path / name).mkdir()
        run(interpreter, TRACE, str(tmp_path / name))
    files = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert len(files) == 4
    for file in files:
        ours, theirs = load_graph(tmp_path / "ours" / file), load_graph(tmp_path / "theirs" / file)
        for name in (*COLUMNS, "dims", "dep_offsets", "dep_index"):
            assert column(ours, name) == column(theirs, name), f"{file}: {name}"


def test_its_functions_are_those_that_the_patches_know(python: Path) -> None:
    from tests.tracing.test_upstream import COMPARE

    assert run(python, COMPARE) == ""
