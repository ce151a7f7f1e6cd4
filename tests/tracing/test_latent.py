"""Multi-latent attention and multi-token prediction in real traces: FLOP, parameters and bytes in closed form."""

import numpy as np
import pytest

from echo_explore.compute.flop import layer_forward_flop
from echo_explore.graph import Axis, ChunkShape, Collective, OpClass, OpKind
from echo_explore.memory import prediction_embedding
from echo_explore.specs.model import MlaSpec, ModelSpec
from echo_explore.specs.parameters import attention_parameters, count_parameters, feed_forward_parameters
from echo_explore.tracing import TraceService
from echo_explore.tracing.request import unsupported
from tests.tracing.models import LLAMA, MOE, request

pytestmark = pytest.mark.torch

LATENT = ModelSpec.model_validate(
    LLAMA.model_dump(exclude={"head_dim", "num_key_value_heads", "schema_version"})
    | {
        "mla": MlaSpec(q_lora_rank=384, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=96),
    }
)
DIRECT = LATENT.model_copy(update={"mla": LATENT.mla and LATENT.mla.model_copy(update={"q_lora_rank": 0})})
PREDICTING = LLAMA.model_copy(update={"multi_token_prediction_layers": 1})
BATCH, SEQUENCE = 2, 512
TOKENS = BATCH * SEQUENCE


@pytest.mark.parametrize(
    ("model", "tensor", "attention"),
    [(LATENT, 1, "flash"), (LATENT, 4, "flash"), (DIRECT, 2, "flash"), (LATENT, 2, "unfused")],
)
def test_flop_and_parameters(service: TraceService, model: ModelSpec, tensor: int, attention: str) -> None:
    traced = request(model, tensor_parallel=tensor, sequence_parallel=tensor > 1, attention=attention)
    layer = service.trace(traced).pieces["layer.dense"]
    fraction = 0.5 if attention == "flash" else 1.0
    expected = layer_forward_flop(
        model, kind="dense", sequence_length=SEQUENCE, num_tokens=TOKENS, attended_fraction=fraction
    )
    assert layer.forward.flop.sum() * tensor == pytest.approx(expected, rel=1e-9)
    elements = sum(p.num_elements * (tensor if p.tensor_sharded else 1) for p in layer.parameters)
    norms = 2 * model.hidden_size
    assert elements == attention_parameters(model) + feed_forward_parameters(model, model.ffn_hidden_size) + norms


def test_one_kernel_with_two_widths(service: TraceService) -> None:
    layer = service.trace(request(LATENT, tensor_parallel=2, sequence_parallel=True)).pieces["layer.dense"]
    heads, pairs = 8, SEQUENCE**2 / 2
    for graph, widths in ((layer.forward, 192 + 96), (layer.backward, 3 * 192 + 2 * 96)):
        rows = graph.op_class == OpClass.ATTENTION
        assert graph.dims[rows].tolist() == [[BATCH, heads, heads, SEQUENCE, SEQUENCE, 192, 1, 0, 96]]
        assert graph.flop[rows].tolist() == [2.0 * BATCH * heads * pairs * widths]
    queries, values, kept = (2.0 * TOKENS * heads * width for width in (192, 96, 96))
    row = layer.forward.op_class == OpClass.ATTENTION
    assert layer.forward.bytes_read[row].item() == 2 * queries + values
    assert layer.forward.bytes_written[row].item() == kept + 4.0 * TOKENS * heads + 16


def test_latents_are_gathered_not_hidden_states(service: TraceService) -> None:
    layer = service.trace(request(LATENT, tensor_parallel=2, sequence_parallel=True)).pieces["layer.dense"]
    graph = layer.forward
    gathers = (graph.kind == OpKind.COLLECTIVE) & (graph.collective == Collective.ALL_GATHER)
    assert (graph.axis[gathers] == Axis.TENSOR).all()
    # The shared rotary part of keys, both latents, and the input of the feed-forward.
    assert graph.message_bytes[gathers].tolist() == [2.0 * TOKENS * width for width in (64, 384, 128, 1024)]
    replicated = {p.name for p in layer.parameters if p.sequence_parallel}
    assert {f"self_attention.linear_{part}_down_proj.weight" for part in ("q", "kv")} <= replicated


def test_over_a_split_sequence(service: TraceService) -> None:
    whole, split = (
        service.trace(request(LATENT, context_parallel=context)).pieces["layer.dense"] for context in (1, 2)
    )
    assert split.forward.flop.sum() * 2 == pytest.approx(whole.forward.flop.sum(), rel=1e-9)
    assert split.backward.flop.sum() * 2 == pytest.approx(whole.backward.flop.sum(), rel=1e-9)
    sent = split.forward.message_bytes[split.forward.collective == Collective.SEND]
    assert sent.tolist() == [2.0 * TOKENS / 2 * 16 * (192 + 96)]


@pytest.mark.parametrize("base", [LLAMA, MOE])
def test_prediction_layer(service: TraceService, base: ModelSpec) -> None:
    model = base.model_copy(update={"multi_token_prediction_layers": 1})
    plain, predicting = (service.trace(request(m)).pieces for m in (base, model))
    added = predicting["head"].forward.flop.sum() - plain["head"].forward.flop.sum()
    kind = "moe" if base.moe else "dense"
    layer = layer_forward_flop(model, kind=kind, sequence_length=SEQUENCE, num_tokens=TOKENS, attended_fraction=0.5)  # type: ignore[arg-type]
    router = 2.0 * TOKENS * model.hidden_size * base.moe.num_experts if base.moe else 0.0
    projection = 2.0 * TOKENS * 2 * model.hidden_size**2
    logits = 2.0 * TOKENS * model.hidden_size * model.padded_vocab_size(1)
    assert added == pytest.approx(layer + projection + logits + router, rel=1e-9)
    assert predicting["head"].num_parameters - plain["head"].num_parameters == count_parameters(model).prediction
    for name in plain:
        if name.startswith("layer."):
            assert predicting[name].forward.flop.sum() == plain[name].forward.flop.sum()
            assert predicting[name].saved_bytes == plain[name].saved_bytes
    # Logits of its own are kept for the backward, in 16 bits and as fp32 probabilities at least.
    more = predicting["head"].saved_bytes - plain["head"].saved_bytes
    assert more > 4.0 * TOKENS * model.padded_vocab_size(1)


def test_the_last_stage_keeps_an_embedding_for_it(service: TraceService) -> None:
    trace = service.trace(request(PREDICTING))
    last = ChunkShape(first_layer=4, num_layers=4, has_embedding=False, has_head=True)
    assert prediction_embedding(PREDICTING, trace, last) == trace.pieces["embedding"].parameters
    assert prediction_embedding(LLAMA, trace, last) == ()
    only = ChunkShape(first_layer=0, num_layers=8, has_embedding=True, has_head=True)
    assert prediction_embedding(PREDICTING, trace, only) == ()
    tied = PREDICTING.model_copy(update={"tied_embeddings": True})
    assert prediction_embedding(tied, trace, last) == ()


def test_narrow_products_of_latents(service: TraceService) -> None:
    layer = service.trace(request(LATENT, precision="fp8")).pieces["layer.dense"]
    names = np.array([layer.forward.strings[i] for i in layer.forward.name])
    assert (names == "echo.quantise").sum() == 7  # four projections in, one out, two of the feed-forward


def test_refused() -> None:
    model = LATENT.model_copy(update={"position_embedding": "none"})
    assert str(unsupported(request(model))).startswith("model.position_embedding")
