"""The end of a step: what runs there, in what order, and how many bytes it moves."""

from dataclasses import replace

import pytest

from echo_explore.graph import Axis, Collective, OpKind, Phase
from echo_explore.simulate.epilogue import EpilogueFacts, epilogue_graph

FACTS = EpilogueFacts(
    num_elements=1000,
    num_shard_elements=250,
    sequence_parallel_elements=10,
    embedding_elements=100,
    gather_elements=(512, 488),
    parameter_bytes=2.0,
    gradient_bytes=4.0,
    master_copy=True,
    loss_scaling=True,
    tensor_parallel=8,
    model_ranks=64,
    data_ranks=4,
)


def _steps(facts: EpilogueFacts) -> list[str]:
    graph = epilogue_graph(facts)
    named = []
    for row in range(graph.num_ops):
        name = graph.strings[graph.name[row]]
        named.append(f"{name} {graph.strings[graph.module[row]]}" if graph.kind[row] != OpKind.COMPUTE else name)
    return named


def test_order_of_megatron() -> None:
    assert _steps(FACTS) == [
        "divide_gradients",
        "c10d.allreduce_ embedding gradients",
        "flatten",
        "c10d.allreduce_ norm gradients",
        "unflatten",
        "unscale_and_check",
        "c10d.allreduce_ found_inf",
        "item found_inf",
        "multi_tensor_l2norm",
        "c10d.allreduce_ gradient norm",
        "item gradient norm",
        "multi_tensor_scale",
        "adam",
        "master_to_model",
        "c10d._allgather_base_ parameters",
        "c10d._allgather_base_ parameters",
        "zero_gradients",
    ]


def test_only_what_the_job_needs() -> None:
    small = replace(
        FACTS,
        embedding_elements=0,
        sequence_parallel_elements=0,
        gather_elements=(),
        master_copy=False,
        loss_scaling=False,
        model_ranks=1,
        data_ranks=1,
    )
    assert _steps(small) == [
        "multi_tensor_l2norm",
        "item gradient norm",
        "multi_tensor_scale",
        "adam",
        "zero_gradients",
    ]


def test_bytes() -> None:
    graph = epilogue_graph(FACTS)
    assert set(graph.phase.tolist()) == {int(Phase.OPTIMIZER)}
    sent = [
        (Axis(int(graph.axis[row])), Collective(int(graph.collective[row])), float(graph.message_bytes[row]))
        for row in range(graph.num_ops)
        if graph.is_collective[row]
    ]
    assert sent == [
        (Axis.EMBEDDING, Collective.ALL_REDUCE, 400.0),
        (Axis.TENSOR, Collective.ALL_REDUCE, 40.0),
        (Axis.MODEL, Collective.ALL_REDUCE, 4.0),
        (Axis.MODEL, Collective.ALL_REDUCE, 4.0),
        (Axis.DATA, Collective.ALL_GATHER, 1024.0),
        (Axis.DATA, Collective.ALL_GATHER, 976.0),
    ]
    adam = next(row for row in range(graph.num_ops) if graph.strings[graph.name[row]] == "adam")
    assert graph.bytes_read[adam] == pytest.approx(250 * (4 + 12))  # gradient, FP32 parameter, two moments
    assert graph.bytes_written[adam] == pytest.approx(250 * 12)


def test_the_host_updates_every_parameter_behind_the_gradient_norm() -> None:
    graph = epilogue_graph(replace(FACTS, num_updated=96))
    calls = {graph.strings[graph.name[row]]: int(graph.host_calls[row]) for row in range(graph.num_ops)}
    assert calls["adam"] == 96
    assert sum(calls.values()) == 96
