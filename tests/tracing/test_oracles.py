"""Values that only a GPU knows: listed where they are assumed, and a stop with the line where nothing says them."""

import re
from pathlib import Path

import pytest

from echo_explore.core import TraceError
from echo_explore.graph import OpKind, Phase
from echo_explore.tracing import TraceService
from tests.tracing.models import request
from tests.tracing.test_folding import rank_request

pytestmark = pytest.mark.torch

SCRIPT = """
import torch

{oracles}

def build():
    model = torch.nn.Linear(64, 64, device="cuda")

    def step():
        loss = model(torch.randn(8, 64, device="cuda")).square().mean()
        loss.backward()
        {line}

    return step
"""


def script(folder: Path, line: str, oracles: str = "") -> Path:
    path = folder / "train_step.py"
    path.write_text(SCRIPT.format(line=line, oracles=oracles), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("if loss.item() > 3: raise ValueError", r"item\(\)"),
        ("print(float(loss))", r"item\(\)"),
        ("torch.nonzero(model.weight > 0)", r"aten\.nonzero"),
        ("model.weight.masked_select(model.weight > 0)", r"aten\.masked_select"),
        ("torch.unique(model.weight)", r"aten\._unique2"),
    ],
)
def test_an_unknown_value_stops_with_its_line(service: TraceService, tmp_path: Path, line: str, what: str) -> None:
    fix = re.escape('ECHO_ORACLES = {"train_step.py:step": VALUE}')
    with pytest.raises(TraceError, match=rf"{what} at train_step\.py:12 = .*fix: add {fix} to the script") as caught:
        service.trace_script(script(tmp_path, line), "build", world_size=8, rank=3)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("place", ["train_step.py:step", "train_step.py:12"])
def test_a_script_says_its_values(service: TraceService, tmp_path: Path, place: str) -> None:
    path = script(tmp_path, "assert loss.item() == 2.5", f'ECHO_ORACLES = {{"{place}": 2.5}}')
    trace = service.script_step(path, "build", world_size=8, rank=3)
    (oracle,) = trace.oracles
    assert (oracle["what"], oracle["assumed"], oracle["source"]) == ("item", 2.5, "train_step.py:12")
    assert (trace.graph.kind == OpKind.HOST_SYNC).sum() == 1


def test_a_script_says_how_many_elements_are_found(service: TraceService, tmp_path: Path) -> None:
    line = "assert torch.nonzero(model.weight > 0).shape == (100, 2)"
    path = script(tmp_path, line, 'ECHO_ORACLES = {"train_step.py:step": 100}')
    trace = service.script_step(path, "build", world_size=8, rank=3)
    assert [o["assumed"] for o in trace.oracles] == [100]


def test_oracles_must_be_numbers(service: TraceService, tmp_path: Path) -> None:
    path = script(tmp_path, "pass", 'ECHO_ORACLES = {"here": "one"}')
    with pytest.raises(TraceError, match="ECHO_ORACLES must be a dict of places and numbers"):
        service.trace_script(path, "build", world_size=8, rank=3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_rank_updates_its_parameters(service: TraceService, precision: str) -> None:
    """Gradients are finite, so that a loss scaler does not skip the optimizer."""
    graph = service.trace_rank_request(rank_request(request(precision=precision, fusion="eager"), rank=1))
    names = [graph.strings[i] for i in graph.name]
    assert "aten._fused_adamw_" in names
    syncs = [graph.strings[graph.source[i]] for i in range(graph.num_ops) if graph.kind[i] == OpKind.HOST_SYNC]
    assert syncs
    assert all(line.startswith("megatron/core/optimizer/") for line in syncs)
    assert (graph.phase[graph.kind == OpKind.HOST_SYNC] == Phase.OPTIMIZER).all()
