"""What the products and exchanges of a layer take at least, priced by the models that price traces."""

from dataclasses import dataclass
from typing import Final

from echo_explore.graph import DTYPE_BYTES, Axis, Collective, DType, OpClass, OpRow, build_graph
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate

_DTYPES: Final = {"bf16": DType.BF16, "fp16": DType.FP16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProducts:
    """Products of a dense layer for one micro-batch on the mean of equal GPUs, and what it waits for.

    Attributes:
        flop: of the forward's products; the backward has twice that.
        forward_s: seconds of the forward's products.
        backward_s: of the backward's, for inputs and weights.
        exchanges_s: seconds of the forward's gathers and scatters, or sums, over tensor ranks, which nothing hides.
    """

    flop: float
    forward_s: float
    backward_s: float
    exchanges_s: float


def layer_products(candidate: Candidate, pricer: Pricer) -> LayerProducts | None:
    """Of a dense layer; None where this module does not know what a trace would hold.

    It knows Megatron's layers with attention of heads in 16 bits, without adapters: four products, all of whose
    operands are stored, and two pairs of exchanges. Prices are those of equal rows of a trace, so sums of them are
    admissible; weight gradients that add to a sum move more than is counted here.
    """
    model, layout, recipe = candidate.model, candidate.layout, candidate.recipe
    dtype = _DTYPES.get(recipe.precision)
    known = candidate.stack.framework == "megatron" and model.mla is None and recipe.lora_rank == 0
    if dtype is None or not known:
        return None
    tensor = layout.tensor_parallel
    tokens = recipe.micro_batch_size * recipe.sequence_length // layout.context_parallel
    heads = model.num_attention_heads // tensor
    groups = max(1, model.num_key_value_heads // tensor)
    gated = 2 if model.gated else 1
    inner = model.ffn_hidden_size // tensor
    shapes = (
        (tokens, (heads + 2 * groups) * model.head_dim, model.hidden_size),
        (tokens, model.hidden_size, heads * model.head_dim),
        (tokens, gated * inner, model.hidden_size),
        (tokens, model.hidden_size, inner),
    )
    forward = [_product(m, n, k, dtype) for m, n, k in shapes]
    backward = [_product(m, k, n, dtype) for m, n, k in shapes] + [_product(n, k, m, dtype) for m, n, k in shapes]
    time_s = pricer.price(build_graph([*forward, *backward])).time_s
    return LayerProducts(
        flop=sum(row.flop for row in forward),
        forward_s=float(time_s[: len(forward)].sum()),
        backward_s=float(time_s[len(forward) :].sum()),
        exchanges_s=_exchanges_s(candidate, pricer, 1.0 * tokens * model.hidden_size, dtype),
    )


def _exchanges_s(candidate: Candidate, pricer: Pricer, elements: float, dtype: DType) -> float:
    if candidate.layout.tensor_parallel == 1 or candidate.overlaps_tensor:
        return 0.0
    pair = [Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
    kinds = pair if candidate.layout.sequence_parallel else [Collective.ALL_REDUCE]
    size = elements * DTYPE_BYTES[dtype]
    return 2.0 * sum(pricer.collective(Axis.TENSOR, kind, size, dtype)[0] for kind in kinds)


def _product(m: int, n: int, k: int, dtype: DType) -> OpRow:
    size = DTYPE_BYTES[dtype]
    return OpRow(
        op_class=OpClass.GEMM,
        dtype=dtype,
        name="aten.mm",
        dims=(1, m, n, k),
        flop=2.0 * m * n * k,
        bytes_read=size * (m * k + k * n),
        bytes_written=size * m * n,
    )
