"""From a trace to the job of the timeline: buckets, gathers, transfers, shared graphs."""

from collections import Counter
from dataclasses import replace

import pytest

from echo_explore.graph import Axis, Collective, Parameter, Trace
from echo_explore.simulate import WhatIf
from echo_explore.simulate.host_collectives import CHECK_S_PER_RANK
from echo_explore.simulate.job_builder import JobBuilder
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import load_cluster, load_stack
from echo_explore.timeline import PipelineJob
from echo_explore.tracing.request import request_of
from tests.simulate.support import candidate, simulator


def _job(**options: object) -> PipelineJob:
    job, model = candidate(**options), simulator()
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=WhatIf())
    return JobBuilder(job, model.tracer.trace(request_of(job)), pricer, WhatIf()).job


@pytest.mark.parametrize("layout", ["tp=8,pp=4,dp=2", "tp=8,pp=4,vpp=2,dp=4", "tp=8,pp=1,dp=2"])
def test_gradients_are_reduced_once(layout: str) -> None:
    """Bytes conserved: the buckets of a chunk hold all of its parameters in FP32, and little padding."""
    job = _job(layout=layout, overrides=("recipe.distributed_optimizer=true", "recipe.overlap_grad_reduce=true"))
    for stage in job.stages:
        for chunk in stage.chunks:
            assert {bucket.collective for bucket in chunk.buckets} == {Collective.REDUCE_SCATTER}
            ready = [bucket.ready_after for bucket in chunk.buckets]
            assert ready == sorted(ready)
            assert ready[-1] == chunk.backward.graph.num_ops - 1
            needed = [gather.needed_before for gather in chunk.gathers]
            assert needed == sorted(needed)
            assert needed[0] == 0
            sent = sum(bucket.message_bytes for bucket in chunk.buckets)
            assert sum(gather.message_bytes for gather in chunk.gathers) == pytest.approx(sent / 2)  # BF16 against FP32
    assert len(job.stages[0].chunks[0].buckets) > 1  # Megatron closes buckets there only
    assert all(len(stage.chunks[0].buckets) == 1 for stage in job.stages[1:])


def test_without_the_distributed_optimizer_gradients_are_all_reduced() -> None:
    job = _job(layout="tp=8,pp=4,dp=2", overrides=("recipe.distributed_optimizer=false",))
    chunk = job.stages[1].chunks[0]
    assert [bucket.collective for bucket in chunk.buckets] == [Collective.ALL_REDUCE]
    assert chunk.gathers == ()


def test_one_replica_has_no_traffic() -> None:
    assert all(chunk.buckets == () for stage in _job().stages for chunk in stage.chunks)


@pytest.mark.parametrize(("layout", "wraps"), [("tp=8,pp=4", False), ("tp=8,pp=4,vpp=2", True)])
def test_transfers_go_round_only_when_interleaved(layout: str, wraps: bool) -> None:
    stages = _job(layout=layout).stages
    assert [stage.send_forward_s > 0 for stage in stages] == [True, True, True, wraps]
    assert [stage.send_backward_s > 0 for stage in stages] == [wraps, True, True, True]


def test_equal_stages_share_one_graph() -> None:
    stages = _job().stages
    assert stages[1].chunks[0].forward is stages[2].chunks[0].forward
    assert stages[0].chunks[0].forward is not stages[1].chunks[0].forward


def test_ranks_are_counted_once() -> None:
    job = _job(layout="tp=4,pp=2,dp=4")
    assert sum(stage.multiplicity for stage in job.stages) == 32


@pytest.mark.parametrize(
    ("layout", "schedule"), [("tp=8,pp=1", "no-pipelining"), ("tp=8,pp=4", "1f1b"), ("tp=8,pp=4,vpp=2", "interleaved")]
)
def test_schedule_follows_the_layout(layout: str, schedule: str) -> None:
    assert _job(layout=layout).schedule == schedule


def _experts(layout: str, **options: object) -> tuple[PipelineJob, Trace, set[Axis]]:
    """A Mixtral job, its trace, and the axes over which gradients and parameters move at the end of the step."""
    job, model = candidate(model="mixtral-8x7b", layout=layout, cluster="h100-ndr", **options), simulator()
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=WhatIf())
    handmade = model.tracer.trace(request_of(job))
    mixture = handmade.pieces["layer.moe"]
    experts = Parameter(name="mlp.experts.weight1", num_elements=10**8, tensor_sharded=False, expert=True)
    mixture = replace(mixture, parameters=(*mixture.parameters, experts))
    trace = replace(handmade, pieces={**handmade.pieces, "layer.moe": mixture})
    built = JobBuilder(job, trace, pricer, WhatIf()).job
    epilogue = built.stages[0].epilogue.graph
    gathers = epilogue.is_collective & (epilogue.collective == Collective.ALL_GATHER)
    return built, trace, {Axis(int(axis)) for axis in epilogue.axis[gathers]}


