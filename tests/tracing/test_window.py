"""Sliding windows and sinks in real traces: FLOP, layer kinds and parameters in closed form."""

import pytest

from echo_explore.compute.flop import executed_flop, masked_fraction, model_flop
from echo_explore.graph import OpClass
from echo_explore.specs.parameters import attention_parameters, feed_forward_parameters
from echo_explore.tracing import TraceService
from echo_explore.tracing.request import unsupported
from tests.tracing.models import LLAMA, request

pytestmark = pytest.mark.torch

WINDOW, SEQUENCE, BATCH = 128, 512, 2
WINDOWED = LLAMA.model_copy(update={"attention_window": WINDOW, "full_attention_every": 2})
SINKS = WINDOWED.model_copy(update={"attention_sink": True})


def test_layer_kinds() -> None:
    assert WINDOWED.layer_kinds == ("dense-window", "dense") * 4
    assert set(LLAMA.model_copy(update={"attention_window": 4}).layer_kinds) == {"dense-window"}
    assert WINDOWED.feed_forward_kinds == ("dense",) * 8


def test_flop_of_a_window(service: TraceService) -> None:
    pieces = service.trace(request(WINDOWED, tensor_parallel=2, sequence_parallel=True)).pieces
    heads, width = LLAMA.num_attention_heads / 2, LLAMA.head_dim
    for name, pairs in (("dense", SEQUENCE**2 / 2), ("dense-window", SEQUENCE * WINDOW - WINDOW**2 / 2)):
        for graph, products in ((pieces[f"layer.{name}"].forward, 2), (pieces[f"layer.{name}"].backward, 5)):
            rows = graph.op_class == OpClass.ATTENTION
            assert graph.flop[rows].tolist() == [2.0 * products * BATCH * heads * pairs * width]
            assert graph.dims[rows, 7].tolist() == [WINDOW if name.endswith("window") else 0]
        assert masked_fraction(WINDOWED, name, sequence_length=SEQUENCE) == pairs / SEQUENCE**2


def test_a_window_beyond_the_sequence_changes_nothing(service: TraceService) -> None:
    wide = LLAMA.model_copy(update={"attention_window": SEQUENCE})
    layer = service.trace(request(wide)).pieces["layer.dense-window"]
    plain = service.trace(request(LLAMA)).pieces["layer.dense"]
    assert layer.forward.flop.tolist() == plain.forward.flop.tolist()
    assert layer.forward.dims.tolist() == plain.forward.dims.tolist()


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_sinks_are_one_parameter_a_head(service: TraceService, attention: str) -> None:
    layer = service.trace(request(SINKS, attention=attention)).pieces["layer.dense-window"]
    dense = feed_forward_parameters(SINKS, SINKS.ffn_hidden_size) + 2 * SINKS.hidden_size
    assert layer.num_parameters == attention_parameters(SINKS) + dense
    assert attention_parameters(SINKS) == attention_parameters(WINDOWED) + SINKS.num_attention_heads


@pytest.mark.parametrize("exchange", ["all_gather", "a2a"])
def test_windows_over_a_split_sequence(service: TraceService, exchange: str) -> None:
    split = service.trace(request(WINDOWED, context_parallel=2, context_exchange=exchange)).pieces["layer.dense-window"]
    whole = service.trace(request(WINDOWED)).pieces["layer.dense-window"]
    # The first chunk of a sequence sees less than a window; rank 0 has it, so half of the sum is its share or less.
    assert split.forward.flop.sum() * 2 == pytest.approx(whole.forward.flop.sum(), rel=2e-2)


def test_closed_form_of_a_step() -> None:
    plain, windowed = (
        executed_flop(model, sequence_length=4096, num_sequences=1, recompute="selective", attention="flash")
        for model in (LLAMA, WINDOWED)
    )
    saved = 4 * (0.5 - masked_fraction(WINDOWED, "dense-window", sequence_length=4096))
    core = 4.0 * 4096**2 * LLAMA.num_attention_heads * LLAMA.head_dim
    assert plain - windowed == pytest.approx(4 * saved * core, rel=1e-9)
    assert model_flop(WINDOWED, sequence_length=4096, num_sequences=1) == model_flop(
        LLAMA, sequence_length=4096, num_sequences=1
    )


def test_what_no_kernel_takes_is_refused() -> None:
    assert "sliding window" in str(unsupported(request(WINDOWED, context_parallel=2)))
    assert unsupported(request(WINDOWED, context_parallel=2, context_exchange="all_gather")) is None
    assert "sinks" in str(unsupported(request(SINKS, context_parallel=2, context_exchange="all_gather")))
    assert unsupported(request(SINKS, context_parallel=2, context_exchange="a2a")) is None


def test_alibi_spreads_its_bias_over_the_scores(service: TraceService) -> None:
    alibi = LLAMA.model_copy(update={"position_embedding": "alibi"})
    none = LLAMA.model_copy(update={"position_embedding": "none"})
    pieces = {
        (m.position_embedding, a): service.trace(request(m, attention=a)).pieces["layer.dense"]
        for m in (alibi, none)
        for a in ("flash", "unfused")
    }
    heads, element = LLAMA.num_attention_heads, 2.0
    scores, bias = (element * BATCH * heads * SEQUENCE * n for n in (SEQUENCE, 1))
    for phase in ("forward", "backward"):
        graphs = {key: getattr(piece, phase) for key, piece in pieces.items()}
        read, written = (
            getattr(graphs["alibi", "unfused"], column).sum() - getattr(graphs["none", "unfused"], column).sum()
            for column in ("bytes_read", "bytes_written")
        )
        assert (read, written) == ((scores + bias, scores) if phase == "forward" else (0.0, 0.0))
        assert graphs["alibi", "unfused"].flop.sum() == graphs["none", "unfused"].flop.sum()
        assert graphs["alibi", "flash"].bytes_read.sum() == graphs["none", "flash"].bytes_read.sum()


def test_yarn_turns_heads_operator_by_operator(service: TraceService) -> None:
    """Megatron's fused rotary kernel takes no temperature; its own fallback runs (0.16.1, rope_utils.py)."""
    plain, stretched = (
        service.trace(request(LLAMA.model_copy(update={"yarn_scaling_factor": factor}))).pieces["layer.dense"]
        for factor in (1.0, 32.0)
    )
    for graph, name in ((plain.forward, "echo.rope"), (plain.backward, "echo.rope_backward")):
        assert [graph.strings[i] for i in graph.name].count(name) == 2
    for piece, plain_graph in ((stretched.forward, plain.forward), (stretched.backward, plain.backward)):
        assert not any(piece.strings[i].startswith("echo.rope") for i in piece.name)
        assert piece.num_ops > plain_graph.num_ops + 8
        assert piece.flop.sum() == pytest.approx(plain_graph.flop.sum(), rel=1e-3)
