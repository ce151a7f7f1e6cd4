"""Executed FLOP of real traces against closed formulas (arXiv 2104.04473, appendix; causal flash attention halved)."""

import pytest

from echo_explore.graph import Phase
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, LLAMA, MOE, request
from tests.tracing.test_latent import LATENT

pytestmark = pytest.mark.torch

LAYOUTS = [(1, False), (2, True), (4, False), (8, True)]


def layer_flop(batch: int, sequence: int, hidden: int) -> float:
    return 24.0 * sequence * batch * hidden**2


def attention_flop(batch: int, sequence: int, hidden: int, *, causal: bool) -> float:
    full = 4.0 * batch * sequence**2 * hidden
    return full / 2 if causal else full


@pytest.mark.parametrize(("tensor", "sp"), LAYOUTS)
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_layer(service: TraceService, tensor: int, sp: bool, attention: str) -> None:
    traced = request(tensor_parallel=tensor, sequence_parallel=sp, attention=attention)
    layer = service.trace(traced).pieces["layer.dense"]
    b, s, h = 2, 512, GPT.hidden_size
    linear = layer_flop(b, s, h) / tensor
    scores = attention_flop(b, s, h, causal=attention == "flash") / tensor
    factor = 6.0 if attention == "unfused" else 12.0
    assert layer.forward.flop.sum() == pytest.approx(24 * s * b * h**2 * (1 + s / (factor * h)) / tensor, rel=1e-3)
    # A flash backward computes the scores once more: 5 products instead of 4, which is recomputation inside the kernel.
    recomputed = scores / 2 if attention == "flash" else 0.0
    assert layer.backward.flop.sum() == pytest.approx(2 * (linear + scores) + recomputed, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation(service: TraceService, recompute: str) -> None:
    layer = service.trace(request(tensor_parallel=2, attention="unfused", recompute=recompute)).pieces["layer.dense"]
    b, s, h = 2, 512, GPT.hidden_size
    scores = attention_flop(b, s, h, causal=False) / 2
    expected = {"none": 0.0, "selective": scores, "full": layer_flop(b, s, h) / 2 + scores}[recompute]
    again = layer.backward.flop[layer.backward.phase == Phase.RECOMPUTE].sum()
    assert again == pytest.approx(expected, rel=1e-3)
    assert layer.backward.flop.sum() - again == pytest.approx(2 * layer.forward.flop.sum(), rel=1e-9)


def test_logits(service: TraceService) -> None:
    head = service.trace(request(tensor_parallel=4, sequence_parallel=True)).pieces["head"]
    vocabulary = GPT.padded_vocab_size(4)
    assert head.forward.flop.sum() == pytest.approx(2 * 2 * 512 * GPT.hidden_size * vocabulary / 4, rel=1e-9)
    assert head.backward.flop.sum() == pytest.approx(2 * head.forward.flop.sum(), rel=1e-9)


def test_grouped_queries_and_gated_units(service: TraceService) -> None:
    layer = service.trace(request(LLAMA, tensor_parallel=2, sequence_parallel=True)).pieces["layer.dense"]
    b, s, h, f, kv = 2, 512, 1024, 2816, 4 * 64
    linear = 2.0 * b * s * (h * (h + 2 * kv) + h * h + 3 * h * f) / 2
    assert layer.forward.flop.sum() == pytest.approx(linear + attention_flop(b, s, h, causal=True) / 2, rel=1e-3)


def test_only_products_and_attention_have_flop(service: TraceService) -> None:
    graph = service.trace(request()).pieces["layer.dense"].forward
    products = (graph.op_class == 1) | (graph.op_class == 2)
    assert (graph.flop[products] > 0).all()
    assert not graph.flop[~products].any()


def products(tokens: int, *shapes: tuple[float, float]) -> float:
    """FLOP of products of so many tokens with matrices."""
    return sum(2.0 * tokens * k * n for k, n in shapes)


@pytest.mark.parametrize("tensor", [1, 4])
def test_multi_latent_attention(service: TraceService, tensor: int) -> None:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: the latents' projections are whole on every rank, on its tokens."""
    layer = service.trace(request(LATENT, tensor_parallel=tensor, sequence_parallel=tensor > 1)).pieces["layer.dense"]
    b, s, h, f, heads, query, latent, plain, rotary, value = 2, 512, 1024, 2816, 16, 384, 128, 128, 64, 96
    linear = products(
        b * s, (h, query), (query, heads * (plain + rotary)), (h, latent + rotary), (latent, heads * (plain + value)),
        (heads * value, h), (h, 2 * f), (f, h),
    )  # fmt: skip
    triangle = 2.0 * b * heads * s**2 / 2
    scores, values = triangle * (plain + rotary), triangle * value
    assert layer.forward.flop.sum() * tensor == pytest.approx(linear + scores + values, rel=1e-3)
    # Scores once more, and two products for each of both.
    assert layer.backward.flop.sum() * tensor == pytest.approx(2 * linear + 3 * scores + 2 * values, rel=1e-3)


@pytest.mark.parametrize(("tensor", "expert", "dispatcher"), [(1, 1, "alltoall"), (2, 4, "alltoall"), (1, 8, "deepep")])
def test_mixture_of_experts(service: TraceService, tensor: int, expert: int, dispatcher: str) -> None:
    """Balanced: every rank runs as many rows of experts as its own tokens choose."""
    layer = service.trace(
        request(
            MOE, tensor_parallel=tensor, sequence_parallel=tensor > 1, expert_parallel=expert,
            expert_dispatcher=dispatcher,
        )
    ).pieces["layer.moe"]  # fmt: skip
    b, s, h, kv, experts, top, width, shared = 2, 512, 1024, 4 * 64, 8, 2, 512, 256
    linear = products(b * s, (h, h + 2 * kv), (h, h), (h, experts), (h, 2 * shared), (shared, h))
    linear += products(b * s * top, (h, 2 * width), (width, h))
    scores = attention_flop(b, s, h, causal=True)
    assert layer.forward.flop.sum() * tensor == pytest.approx(linear + scores, rel=1e-3)
    assert layer.backward.flop.sum() * tensor == pytest.approx(2 * linear + 2.5 * scores, rel=1e-3)
