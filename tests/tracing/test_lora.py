"""Adapters beside a frozen model: what is computed, kept, trained and sent."""

from typing import Any

import numpy as np
import pytest

from echo_explore.core import TraceError
from echo_explore.graph import Collective, Piece, op_rows
from echo_explore.tracing import TraceService
from tests.tracing.models import GPT, LLAMA, MOE, request

pytestmark = pytest.mark.torch
ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
TOKENS = 2 * 512  # micro-batch of 2, sequence of 512
RANK = 8


def layer(service: TraceService, **changes: Any) -> Piece:
    fields: dict[str, Any] = {"lora_rank": RANK, "lora_targets": ALL} | changes
    return service.trace(request(**fields)).pieces["layer.dense"]


def adapter_weights(tensor: int) -> int:
    """Elements on a rank of the adapters of a Llama layer: A and B beside each of the four linear layers."""
    h, f = LLAMA.hidden_size, LLAMA.ffn_hidden_size
    kv = LLAMA.num_key_value_heads * LLAMA.head_dim
    ins = h + h // tensor + h + f // tensor
    outs = (h + 2 * kv) // tensor + h + 2 * f // tensor + h
    return RANK * (ins + outs)


@pytest.mark.parametrize("tensor", [1, 4])
def test_only_adapters_are_trained(service: TraceService, tensor: int) -> None:
    piece = layer(service, model=LLAMA, tensor_parallel=tensor, sequence_parallel=tensor > 1)
    trained = [p for p in piece.parameters if p.trainable]
    assert all(".lora." in p.name for p in trained)
    assert sum(p.num_elements for p in trained) == adapter_weights(tensor)
    plain = service.trace(request(model=LLAMA, tensor_parallel=tensor, sequence_parallel=tensor > 1))
    frozen = sum(p.num_elements for p in piece.parameters if not p.trainable)
    assert frozen == plain.pieces["layer.dense"].num_parameters


@pytest.mark.parametrize("tensor", [1, 4])
def test_frozen_weights_have_no_gradient_products(service: TraceService, tensor: int) -> None:
    parallel: dict[str, Any] = {"model": LLAMA, "tensor_parallel": tensor, "sequence_parallel": tensor > 1}
    piece, plain = layer(service, **parallel), service.trace(request(**parallel)).pieces["layer.dense"]
    weights = sum(p.num_elements for p in plain.parameters if "norm" not in p.name)
    # Row-parallel adapters see a share of the tokens behind their rank-wide middle.
    h, f = LLAMA.hidden_size, LLAMA.ffn_hidden_size
    outs_of_rows = 2 * h / tensor
    ins = h + h // tensor + h + f // tensor
    outs_of_columns = (h + 2 * LLAMA.num_key_value_heads * LLAMA.head_dim) // tensor + 2 * f // tensor
    adapters = 2.0 * TOKENS * RANK * (ins + outs_of_columns + outs_of_rows)
    assert piece.forward.flop.sum() == pytest.approx(plain.forward.flop.sum() + adapters, rel=1e-9)
    assert piece.backward.flop.sum() == pytest.approx(
        plain.backward.flop.sum() - 2.0 * TOKENS * weights + 2 * adapters, rel=1e-9
    )


def test_frozen_layers_keep_less(service: TraceService) -> None:
    only = layer(service, model=GPT, lora_targets=("linear_qkv",))
    assert only.saved_bytes < service.trace(request(model=GPT)).pieces["layer.dense"].saved_bytes


def test_a_shared_input_is_gathered_once(service: TraceService) -> None:
    piece = layer(service, model=LLAMA, tensor_parallel=4, sequence_parallel=True)
    graph = piece.forward
    kinds = [int(k) for k in graph.collective[graph.is_collective]]
    whole = 2.0 * TOKENS * LLAMA.hidden_size
    assert kinds.count(Collective.ALL_GATHER) == 2
    sizes = graph.message_bytes[np.flatnonzero(graph.collective == Collective.REDUCE_SCATTER)]
    assert sorted(sizes) == [2.0 * TOKENS * RANK] * 2 + [whole] * 2  # middles of adapters, results of layers


def test_adapters_drop_some_of_what_they_read(service: TraceService) -> None:
    plain, dropping = layer(service, model=LLAMA), layer(service, model=LLAMA, lora_dropout=True)
    for part in ("forward", "backward"):
        rows = [sum("lora.dropout" in row.module for row in op_rows(getattr(p, part))) for p in (plain, dropping)]
        assert rows[0] == 0
        assert rows[1] >= len(ALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": MOE}, "dense models"),
        ({"recompute": "full"}, "recomputed layers"),
        ({"framework": "fsdp2"}, "not traced for fsdp2"),
    ],
)
def test_what_is_not_traced_is_named(service: TraceService, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        layer(service, **changes)