def test_experts_are_reduced_over_their_own_group() -> None:
    """Bytes conserved with experts apart; with as many expert ranks as replicas, experts move nothing."""
    options = ("recipe.distributed_optimizer=true", "recipe.overlap_grad_reduce=true")
    late = "recipe.overlap_param_gather=false"
    for layout, axes in (
        ("tp=1,pp=1,dp=16,ep=8", {Axis.DATA, Axis.EXPERT_DATA}),
        ("tp=1,pp=1,dp=8,ep=8", {Axis.DATA}),
        ("tp=4,pp=1,dp=4,ep=8,sp=1", {Axis.DATA, Axis.EXPERT_DATA}),
        ("tp=4,pp=1,dp=2,ep=8,sp=1", {Axis.DATA}),
        ("tp=4,pp=1,dp=2,ep=2,etp=4,sp=1", {Axis.DATA}),
    ):
        built, trace, gathered = _experts(layout, overrides=(*options, late))
        assert gathered == axes
        # The optimizer of dense parameters and that of experts each gather everything (tests/tracing/test_closed_form).
        end = built.stages[0].epilogue.graph
        sizes = Counter(end.message_bytes[end.collective == Collective.ALL_GATHER].tolist())
        assert sizes
        assert all(count % 2 == 0 for count in sizes.values())
        chunk = built.stages[0].chunks[0]
        assert set(trace.layer_kinds) == {"moe"}
        parameters = [p for kind in trace.layer_kinds for p in trace.pieces[f"layer.{kind}"].parameters]
        parameters += [p for name in ("embedding", "head") for p in trace.pieces[name].parameters]
        moved = sum(p.num_elements for p in parameters if not p.expert or Axis.EXPERT_DATA in axes)
        assert any(p.expert for p in parameters)
        assert sum(bucket.message_bytes for bucket in chunk.buckets) == pytest.approx(4.0 * moved, rel=1e-3)
        ready = [bucket.ready_after for bucket in chunk.buckets]
        assert ready == sorted(ready)


def test_a_slower_host_takes_longer_for_operators_and_modules() -> None:
    stack = load_stack("megatron-bridge")
    node = load_cluster("gb200-nvl72").node
    slow, same = stack.on_host(node), stack.on_host(load_cluster("h100-ndr").node)
    assert same is stack
    assert slow.host_call_s == pytest.approx(stack.host_call_s * node.host_operator_factor)
    assert slow.host_backward_call_s == pytest.approx(stack.host_backward_call_s * node.host_operator_factor)
    assert slow.host_modules.wide.linear_s == pytest.approx(stack.host_modules.wide.linear_s * node.host_module_factor)
    assert slow.host_collective_s == pytest.approx(stack.host_collective_s * node.host_operator_factor)
    assert slow.host_step_s == stack.host_step_s
    fast = {f"node.{name}": 1.0 for name in ("host_operator_factor", "host_module_factor")}
    jobs = [_job(cluster="gb200-nvl72", overrides=tuple(f"cluster.{k}={v}" for k, v in o.items())) for o in ({}, fast)]
    assert jobs[0].host_call_s == pytest.approx(jobs[1].host_call_s * node.host_operator_factor)


def test_checked_collectives_cost_the_host_a_message_a_rank() -> None:
    """PyTorch compares what the ranks of a group are about to run; a group of one runs nothing, a CUDA graph too."""
    assert _job(overrides=("stack.cuda_graphs=true",)).host_collective_s == ()
    layout = "tp=4,pp=2,dp=2"
    job = candidate(layout=layout)
    stack = job.stack.model_copy(update={"collective_checks": True, "host_collective_s": 40e-6})
    model = simulator()
    job = replace(job, stack=stack)
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=WhatIf())
    built = JobBuilder(job, model.tracer.trace(request_of(job)), pricer, WhatIf()).job
    each_s = built.host_collective_s
    assert each_s[Axis.TENSOR] == pytest.approx(40e-6 + 4 * CHECK_S_PER_RANK)
    assert each_s[Axis.DATA] == pytest.approx(40e-6 + 2 * CHECK_S_PER_RANK)
    assert each_s[Axis.CONTEXT] == each_s[Axis.HOST] == 0.0
    assert all(b.time_s >= each_s[Axis.DATA] for stage in built.stages for c in stage.chunks for b in c.buckets)


def test_a_stack_may_sum_gradients_whole_under_the_distributed_optimizer() -> None:
    """One all-reduce of all gradients behind the last backward, as nanotron does under ZeRO-1."""
    overrides = ("recipe.distributed_optimizer=true", "recipe.overlap_grad_reduce=true")
    job = candidate(layout="tp=8,pp=1,dp=2", overrides=overrides)
    job = replace(job, stack=job.stack.model_copy(update={"sums_whole_gradients": True}))
    model = simulator()
    pricer = Pricer(job, compute=model.compute, collective=model.collective, what_if=WhatIf())
    built = JobBuilder(job, model.tracer.trace(request_of(job)), pricer, WhatIf()).job
    (bucket,) = built.stages[0].chunks[0].buckets
    assert bucket.collective is Collective.ALL_REDUCE
    assert not built.overlap_grad_reduce
    scattered = _job(layout="tp=8,pp=1,dp=2", overrides=overrides).stages[0].chunks[0].buckets
    assert bucket.message_bytes == pytest.approx(sum(b.message_bytes for b in scattered), rel=1e-3)


def test_gradients_that_are_summed_in_fp32_travel_so() -> None:
    """Aleph Alpha's trainer keeps gradients in bf16 and sums copies of them in fp32."""
    job = candidate(layout="tp=8,pp=1,dp=2", overrides=("recipe.distributed_optimizer=true",))
    sizes = []
    for summed in ("", "fp32"):
        update = {"sums_whole_gradients": True, "gradient_dtype": "bf16", "summed_gradient_dtype": summed}
        changed = replace(job, stack=job.stack.model_copy(update=update))
        model = simulator()
        pricer = Pricer(changed, compute=model.compute, collective=model.collective, what_if=WhatIf())
        built = JobBuilder(changed, model.tracer.trace(request_of(changed)), pricer, WhatIf()).job
        sizes.append(built.stages[0].chunks[0].buckets[0].message_bytes)
    assert sizes[1] == 2 * sizes[0]
