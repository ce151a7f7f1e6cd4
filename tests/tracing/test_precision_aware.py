"""Megatron's precision-aware optimizer in a whole rank, against what a prediction takes for it."""

from collections import Counter

import numpy as np
import pytest

from echo_explore.core import SpecError
from echo_explore.graph import ExecutionGraph, OpClass, OpKind, Phase
from echo_explore.simulate import WhatIf
from echo_explore.simulate.job_builder import JobBuilder
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate, JobOptions, candidate_of
from echo_explore.tracing import TraceService
from echo_explore.tracing.request import request_of
from tests.simulate.support import simulator

pytestmark = pytest.mark.torch
AWARE = "precision_aware_optimizer=true"


def _job(*recipe: str, gradients: str = "fp32", precision: str = "bf16", stack: tuple[str, ...] = ()) -> Candidate:
    overrides = (*(f"recipe.{r}" for r in recipe), f"stack.gradient_dtype={gradients}", *stack)
    return candidate_of(
        JobOptions(
            model="llama3-8b", cluster="h100-ndr", layout="tp=8,pp=16,dp=2,sp=1", global_batch_size=2,
            micro_batch_size=1, sequence_length=1024, precision=precision, overrides=overrides,
        )
    )  # fmt: skip


def _passes(graph: ExecutionGraph) -> Counter[OpClass]:
    """Bytes of the passes over the rank's share of gradients, states and weights, by class."""
    rows = (graph.phase == Phase.OPTIMIZER) & (graph.kind == OpKind.COMPUTE)
    names = np.array([graph.strings[n] for n in graph.name])
    of_all = np.isin(names, ["divide_gradients", "zero_gradients", "flatten", "unflatten", "aten.zero_", "aten.cat"])
    found: Counter[OpClass] = Counter()
    for i in np.flatnonzero(rows & ~of_all):
        kind = OpClass(int(graph.op_class[i]))
        kind = OpClass.COPY if kind == OpClass.ELEMENTWISE else kind  # clipping is a copy there, a product here
        found[kind] += int(graph.bytes_read[i] + graph.bytes_written[i])
    return found


CASES = [
    ((), "fp32"),
    ((), "bf16"),
    ((AWARE,), "fp32"),
    ((AWARE, "exp_avg_dtype=bf16", "exp_avg_sq_dtype=bf16"), "bf16"),
    ((AWARE, "main_params_dtype=fp16", "exp_avg_dtype=fp8", "exp_avg_sq_dtype=fp16"), "fp32"),
]


@pytest.mark.parametrize(("recipe", "gradients"), [CASES[1], *CASES[3:]])
def test_a_prediction_takes_what_megatron_runs(service: TraceService, recipe: tuple[str, ...], gradients: str) -> None:
    job, model = _job(*recipe, gradients=gradients), simulator()
    real = service.rank_step(job, rank=5 * 16).graph  # two layers, without embedding and head
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=WhatIf())
    taken = JobBuilder(job, service.trace(request_of(job)), pricer, WhatIf()).job.stages[5].epilogue.graph
    ours, theirs = _passes(taken), _passes(real)
    assert set(ours) <= set(theirs)
    for kind, moved in theirs.items():  # numbers of one element and sums of norms are left out of a prediction
        assert ours[kind] == pytest.approx(moved, rel=2e-3, abs=2e5), kind


@pytest.mark.parametrize(
    ("recipe", "precision", "each"),
    [
        ((), "bf16", 12.0),
        ((AWARE,), "bf16", 10.0),  # 16 bits of each main weight are those of the weight
        ((AWARE, "exp_avg_dtype=bf16", "exp_avg_sq_dtype=bf16"), "bf16", 6.0),
        ((AWARE, "main_params_dtype=fp16", "exp_avg_dtype=fp8", "exp_avg_sq_dtype=fp16"), "bf16", 5.0),
        ((AWARE, "exp_avg_dtype=bf16", "exp_avg_sq_dtype=bf16"), "fp16", 8.0),
        ((AWARE, "exp_avg_dtype=bf16", "exp_avg_sq_dtype=bf16"), "mxfp8", 8.0),  # main weights are Megatron's
    ],
)
def test_bytes_of_states(recipe: tuple[str, ...], precision: str, each: float) -> None:
    from echo_explore.memory.static_state import state_bytes

    stack = ("stack.keeps_transposed_weights=true",)
    cluster = "b200-ndr" if precision == "mxfp8" else "h100-ndr"
    job = candidate_of(
        JobOptions(
            model="llama3-8b", cluster=cluster, layout="tp=1,dp=8", global_batch_size=8, micro_batch_size=1,
            precision=precision, overrides=(*(f"recipe.{r}" for r in recipe), *stack),
        )
    )  # fmt: skip
    assert state_bytes(job).optimizer_bytes == each


def test_what_the_update_casts_is_alive_then() -> None:
    """fp32 gradients of narrow ones, or states in fp32; nothing where all is fp32."""
    from echo_explore.memory.static_state import state_bytes

    narrow = (AWARE, "exp_avg_dtype=bf16", "exp_avg_sq_dtype=bf16")
    assert [state_bytes(_job(*r, gradients=g)).update_bytes for r, g in CASES] == [0.0, 4.0, 0.0, 8.0, 12.0]
    assert state_bytes(_job(*narrow, gradients="fp32")).update_bytes == 8.0


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (("exp_avg_dtype=bf16",), "^recipe.exp_avg_dtype = 'bf16': needs a precision-aware optimizer; fix: add --set"),
        ((AWARE, "distributed_optimizer=false", "overlap_param_gather=false"), "needs the distributed optimizer"),
        ((AWARE, "optimizer=muon"), "Megatron takes it with adam only"),
    ],
)
def test_refused(recipe: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _job(*recipe)
