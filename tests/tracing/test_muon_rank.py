"""Megatron's own Muon in a whole rank, against what a prediction takes for it."""

from collections import Counter

import pytest

from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective, ExecutionGraph, OpClass, OpKind, Phase
from echo_explore.simulate import WhatIf
from echo_explore.simulate.job_builder import JobBuilder
from echo_explore.simulate.muon import STEPS
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate, JobOptions, candidate_of
from echo_explore.tracing import TraceService
from echo_explore.tracing.rank_request import rank_request_of
from echo_explore.tracing.request import request_of
from tests.simulate.support import simulator

pytestmark = pytest.mark.torch
STAGE = 5  # two layers, without embedding and head


def _job(mode: str, split: bool, tensor: int = 8, model: str = "llama3-8b") -> Candidate:
    overrides = ("recipe.optimizer=muon", f"recipe.muon_tp_mode={mode}", f"recipe.muon_split_qkv={str(split).lower()}")
    return candidate_of(
        JobOptions(
            model=model, cluster="h100-ndr", layout=f"tp={tensor},pp=16,dp=1,sp={int(tensor > 1)}",
            global_batch_size=1, micro_batch_size=1, sequence_length=1024, overrides=overrides,
        )
    )  # fmt: skip


def _predicted(job: Candidate, service: TraceService) -> ExecutionGraph:
    model = simulator()
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=WhatIf())
    return JobBuilder(job, service.trace(request_of(job)), pricer, WhatIf()).job.stages[STAGE].epilogue.graph


def _exchanges(graph: ExecutionGraph) -> Counter[tuple[Axis, Collective, float]]:
    rows = [r for r in range(graph.num_ops) if graph.phase[r] == Phase.OPTIMIZER and graph.kind[r] == OpKind.COLLECTIVE]
    return Counter(
        (Axis(int(graph.axis[r])), Collective(int(graph.collective[r])), float(graph.message_bytes[r])) for r in rows
    )


def _moved(graph: ExecutionGraph, rows: list[int]) -> float:
    return float(graph.bytes_read[rows].sum() + graph.bytes_written[rows].sum())


@pytest.mark.parametrize(
    ("mode", "split", "tensor"),
    [("blockwise", True, 8), ("blockwise", True, 2), ("blockwise", False, 8), ("duplicated", True, 8),
     ("distributed", False, 8)],
)  # fmt: skip
def test_a_prediction_takes_what_megatron_runs(service: TraceService, mode: str, split: bool, tensor: int) -> None:
    """FLOP, exchanges, and bytes of everything but the copies out of a gathered message, which NCCL's wrapper makes."""
    job = _job(mode, split, tensor)
    real, taken = service.rank_step(job, rank=STAGE * tensor).graph, _predicted(job, service)
    names = [real.strings[name] for name in real.name]
    rows = [r for r in range(real.num_ops) if real.phase[r] == Phase.OPTIMIZER and real.kind[r] == OpKind.COMPUTE]
    products = [r for r in rows if real.op_class[r] == OpClass.GEMM]
    updates = [r for r in range(taken.num_ops) if taken.strings[taken.name[r]] == "muon"]
    updates = [r for r in updates if taken.kind[r] == OpKind.COMPUTE]
    assert real.flop[products].sum() == taken.flop[updates].sum()
    assert _exchanges(real) == _exchanges(taken)
    passes = ["add_", "lerp_", "linalg_vector_norm", "div", "_to_copy", "mul", "sum", "cat", "clone"]
    muon = [r for r in rows if names[r] in {f"aten.{n}" for n in passes}]
    flattened = (
        2 * 4.0 * sum(taken.dims[r, 0] for r in range(taken.num_ops) if taken.strings[taken.name[r]] == "flatten")
    )
    moved = _moved(real, muon + products) - flattened
    messages = sum(s * n for (_, kind, s), n in _exchanges(taken).items() if kind == Collective.ALL_GATHER)
    assert moved == pytest.approx(_moved(taken, updates) - 2 * messages, rel=1e-6)
    assert sum(name == "aten.mm" for name in names) >= STEPS


def test_experts_are_refused() -> None:
    job = candidate_of(
        JobOptions(
            model="mixtral-8x7b", cluster="h100-ndr", layout="tp=1,ep=8,dp=8", global_batch_size=8,
            micro_batch_size=1, overrides=("recipe.optimizer=muon",),
        )
    )  # fmt: skip
    with pytest.raises(SpecError, match="not traced in whole ranks with experts"):
        rank_request_of(job, 0)
