"""How tokens travel to experts: what each dispatcher of Megatron runs, under the oracle's counts."""

import numpy as np
import pytest

from echo_explore.graph import Axis, Collective, DType, ExecutionGraph, OpClass, OpKind, Piece
from echo_explore.specs.routing import Routing
from echo_explore.tracing import TraceService
from tests.tracing.models import MOE, request

pytestmark = pytest.mark.torch

TOKENS, HIDDEN, WIDTH, SHARED, TOP, EXPERTS, RANKS = 2 * 512, 1024, 512, 256, 2, 8, 4
ROUTED = 2.0 * TOKENS * TOP * 3 * HIDDEN * WIDTH


def layer(service: TraceService, **changes: object) -> Piece:
    return service.trace(request(MOE, **{"expert_parallel": RANKS} | changes)).pieces["layer.moe"]


def grouped_flop(graph: ExecutionGraph) -> float:
    return float(graph.flop[graph.op_class == OpClass.GROUPED_GEMM].sum())


def names(graph: ExecutionGraph) -> list[str]:
    return [graph.strings[i] for i in graph.name]


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_executed_flop_is_the_same_for_all(service: TraceService, dispatcher: str) -> None:
    """Closed form of a mixture layer, forward and backward: attention, router, routed and shared experts."""
    piece = layer(service, expert_dispatcher=dispatcher)
    assert grouped_flop(piece.forward) == ROUTED
    assert grouped_flop(piece.backward) == 2 * ROUTED
    heads, groups, width = MOE.num_attention_heads, MOE.num_key_value_heads, MOE.head_dim
    projections = 2.0 * TOKENS * HIDDEN * width * (2 * heads + 2 * groups)
    attention = 2.0 * 2 * heads * 512 * 512 * width  # two sequences, causal: half of 4 s^2 a d each
    router, shared = 2.0 * TOKENS * HIDDEN * EXPERTS, 2.0 * TOKENS * 3 * HIDDEN * SHARED
    rest = projections + router + shared
    assert piece.forward.flop.sum() == pytest.approx(ROUTED + rest + attention, rel=1e-3)
    assert piece.backward.flop.sum() == pytest.approx(2 * (ROUTED + rest) + 2.5 * attention, rel=1e-3)


@pytest.mark.parametrize("dispatcher", ["deepep", "hybridep"])
def test_fused_exchanges_send_a_token_once_to_a_rank(service: TraceService, dispatcher: str) -> None:
    piece = layer(service, expert_dispatcher=dispatcher)
    visits = sum(Routing(num_experts=EXPERTS, experts_per_token=TOP).visits(RANKS))
    assert 1 < visits < TOP
    for graph in (piece.forward, piece.backward):
        rows = np.flatnonzero(graph.is_collective & (graph.collective == Collective.ALL_TO_ALL))
        assert (graph.axis[rows] == Axis.EXPERT).all()
        assert graph.message_bytes[rows] == pytest.approx([2.0 * TOKENS * HIDDEN * visits] * 2, rel=1e-3)
        assert graph.dims[rows, :4].tolist() == [[TOKENS, 2 * HIDDEN, EXPERTS, TOP]] * 2
    syncs = [i for i in range(piece.forward.num_ops) if piece.forward.kind[i] == OpKind.HOST_SYNC]
    assert len(syncs) == 1
    assert not (piece.backward.kind == OpKind.HOST_SYNC).any()


def test_all_gather_moves_every_token_to_every_rank(service: TraceService) -> None:
    graph = layer(service, expert_dispatcher="allgather").forward
    gathered = graph.message_bytes[graph.collective == Collective.ALL_GATHER].max()
    scattered = graph.message_bytes[graph.collective == Collective.REDUCE_SCATTER].max()
    assert gathered == scattered == 2.0 * RANKS * TOKENS * HIDDEN


