"""Jobs on FSDP2 and DDP: traffic, folding, bounds, memory, what the command refuses."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import EchoError
from echo_explore.graph import Axis, Collective, OpKind, Phase
from echo_explore.simulate import SimulationOptions
from echo_explore.simulate.ddp_buckets import ddp_buckets
from echo_explore.simulate.jobs import build_job
from echo_explore.simulate.pricing import Pricer
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import Candidate
from echo_explore.testing.traces import HandmadeTracer
from echo_explore.timeline import PipelineJob
from echo_explore.tracing.request import request_of
from tests.examples import examples
from tests.simulate.support import candidate, simulator


def native(layout: str = "dp=16", **job: Any) -> Candidate:
    options = {"model": "llama2-7b", "framework": "fsdp2", "sequence_length": 2048, "global_batch_size": 64}
    return candidate(layout=layout, **(options | job))


def job_of(one: Candidate) -> PipelineJob:
    parts = simulator()
    pricer = Pricer(one, compute=parts.compute, collective=parts.collective, what_if=WhatIf())
    return build_job(one, HandmadeTracer().trace(request_of(one)), pricer, WhatIf())


def test_layers_that_run_again_cost_their_share() -> None:
    """Half of the layers run again: half of what all of them add, and half of what they save."""
    steps = {how: simulator().predict(native(recompute=how)) for how in ("none", "full:block:16", "full")}
    seconds = {how: step.breakdown["recompute_s"] for how, step in steps.items()}
    assert seconds["none"] == 0.0
    assert seconds["full:block:16"] == pytest.approx(seconds["full"] / 2, rel=0.02)
    memory = {how: step.peak_memory_bytes for how, step in steps.items()}
    assert memory["full"] < memory["full:block:16"] < memory["none"]


@pytest.mark.parametrize("fidelity", ["kernel", "block"])
@pytest.mark.parametrize(
    "job", [{}, {"framework": "ddp"}, {"global_batch_size": 16}], ids=["fsdp2", "ddp", "one-micro-batch"]
)
def test_folding_changes_nothing(job: dict[str, Any], fidelity: Any) -> None:
    one = native(**job)
    folded = simulator().predict(one, SimulationOptions(fidelity=fidelity))
    full = simulator().predict(one, SimulationOptions(fidelity=fidelity, fold=False))
    assert folded.step_time_s == pytest.approx(full.step_time_s, rel=1e-6)
    assert dict(folded.breakdown) == pytest.approx(dict(full.breakdown), rel=0, abs=1e-6 * full.step_time_s)


def test_every_micro_batch_gathers_twice_and_reduces_once() -> None:
    (stage,) = job_of(native()).stages
    (chunk,) = stage.chunks
    assert not chunk.buckets
    assert not chunk.gathers
    forward, backward = chunk.forward.graph, chunk.backward.graph
    gathers = forward.collective[forward.is_collective]
    assert gathers.tolist() == [Collective.ALL_GATHER] * 33  # 32 layers and the root
    kinds = backward.collective[backward.is_collective].tolist()
    # torchtitan keeps the last layer between forward and backward.
    assert (kinds.count(Collective.ALL_GATHER), kinds.count(Collective.REDUCE_SCATTER)) == (31, 33)
    for graph in (forward, backward):
        assert set(graph.axis[graph.is_collective]) == {Axis.DATA}
        assert graph.asynchronous[graph.is_collective].all()
        assert sorted(graph.awaits[graph.kind == OpKind.WAIT]) == np.flatnonzero(graph.is_collective).tolist()
    # bf16 gathered, fp32 reduced
    assert backward.message_bytes[backward.is_collective].sum() > 1.9 * forward.message_bytes.sum()


def test_zero_2_gathers_in_the_forward_only_and_needs_more_memory() -> None:
    kept = native(overrides=("recipe.reshard_after_forward=false",))
    backward = job_of(kept).stages[0].chunks[0].backward.graph
    assert Collective.ALL_GATHER not in backward.collective[backward.is_collective]
    assert simulator().memory_of(kept).peak_bytes > simulator().memory_of(native()).peak_bytes


def test_every_second_layer_runs_again() -> None:
    none, every, full = (simulator().predict(native(recompute=form)) for form in ("none", "full:every:2", "full"))
    assert none.step_time_s < every.step_time_s < full.step_time_s
    assert every.breakdown["recompute_s"] == pytest.approx(full.breakdown["recompute_s"] / 2, rel=0.02)
    kept = [p.memory[0]["activations_bytes"] for p in (none, every, full)]
    head = 2 * kept[1] - kept[0] - kept[2]
    assert abs(head) < 1e-9 * kept[0]  # half of the layers keep all, half their input
    with pytest.raises(EchoError, match="runs the first layers of a chunk again"):
        candidate(recompute="full:every:2")
    with pytest.raises(EchoError, match="runs layers again one by one"):
        native(recompute="full:uniform:2")


def test_hybrid_sharding_gathers_within_a_host_and_sums_across_hosts() -> None:
    hybrid = native("dp=64", stack="fms-fsdp")
    assert (hybrid.num_shards, native("dp=4", stack="fms-fsdp").num_shards) == (8, 4)
    whole = native("dp=64", stack="fms-fsdp", overrides=("stack.sharding.group=all",))
    backward = job_of(hybrid).stages[0].chunks[0].backward
    kinds = backward.graph.collective
    assert (kinds == Collective.ALL_REDUCE).sum() == (kinds == Collective.REDUCE_SCATTER).sum() == 33
    sums = backward.graph.message_bytes[kinds == Collective.ALL_REDUCE].sum()
    assert sums == pytest.approx(backward.graph.message_bytes[kinds == Collective.REDUCE_SCATTER].sum() / 8)
    times = [job_of(one).stages[0].chunks[0].forward.time_s.sum() for one in (hybrid, whole)]
    assert times[0] < times[1]
    memory = [simulator().memory_of(one).stages[0].static_bytes for one in (hybrid, whole)]
    assert memory[0] == pytest.approx(8 * memory[1])
    with pytest.raises(EchoError, match="hybrid sharding needs a multiple of 8"):
        native("dp=12", stack="fms-fsdp", global_batch_size=24)


def test_one_replica_does_not_communicate() -> None:
    for framework in ("fsdp2", "ddp"):
        (stage,) = job_of(native("dp=1", framework=framework)).stages
        for graph in (stage.chunks[0].forward.graph, stage.chunks[0].backward.graph, stage.epilogue.graph):
            assert not graph.is_collective.any()


def test_static_memory_is_16_bytes_a_parameter_over_the_shards() -> None:
    # arXiv 1910.02054 (2019), section 5.3: all states of ZeRO-3 are divided by the replicas.
    few, many = (simulator().memory_of(native(f"dp={n}")).stages[0].static_bytes for n in (8, 16))
    assert few == pytest.approx(2 * many)
    ddp = simulator().memory_of(native(framework="ddp")).stages[0]
    assert ddp.static_bytes == pytest.approx(many * 16 * 20 / 16)  # and a second copy of gradients, in the buckets


@pytest.mark.parametrize("framework", ["fsdp2", "ddp"])
def test_bounds_hold(framework: str) -> None:
    one = native(framework=framework, model="gpt-22b")  # handmade layers have no gate
    bounds, prediction = simulator().bounds(one), simulator().predict(one)
    assert 0 < bounds.step_time_s <= prediction.step_time_s
    assert 0 < bounds.peak_memory_bytes <= prediction.peak_memory_bytes


def test_more_replicas_of_the_same_work_are_not_faster() -> None:
    times = [simulator().predict(native(f"dp={n}", global_batch_size=n)).step_time_s for n in (8, 64, 256)]
    assert times == sorted(times)


def test_epilogue_updates_the_shard() -> None:
    graph = job_of(native()).stages[0].epilogue.graph
    assert (graph.phase == Phase.OPTIMIZER).all()
    whole = job_of(native("dp=1")).stages[0].epilogue.graph
    assert graph.bytes_read.sum() == pytest.approx(whole.bytes_read.sum() / 16, rel=1e-6)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"layout": "pp=2,dp=8"}, "layout.pp = 2: is not traced for fsdp2"),
        ({"layout": "tp=2,dp=8"}, "layout.sp = 0: DTensor plans"),
        ({"layout": "tp=2,sp=1,dp=8", "framework": "ddp"}, "layout.tp = 2: is not traced for ddp"),
        ({"layout": "tp=2,sp=1,dp=8", "model": "gpt-22b"}, "layout.tp = 2: learned positions"),
        ({"recompute": "full:uniform:4"}, "recompute = 'full:uniform:4': fsdp2 runs layers again one by one"),
        ({"framework": "torchtitan", "recompute": "full:block:4"}, "torchtitan runs all layers again, or every N-th"),
        ({"framework": "ddp", "recompute": "selective"}, "recompute = 'selective': is traced for fsdp2 and torchtitan"),
        ({"model": "mixtral-8x7b"}, "model.moe = 'mixtral-8x7b'"),
        ({"framework": "ddp", "precision": "fp8", "cluster": "h100-ndr"}, "precision = 'fp8': is not traced for ddp"),
        ({"framework": "megatron", "overrides": ("recipe.reshard_after_forward=true",)}, "recipe.reshard_after"),
    ],
)
def test_what_a_stack_does_not_do_is_refused(job: dict[str, Any], message: str) -> None:
    with pytest.raises(EchoError, match=message):
        native(**job)


@given(st.lists(st.integers(1, 50_000_000), max_size=40), st.integers(1, 2**20), st.integers(2**20, 2**25))
@examples(60)
def test_every_parameter_is_in_one_bucket(sizes: list[int], first: int, others: int) -> None:
    buckets = ddp_buckets(sizes, first_bytes=first, others_bytes=others)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))[::-1]
    for number, bucket in enumerate(buckets[:-1]):
        limit = others if number else first
        assert sum(sizes[i] for i in bucket) >= limit
        assert sum(sizes[i] for i in bucket[:-1]) < limit


def sliced(layout: str = "dp=16", **job: Any) -> Candidate:
    options = {"model": "gpt-22b", "stack": "deepspeed-zero3", "precision": "fp16", "recompute": "full"}
    return native(layout, **(options | job))


def test_zero_3_of_2021_gathers_three_times_and_reduces_every_parameter_by_itself() -> None:
    one = sliced()
    trace = HandmadeTracer().trace(request_of(one))
    sizes = [p.num_elements for p in trace.pieces["layer.dense"].parameters]
    large = [n for n in sizes if n >= 100_000]
    assert 0 < len(large) < len(sizes)
    (stage,) = job_of(one).stages
    backward = stage.chunks[0].backward.graph
    layers = one.model.num_layers
    gathers = backward.is_collective & (backward.collective == Collective.ALL_GATHER)
    assert gathers.sum() == 2 * layers * len(large)  # recomputation and backward
    reductions = backward.collective[backward.is_collective] == Collective.REDUCE_SCATTER
    assert reductions.sum() >= layers * len(sizes)
    names = [stage.epilogue.graph.strings[n] for n in stage.epilogue.graph.name]
    assert names.count("c10d.allgather_") == 1  # what stays whole


def test_slices_cost_the_host_as_much_as_ranks_times_parameters() -> None:
    def host_s(ranks: int) -> float:
        job = job_of(sliced(f"dp={ranks}", global_batch_size=ranks))
        graph = job.stages[0].chunks[0].forward.graph
        return float(graph.host_calls.sum()) * job.host_call_s

    few, more, most = (host_s(n) for n in (128, 256, 512))
    assert most - more == pytest.approx(2 * (more - few), rel=0.02)
    spec = sliced().stack.sharding.slices
    assert spec is not None
    trace = HandmadeTracer().trace(request_of(sliced()))
    large = sum(p.num_elements >= spec.kept_elements for p in trace.pieces["layer.dense"].parameters)
    at_least = 128 * sliced().model.num_layers * large * (spec.view_s + spec.copy_s)
    assert more - few > 0.95 * at_least
    steps = [job_of(sliced(f"dp={n}", global_batch_size=n)).host_step_s for n in (128, 256)]
    assert steps[1] - 0.02 == pytest.approx(2 * (steps[0] - 0.02))


def test_slices_make_a_step_longer_and_hold_less() -> None:
    whole = sliced(overrides=("stack.sharding.regathers=false",))
    gathered_once = simulator().predict(whole).step_time_s
    assert simulator().predict(sliced()).step_time_s > gathered_once
    layered = sliced(
        stack="llm-foundry-fsdp", overrides=("stack.gradient_dtype=fp16", "stack.sharding.gather_dtype=fp16")
    )
    assert simulator().memory_of(sliced()).peak_bytes < simulator().memory_of(layered).peak_bytes


def test_bounds_hold_for_slices() -> None:
    bounds, prediction = simulator().bounds(sliced()), simulator().predict(sliced())
    assert 0 < bounds.step_time_s <= prediction.step_time_s


@pytest.mark.parametrize("layout", ["dp=16", "dp=1"])
def test_metrics_on_the_logits_cost_their_bytes(layout: str) -> None:
    """Two cross-entropies more in the forward of the head: a copy and a log softmax in fp32 each, and no backward."""
    options: dict[str, Any] = {"layout": layout, "global_batch_size": 16, "stack": "torch-fsdp2"}
    plain, with_metrics = (
        job_of(native(**options, overrides=(f"stack.logit_metrics={count}",))).stages[0].chunks[0] for count in (0, 2)
    )
    logits = 2048 * native().model.vocab_size
    forward, before = with_metrics.forward.graph, plain.forward.graph
    assert forward.num_ops == before.num_ops + 4
    assert (forward.bytes_read + forward.bytes_written).sum() == pytest.approx(
        (before.bytes_read + before.bytes_written).sum() + 2 * (6 + 8) * logits
    )
    assert with_metrics.backward.graph.num_ops == plain.backward.graph.num_ops
    assert with_metrics.forward.time_s.sum() > plain.forward.time_s.sum()
