"""The columns of a real trace: source lines and memory."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_explore.graph import OpKind, Phase, load_chakra, save_chakra
from echo_explore.graph.execution_graph import COLUMNS, TEXT_COLUMNS
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
    graph = service.trace_rank_request(rank_request(request(LLAMA, tensor_parallel=2, sequence_parallel=True), rank=2))
    save_chakra(tmp_path / "rank2.et", graph)
    back = load_chakra(tmp_path / "rank2.et")
    assert graph.num_ops > 300
    assert graph.is_collective.sum() > 40
    strings = [np.array(g.strings, dtype=object) for g in (graph, back)]
    for column in COLUMNS:
        one, two = getattr(graph, column), getattr(back, column)
        if column in TEXT_COLUMNS:
            one, two = strings[0][one], strings[1][two]
        assert np.array_equal(one, two), column
    for name in ("dims", "dep_offsets", "dep_index"):
        assert np.array_equal(getattr(graph, name), getattr(back, name)), name
