"""The columns of a real trace: source lines and memory."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_explore.graph import Axis, Collective, OpKind, Phase, load_chakra_trace, save_chakra
from echo_explore.graph.execution_graph import COLUMNS, TEXT_COLUMNS
from echo_explore.graph.rank_trace import facts_of
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, LLAMA, request
from tests.tracing.test_folding import rank_request

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("changes", [{"tensor_parallel": 2, "sequence_parallel": True}, {"model": LLAMA}])
def test_live_bytes_are_those_of_the_live_storages(service: TraceService, changes: dict[str, Any]) -> None:
    trace = service.trace(request(**changes))
    for name, piece in trace.pieces.items():
        graph = piece.forward
        assert graph.live_bytes.max() == piece.forward_peak_bytes, name
        if name != "head":  # whose output is still referenced when the next step begins
            assert graph.allocated_bytes.sum() - graph.freed_bytes.sum() == piece.saved_bytes, name


def test_memory_of_a_whole_rank(service: TraceService) -> None:
    graph = service.trace_rank_request(rank_request(request(), rank=1))
    assert (graph.live_bytes >= 0).all()
    last_warm_up = np.flatnonzero(graph.phase == Phase.BACKWARD)[0]
    saved = service.trace(request()).pieces["layer.dense"].saved_bytes
    in_flight, layers = 3, 2  # the second of four stages holds three micro-batches before its first backward
    assert graph.live_bytes[last_warm_up] == pytest.approx(in_flight * layers * saved, rel=0.1)
    assert graph.live_bytes[-1] < layers * saved


def test_every_row_names_the_line_that_launched_it(service: TraceService) -> None:
    graph = service.trace_rank_request(rank_request(request(tensor_parallel=2), rank=2))
    lines = [graph.strings[i] for i in graph.source]
    assert all(re.fullmatch(r"megatron/core/[a-z_0-9/]+\.py:\d+", line) for line in lines), set(lines)
    backward = (graph.phase == Phase.BACKWARD) & (graph.forward_op >= 0)
    assert backward.sum() > 20
    for row in np.flatnonzero(backward):
        assert lines[row] == lines[graph.forward_op[row]]
    reduce = np.flatnonzero(graph.is_collective & (graph.axis == 1) & (graph.phase == Phase.FORWARD))
    assert {line.split(":")[0] for line in (lines[i] for i in reduce)} <= {
        "megatron/core/tensor_parallel/mappings.py",
        "megatron/core/tensor_parallel/layers.py",
        "megatron/core/tensor_parallel/cross_entropy.py",
    }


def test_forward_and_backward_of_two_views_of_a_buffer_do_not_tie(service: TraceService) -> None:
    """Each gradient product adds into its own part of the one gradient buffer and reads no other's."""
    graph = service.trace_rank_request(rank_request(request(), rank=1))
    names = np.array([graph.strings[i] for i in graph.name])
    products = np.flatnonzero((names == "echo.wgrad_gemm_accumulate") & (graph.micro_batch == 0))
    assert len(products) == 8  # four linear layers, two layers
    for row in products:
        read = graph.dep_index[graph.dep_offsets[row] : graph.dep_offsets[row + 1]]
        assert not set(read) & set(products)
    assert GPT.num_layers == 8
    assert (graph.kind == OpKind.WAIT).any()


def test_a_trace_goes_through_chakra(service: TraceService, tmp_path: Path) -> None:
    trace = service.rank_step_request(rank_request(request(LLAMA, tensor_parallel=2, sequence_parallel=True), rank=2))
    graph = trace.graph
    save_chakra(tmp_path / "llama.2.et", trace)
    back = load_chakra_trace(tmp_path / "llama.2.et")
    assert back is not None
    assert facts_of(back) == facts_of(trace)
    assert graph.num_ops > 300
    assert graph.is_collective.sum() > 40
    strings = [np.array(g.strings, dtype=object) for g in (graph, back.graph)]
    for column in COLUMNS:
        one, two = getattr(graph, column), getattr(back.graph, column)
        if column in TEXT_COLUMNS:
            one, two = strings[0][one], strings[1][two]
        assert np.array_equal(one, two), column
    for name in ("dims", "dep_offsets", "dep_index"):
        assert np.array_equal(getattr(graph, name), getattr(back.graph, name)), name


def test_a_rank_of_megatron_names_its_peers(service: TraceService) -> None:
    """Second of four stages of two tensor ranks: 2 and 3, between 0 and 1 and 4 and 5."""
    trace = service.rank_step_request(rank_request(request(LLAMA, tensor_parallel=2, sequence_parallel=True), rank=2))
    assert (trace.rank, trace.world_size) == (2, 8)
    graph = trace.graph
    ranks = [trace.groups[group] for group in trace.group_of_row[graph.is_collective]]
    kinds = graph.collective[graph.is_collective]
    assert {pair for pair, kind in zip(ranks, kinds, strict=True) if kind == Collective.SEND} == {(2, 0), (2, 4)}
    assert {pair for pair, kind in zip(ranks, kinds, strict=True) if kind == Collective.RECV} == {(0, 2), (4, 2)}
    axes = graph.axis[graph.is_collective]
    assert {group for group, axis in zip(ranks, axes, strict=True) if axis == Axis.TENSOR} == {(2, 3)}
    assert trace.peak_memory_bytes > graph.live_bytes.max() > 0
    assert {oracle["what"] for oracle in trace.oracles} == {"item"}
