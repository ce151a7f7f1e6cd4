"""The real Megatron-FSDP under the fake cluster: what it gathers and reduces, when, and what stays in memory."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from echo_explore.core import SpecError
from echo_explore.graph import Axis, Collective, ExecutionGraph, Phase, RankTrace
from echo_explore.memory.sharding_buffers import sharding_buffers
from echo_explore.simulate import WhatIf
from echo_explore.simulate.native_job import NativeJobBuilder
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate
from echo_explore.specs.sharding import ShardingSpec, layers_ahead
from echo_explore.tracing import TraceService
from echo_explore.tracing.rank_request import rank_request_of
from echo_explore.tracing.request import request_of
from tests.simulate.support import simulator
from tests.tracing.models import LLAMA, request
from tests.tracing.test_folding import rank_request
from tests.tracing.test_rank_fields import job

LAYERS, SHARDS, MICRO_BATCHES = 4, 4, 2
MODEL = LLAMA.model_copy(update={"num_layers": LAYERS})


def step(service: TraceService, *, reshard: bool = True, **trace: Any) -> RankTrace:
    whole = request(MODEL, **{"narrow_gradients": True, "micro_batch_size": 1, "sequence_length": 256} | trace)
    return service.rank_step_request(
        rank_request(
            whole, rank=1, pipeline_parallel=1, data_parallel=SHARDS, num_micro_batches=MICRO_BATCHES,
            chunk_layers=(LAYERS,), megatron_fsdp=True, reshard_after_forward=reshard,
        )
    )  # fmt: skip


def exchanges(trace: RankTrace, kind: Collective) -> Counter[int]:
    """Bytes of exchanges over replicas, and how often."""
    graph = trace.graph
    rows = np.flatnonzero((graph.collective == kind) & (graph.axis == Axis.DATA))
    assert graph.asynchronous[rows].all()
    return Counter(graph.message_bytes[rows].astype(int).tolist())


H, KV, F, VOCABULARY = 1024, 256, 2816, 32000
LAYER = 2 * H + (H + 2 * KV) * H + H * H + 3 * F * H
ROOT = 2 * VOCABULARY * H + H


def padded(elements: int) -> range:
    """Sizes that a flat buffer may have: parameters do not share a chunk of a shard, so that each may be padded."""
    return range(elements, elements + elements // 100)


@pytest.mark.torch
def test_layers_are_gathered_twice_a_micro_batch_and_the_root_once_a_step(service: TraceService) -> None:
    trace = step(service)
    graph = trace.graph
    gathered, reduced = exchanges(trace, Collective.ALL_GATHER), exchanges(trace, Collective.REDUCE_SCATTER)
    layer, root = min(gathered), max(gathered)
    assert layer // 2 in padded(LAYER)
    assert root // 2 in padded(ROOT)
    assert gathered == {layer: 2 * LAYERS * MICRO_BATCHES, root: 1}
    assert reduced == {layer: LAYERS * MICRO_BATCHES, root: MICRO_BATCHES}
    names = [graph.strings[i] for i in graph.name]
    # Weight gradients of linear layers are written into the buffers; each is divided once, its shard added once.
    sums = Counter((names[i], int(graph.dims[i].max())) for i in np.flatnonzero(graph.stream > 0) if graph.flop[i] == 0)
    assert sums["aten.mul_", layer // 2] == LAYERS * MICRO_BATCHES
    assert sums["aten.add_", layer // 2 // SHARDS] == LAYERS * MICRO_BATCHES
    assert set(graph.stream.tolist()) == {0, 1, 2}
    # A reduction runs beside the backward of the next layer, a gather ahead of the layer that needs it.
    reductions = np.flatnonzero(graph.collective == Collective.REDUCE_SCATTER)
    waits = {int(graph.awaits[i]): i for i in np.flatnonzero(graph.awaits >= 0)}
    beside = [graph.flop[i : waits[i]].sum() > 0 for i in reductions.tolist()[: LAYERS - 1]]
    assert all(beside)
    # States of Adam, main parameters and gradients of a share, parameters once: what no micro-batch can free.
    assert trace.peak_memory_bytes > 18 * (LAYERS * LAYER + ROOT) / SHARDS


@pytest.mark.torch
def test_zero2_keeps_parameters(service: TraceService) -> None:
    """One buffer of the whole model, gathered once a step and reduced once a micro-batch."""
    trace = step(service, reshard=False)
    gathered, reduced = exchanges(trace, Collective.ALL_GATHER), exchanges(trace, Collective.REDUCE_SCATTER)
    (size,) = gathered
    assert size // 2 in padded(LAYERS * LAYER + ROOT)
    assert gathered == {size: 1}
    assert reduced == {size: MICRO_BATCHES}


@pytest.mark.torch
def test_gradients_in_fp32_are_copied_and_twice_as_large(service: TraceService) -> None:
    narrow, wide = step(service), step(service, narrow_gradients=False, gradient_accumulation_fusion=False)
    ours, theirs = (exchanges(t, Collective.REDUCE_SCATTER) for t in (narrow, wide))
    assert {2 * size: count for size, count in ours.items()} == theirs
    assert exchanges(narrow, Collective.ALL_GATHER) == exchanges(wide, Collective.ALL_GATHER)


@pytest.mark.torch
def test_recomputed_layers_are_gathered_once_for_both(service: TraceService) -> None:
    plain, again = step(service), step(service, recompute="full")
    assert exchanges(plain, Collective.ALL_GATHER) == exchanges(again, Collective.ALL_GATHER)
    assert (again.graph.phase == Phase.RECOMPUTE).any()


def _llama(*changes: str) -> Candidate:
    """Eight layers of 218 million parameters, two micro-batches."""
    shape = ("model.num_layers=8", "recipe.sequence_length=256", "recipe.global_batch_size=32", *changes)
    return job("llama3-8b", "dp=16", *shape, framework="fsdp2", stack="megatron-fsdp")


def _order(graph: ExecutionGraph, layer: float) -> str:
    """Gathers g and reductions r of layers, G and R of the root, with runs of products between them as one dash."""
    found = ""
    for i in range(graph.num_ops):
        kind = {Collective.ALL_GATHER: "g", Collective.REDUCE_SCATTER: "r"}.get(Collective(int(graph.collective[i])))
        if graph.axis[i] == Axis.DATA and kind:
            found += kind if graph.message_bytes[i] < 1.1 * layer else kind.upper()
        elif graph.flop[i] and not found.endswith("-"):
            found += "-"
    return found


@pytest.mark.torch
def test_a_prediction_gathers_and_reduces_as_often(service: TraceService) -> None:
    candidate, model = _llama(), simulator()
    real, trace = service.rank_step(candidate, rank=1).graph, service.trace(request_of(candidate))
    pricer = Pricer(candidate, compute=model.compute, collective=model.collective, what_if=WhatIf())
    (stage,) = NativeJobBuilder(candidate, trace, pricer, WhatIf()).job.stages
    gathers = (real.collective == Collective.ALL_GATHER) & (real.axis == Axis.DATA)
    layer = float(real.message_bytes[gathers].min())
    second = gathers & (real.micro_batch == 1)
    forward, backward = (_order(graph.graph, layer) for graph in (stage.chunks[0].forward, stage.chunks[0].backward))
    # Three layers ahead; the first three once more at the last norm; in the backward behind the head.
    assert forward == "ggg" + 5 * "g-" + "ggg" + "-"
    assert backward == "-gggg-r" + 4 * "g-r" + 3 * "-r" + "R"
    assert forward.count("g") == (second & (real.phase == Phase.FORWARD)).sum()
    assert backward.count("g") == (second & (real.phase == Phase.BACKWARD)).sum()
    # The root once a step, behind the optimizer.
    assert (gathers & (real.message_bytes > 1.1 * layer)).sum() == 1
    assert _order(stage.epilogue.graph, layer) == "G"
    ahead, one = (sharding_buffers(_llama(*c), trace) for c in ((), ("stack.sharding.ahead_elements=0",)))
    assert ahead.forward_bytes - one.forward_bytes == 2 * 2.0 * trace.pieces["layer.dense"].num_parameters


def test_layers_ahead() -> None:
    assert layers_ahead(ShardingSpec(), 10) == 1
    spec = ShardingSpec(ahead_elements=500_000_000)
    assert [layers_ahead(spec, n) for n in (856_000_000, 300_000_000, 218_000_000)] == [1, 2, 3]


def test_the_stack_asks_for_it() -> None:
    made = rank_request_of(job("llama3-8b", "dp=16", framework="fsdp2", stack="megatron-fsdp"), 3)
    assert made.megatron_fsdp
    assert made.trace.framework == "megatron"
    assert made.trace.narrow_gradients
    assert not rank_request_of(job("llama3-8b", "dp=16", framework="fsdp2"), 3).megatron_fsdp


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stack.gradient_dtype=fp32", "^stack.gradient_dtype = 'fp32': is not traced under Megatron-FSDP with weight"),
        ("stack.sharding.group=host", "^stack.sharding.group = 'host': is not what Megatron-FSDP does"),
        ("stack.sharding.regathers=true", "^stack.sharding.regathers = 'true': is not what Megatron-FSDP does"),
        ("stack.sharding.flat_parameters=false", "^stack.sharding.flat_parameters = 'false': is not what Megatron-"),
    ],
)
def test_what_it_does_not_do_is_refused(change: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        rank_request_of(job("llama3-8b", "dp=16", change, framework="fsdp2", stack="megatron-fsdp"), 0)
