"""Context parallelism in real traces: FLOP over all ranks, sends and receives, saved bytes, in closed form."""

import numpy as np
import pytest

from echo_explore.graph import Axis, Collective, ExecutionGraph, OpClass, OpKind
from echo_explore.tracing import TraceService
from echo_explore.tracing.op_rules import attended_pairs, attention_flop
from echo_explore.tracing.request import unsupported
from tests.tracing.models import GPT, LLAMA, request

pytestmark = pytest.mark.torch

SEQUENCE, BATCH = 2048, 2
HEADS, KV_HEADS, WIDTH = LLAMA.num_attention_heads, LLAMA.num_key_value_heads, LLAMA.head_dim


def of_context(graph: ExecutionGraph, *kinds: Collective) -> list[float]:
    """Bytes of the collectives of some kinds over the context-parallel group, in order."""
    rows = (graph.kind == OpKind.COLLECTIVE) & (graph.axis == Axis.CONTEXT) & np.isin(graph.collective, kinds)
    return [float(size) for size in graph.message_bytes[rows]]


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("context", [2, 4])
def test_flop_of_all_ranks_equals_that_of_one(service: TraceService, context: int, exchange: str) -> None:
    whole = service.trace(request(LLAMA, sequence_length=SEQUENCE)).pieces
    split = service.trace(
        request(LLAMA, sequence_length=SEQUENCE, context_parallel=context, context_exchange=exchange)
    ).pieces
    for name in whole:
        for phase in ("forward", "backward"):
            expected = getattr(whole[name], phase).flop.sum() / context
            assert getattr(split[name], phase).flop.sum() == pytest.approx(expected, rel=1e-9)
        assert split[name].parameters == whole[name].parameters


@pytest.mark.parametrize(("context", "tensor"), [(2, 1), (4, 2), (8, 1)])
def test_ring_in_closed_form(service: TraceService, context: int, tensor: int) -> None:
    traced = request(
        LLAMA, sequence_length=SEQUENCE, context_parallel=context, tensor_parallel=tensor, sequence_parallel=tensor > 1
    )
    layer = service.trace(traced).pieces["layer.dense"]
    keys_and_values = 2 * 2.0 * BATCH * SEQUENCE / context * (KV_HEADS / tensor) * WIDTH
    for kind in (Collective.SEND, Collective.RECV):
        assert of_context(layer.forward, kind) == [keys_and_values] * (context - 1)
        # Keys and values first, gradients last, both in between.
        between = [2 * keys_and_values] * (context - 2)
        assert of_context(layer.backward, kind) == [keys_and_values, *between, keys_and_values]
    for graph, count in ((layer.forward, context - 1), (layer.backward, context)):
        sent = np.flatnonzero((graph.axis == Axis.CONTEXT) & (graph.kind == OpKind.COLLECTIVE))
        waits = np.flatnonzero(np.isin(graph.awaits, sent) & (graph.kind == OpKind.WAIT))
        attention = np.flatnonzero(graph.op_class == OpClass.ATTENTION)
        assert graph.asynchronous[sent].all()
        assert len(waits) == len(sent) == 2 * count
        # One kernel runs between a transfer and its wait.
        for n in range(count):
            assert sent[2 * n + 1] < attention[n] < waits[2 * n]


def test_ring_takes_half_a_square_a_step(service: TraceService) -> None:
    layer = service.trace(request(LLAMA, sequence_length=SEQUENCE, context_parallel=4)).pieces["layer.dense"]
    own = SEQUENCE // 4
    kernels = layer.forward.dims[layer.forward.op_class == OpClass.ATTENTION]
    assert kernels[0].tolist() == [BATCH, HEADS, KV_HEADS, own, own, WIDTH, 1, 0, WIDTH]
    for row in kernels[1:]:
        assert row[3] * row[4] == own * own / 2
        assert row[6] == 0
    last = service.trace(request(LLAMA, sequence_length=SEQUENCE, context_parallel=4)).boundary_bytes
    assert last == 2.0 * BATCH * own * LLAMA.hidden_size


def test_gathers_and_exchanges_in_closed_form(service: TraceService) -> None:
    gathered, exchanged = (
        service.trace(request(LLAMA, sequence_length=SEQUENCE, context_parallel=4, context_exchange=kind)).pieces[
            "layer.dense"
        ]
        for kind in ("all_gather", "a2a")
    )
    keys = 2.0 * BATCH * SEQUENCE * KV_HEADS * WIDTH
    assert of_context(gathered.forward, Collective.ALL_GATHER) == [keys] * 2
    assert of_context(gathered.backward, Collective.ALL_GATHER) == [keys] * 2
    assert of_context(gathered.backward, Collective.REDUCE_SCATTER) == [keys] * 2
    queries = 2.0 * BATCH * SEQUENCE / 4 * HEADS * WIDTH
    assert of_context(exchanged.forward, Collective.ALL_TO_ALL) == [queries, keys / 4, keys / 4, queries]
    assert of_context(exchanged.backward, Collective.ALL_TO_ALL) == [queries, queries, keys / 4, keys / 4]


def test_learned_positions_too(service: TraceService) -> None:
    layer = service.trace(request(GPT, context_parallel=2)).pieces["layer.dense"]
    assert len(of_context(layer.forward, Collective.SEND)) == 1


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "window"), [(64, 64, 0), (64, 256, 0), (64, 64, 16), (32, 128, 16), (64, 96, 48)]
)
def test_pairs_of_a_mask(seq_q: int, seq_k: int, window: int) -> None:
    query, key = np.arange(seq_q)[:, None] + seq_k - seq_q, np.arange(seq_k)[None, :]
    seen = (key <= query) & ((key > query - window) if window else True)
    # The closed form takes half of the diagonal.
    assert attended_pairs(seq_q, seq_k, True, window) == pytest.approx(seen.sum(), abs=seq_q)
    assert attention_flop(1, 1, 10.0, 4, 4) * 2.5 == attention_flop(1, 1, 10.0, 4, 4, backward=True)


def test_what_no_kernel_takes_is_refused() -> None:
    assert "attention" in str(unsupported(request(LLAMA, context_parallel=2, attention="unfused")))
    refusal = str(unsupported(request(LLAMA, context_parallel=8, context_exchange="a2a")))
    assert refusal.startswith("recipe.context_exchange")
    assert unsupported(request(LLAMA, context_parallel=4, context_exchange="a2a")) is None