def test_capacity_fixes_every_size(service: TraceService) -> None:
    for dispatcher in ("alltoall", "hybridep"):
        piece = layer(service, expert_dispatcher=dispatcher, expert_capacity_factor=1.25, pad_expert_input=True)
        assert grouped_flop(piece.forward) == 1.25 * ROUTED
        assert not (piece.forward.kind == OpKind.HOST_SYNC).any()


def test_a_load_is_that_of_the_busiest_rank(service: TraceService) -> None:
    load = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0)
    for dispatcher in ("alltoall", "deepep", "hybridep"):
        piece = layer(service, expert_dispatcher=dispatcher, expert_load=load)
        assert grouped_flop(piece.forward) == pytest.approx(ROUTED * RANKS * 5 / 11, rel=1e-3)
    exchanged = layer(service, expert_load=load).forward
    largest = exchanged.message_bytes[exchanged.collective == Collective.ALL_TO_ALL].max()
    assert largest == pytest.approx(2.0 * TOKENS * TOP * HIDDEN * RANKS * 5 / 11, rel=1e-3)


def test_shared_experts_run_beside_the_exchanges(service: TraceService) -> None:
    plain, beside = layer(service), layer(service, overlap_shared_experts=True)
    for before, after in ((plain.forward, beside.forward), (plain.backward, beside.backward)):
        assert before.flop.sum() == after.flop.sum()
        assert (after.stream != 0).any()
        exchanged = np.flatnonzero(after.collective == Collective.ALL_TO_ALL)
        assert after.asynchronous[exchanged].any()
        waits = np.flatnonzero(after.kind == OpKind.WAIT)
        between = [after.stream[after.awaits[w] + 1 : w] for w in waits if after.axis[after.awaits[w]] == Axis.EXPERT]
        assert any((streams != 0).any() for streams in between)
    aside = [beside.forward.strings[m] for m in beside.forward.module[beside.forward.stream != 0]]
    assert any("shared_experts" in module for module in aside)


def test_half_precision_experts(service: TraceService) -> None:
    assert grouped_flop(layer(service, precision="fp16").forward) == ROUTED


def test_routers(service: TraceService) -> None:
    moe = MOE.moe
    assert moe is not None
    grouped = moe.model_copy(
        update={
            "score_function": "sigmoid", "selection_bias": True, "balancing_loss": "sequence", "num_groups": 4,
            "groups_per_token": 2,
        }
    )  # fmt: skip
    plain = layer(service).forward
    limited = (
        service.trace(request(MOE.model_copy(update={"moe": grouped}), expert_parallel=RANKS))
        .pieces["layer.moe"]
        .forward
    )
    assert "aten.sigmoid" in names(limited)
    assert "aten.sigmoid" not in names(plain)
    assert limited.num_ops > plain.num_ops
    fused = layer(service, fused_router=True).forward
    assert {"echo.router_topk", "echo.router_scores", "echo.router_loss"} <= set(names(fused))
    assert fused.num_ops < plain.num_ops
    assert fused.flop.sum() == plain.flop.sum()


def test_the_host_waits_for_what_the_counts_need(service: TraceService) -> None:
    graph = layer(service).forward
    (wait,) = np.flatnonzero(graph.kind == OpKind.HOST_SYNC)
    awaited = int(graph.awaits[wait])
    assert 0 <= awaited < wait
    assert "echo.moe_permute" in names(graph)[awaited + 1 : wait]  # launched before the wait, not awaited


def test_routers_in_fp32_multiply_narrow_inputs_forward_and_in_tf32_backward(service: TraceService) -> None:
    piece = layer(service, expert_dispatcher="hybridep")
    for graph, dtypes in ((piece.forward, [DType.BF16]), (piece.backward, [DType.TF32] * 2)):
        rows = [i for i, name in enumerate(names(graph)) if name == "echo.general_gemm"]
        assert [DType(int(graph.dtype[i])) for i in rows] == dtypes
        assert graph.flop[rows].tolist() == [2.0 * TOKENS * HIDDEN * EXPERTS] * len(rows)
