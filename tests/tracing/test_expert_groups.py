"""Where experts lie: our groups against those that megatron-core initialises, and what is reduced over them."""

import numpy as np
import pytest

from echo_explore.graph import Axis, Collective
from echo_explore.specs import ParallelConfig, parse_layout
from echo_explore.topology import axis_groups
from echo_explore.tracing import TraceService
from tests.tracing.models import MOE, request
from tests.tracing.test_folding import rank_request

pytestmark = pytest.mark.torch

AXES = (
    Axis.TENSOR, Axis.CONTEXT, Axis.DATA, Axis.PIPELINE, Axis.EXPERT, Axis.EXPERT_DATA, Axis.EXPERT_TENSOR,
    Axis.EXPERT_MODEL,
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "tp=1,pp=1,dp=8,ep=4",
        "tp=2,pp=2,dp=8,ep=8",
        "tp=4,pp=1,dp=2,ep=8",
        "tp=2,pp=2,cp=2,dp=4,ep=4",
        "tp=4,pp=2,dp=4,ep=2,etp=4",
        "tp=4,pp=1,dp=4,ep=4,etp=2",
        "tp=2,pp=3,dp=2",
    ],
)
def test_groups_are_megatrons(service: TraceService, text: str) -> None:
    layout: ParallelConfig = parse_layout(text)
    degrees = {
        "tp": layout.tensor_parallel,
        "pp": layout.pipeline_parallel,
        "cp": layout.context_parallel,
        "dp": layout.data_parallel,
        "ep": layout.expert_parallel,
        "etp": layout.expert_tensor_ranks,
    }
    for rank in (0, layout.num_gpus // 2 + 1, layout.num_gpus - 1):
        real = service.process_groups(degrees, rank)
        for axis in AXES:
            groups = axis_groups(axis, layout)
            ours = sorted(int(r) for r in groups[(groups == rank).any(axis=1)][0])
            if len(ours) == 1 or (axis == Axis.EXPERT_MODEL and layout.expert_tensor_ranks == 1):
                assert axis.name not in real
            else:
                assert real[axis.name] == ours, axis


@pytest.mark.parametrize(("tensor", "data", "expert", "split"), [(1, 4, 2, 1), (2, 4, 4, 1), (2, 4, 2, 2)])
def test_experts_of_a_rank_are_reduced_over_their_replicas(
    service: TraceService, tensor: int, data: int, expert: int, split: int
) -> None:
    trace = request(
        MOE, tensor_parallel=tensor, sequence_parallel=tensor > 1, expert_parallel=expert, expert_tensor_parallel=split
    )
    whole = rank_request(
        trace, rank=0, pipeline_parallel=1, data_parallel=data, num_micro_batches=2, chunk_layers=(8,),
        bucket_elements=10**9,
    )  # fmt: skip
    graph = service.trace_rank_request(whole)
    assert not (graph.is_collective & (graph.axis == Axis.NONE)).any()
    reduced = graph.is_collective & (graph.collective == Collective.REDUCE_SCATTER)
    pieces = service.trace(trace).pieces
    kinds = ("dense", *("moe",) * 7)
    experts = sum(p.num_elements for k in kinds for p in pieces[f"layer.{k}"].parameters if p.expert)
    assert experts == 7 * 8 // expert * 3 * 1024 * 512 // split
    layout = ParallelConfig(
        tensor_parallel=tensor, data_parallel=data, expert_parallel=expert, expert_tensor_parallel=split
    )
    assert layout.expert_data_parallel == tensor * data // (expert * split) == 2
    moved = graph.message_bytes[reduced & (graph.axis == Axis.EXPERT_DATA)].sum()
    assert moved == pytest.approx(4.0 * experts, rel=1e-4)
    adam = np.array([graph.strings[i] for i in graph.name]) == "aten._fused_adamw_"
    dense = sum(p.num_elements for k in kinds for p in pieces[f"layer.{k}"].parameters if not p.expert)
    dense += sum(p.num_elements for name in ("embedding", "head") for p in pieces[name].parameters)
    assert graph.dims[adam, 0].sum() == pytest.approx(experts / 2 + dense / data, rel=1e-3)
