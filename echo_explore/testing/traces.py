"""A made-up tracer for tests of everything behind the trace: GPT layers written by hand, no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from echo_explore.graph import (
    Axis,
    Collective,
    DType,
    ExecutionGraph,
    OpClass,
    OpKind,
    OpRow,
    Parameter,
    Phase,
    Piece,
    Trace,
    build_graph,
    concatenate,
)
from echo_explore.specs.expert_legality import routing_of
from echo_explore.specs.recompute import traced_form
from echo_explore.tracing.request import TraceRequest


class HandmadeTracer:
    """Satisfies `simulate.Tracer`; sizes follow the request, so that FLOP, bytes and parameters are plausible."""

    def trace(self, request: TraceRequest) -> Trace:
        """A trace of a dense model, or of one all of whose layers are mixtures."""
        model, tensor = request.model, request.tensor_parallel
        rows = request.micro_batch_size * request.sequence_length
        local = rows // tensor if request.sequence_parallel else rows
        hidden, vocab = model.hidden_size, model.padded_vocab_size(tensor) // tensor
        if traced_form(request.recompute) == "full:block":
            forms = {"layer.dense": "none", "again.dense": "full"}
        else:
            forms = {"layer.dense": request.recompute}
        layers = {n: _layer(replace(request, recompute=form), rows, local) for n, form in forms.items()}
        if model.moe is not None:
            layers = {name.replace("dense", "moe"): _mixture(request, layer, local) for name, layer in layers.items()}
        embedding = Piece(
            forward=_graph(request, [_stream(OpClass.EMBEDDING, rows, hidden), *_sum(request, rows)], Phase.FORWARD),
            backward=_graph(request, [_stream(OpClass.EMBEDDING, rows, hidden)], Phase.BACKWARD),
            parameters=(
                _parameter("word_embeddings.weight", vocab, hidden, split=0, embedding=True),
                _parameter("position_embeddings.weight", model.max_sequence_length, hidden),
            ),
            saved_bytes=8.0 * rows,
            forward_peak_bytes=4.0 * rows * hidden,
            backward_peak_bytes=4.0 * rows * hidden,
        )
        logits = _gemm(rows, vocab, hidden)
        head = Piece(
            forward=_graph(
                request,
                [_stream(OpClass.NORM, local, hidden), logits, _stream(OpClass.CROSS_ENTROPY, rows, vocab)],
                Phase.FORWARD,
            ),
            backward=_graph(request, [logits, logits, _stream(OpClass.NORM, local, hidden)], Phase.BACKWARD),
            parameters=(_parameter("final_layernorm.weight", hidden, sequence=request.sequence_parallel),),
            saved_bytes=6.0 * rows * vocab,
            forward_peak_bytes=10.0 * rows * vocab,
            backward_peak_bytes=4.0 * rows * vocab,
        )
        return Trace(
            key=request.key({"handmade": "1"}),
            request=request.canonical(),
            pieces={"embedding": embedding, **layers, "head": head},
            layer_kinds=model.layer_kinds,
            boundary_bytes=2.0 * local * hidden,
            facts={"versions": {"handmade": "1"}},
        )

    def close(self) -> None:
        """Nothing to close."""


def _layer(request: TraceRequest, rows: int, local: int) -> Piece:
    model, tensor = request.model, request.tensor_parallel
    hidden, inner = model.hidden_size, model.ffn_hidden_size // tensor
    heads = model.num_attention_heads // tensor
    width = heads * model.head_dim
    norm = _stream(OpClass.NORM, local, hidden)
    gemms = [_gemm(rows, 3 * width, hidden), _gemm(rows, hidden, width)]
    gemms += [_gemm(rows, inner, hidden), _gemm(rows, hidden, inner)]
    attention = _attention(request, heads)
    forward = [norm, gemms[0], attention, gemms[1], *_sum(request, rows), norm, gemms[2]]
    forward += [_stream(OpClass.ELEMENTWISE, rows, inner), gemms[3], *_sum(request, rows)]
    backward: list[Mapping[str, Any]] = []
    if request.recompute == "full":
        backward += [{**row, "phase": Phase.RECOMPUTE} for row in forward]
    elif request.recompute == "selective":
        backward.append({**attention, "phase": Phase.RECOMPUTE})
    for gemm in reversed(gemms):
        _, m, n, k = gemm["dims"]
        backward += [_gemm(m, k, n), _gemm(n, k, m)]
    backward += [attention, attention, norm, norm, *_sum(request, rows), *_sum(request, rows)]
    saved = 2.0 * (10 * local * hidden + 5 * rows * hidden // tensor + 2 * rows * inner)
    if request.recompute == "full":
        saved = 2.0 * local * hidden
    sequence = request.sequence_parallel
    return Piece(
        forward=_graph(request, forward, Phase.FORWARD, layer=0),
        backward=_graph(request, backward, Phase.BACKWARD, layer=0),
        parameters=(
            _parameter("input_layernorm.weight", hidden, sequence=sequence),
            _parameter("linear_qkv.weight", 3 * width, hidden, split=0),
            _parameter("linear_proj.weight", hidden, width, split=1),
            _parameter("pre_mlp_layernorm.weight", hidden, sequence=sequence),
            _parameter("linear_fc1.weight", inner, hidden, split=0),
            _parameter("linear_fc2.weight", hidden, inner, split=1),
        ),
        saved_bytes=saved,
        forward_peak_bytes=saved + 4.0 * rows * inner,
        backward_peak_bytes=4.0 * rows * inner,
    )


def _mixture(request: TraceRequest, dense: Piece, local: int) -> Piece:
    """The layer with an exchange, products of experts and an exchange behind its attention; weights are left out."""
    moe = request.model.moe
    assert moe is not None
    routing = routing_of(moe, request.expert_load)
    ranks, hidden, width = request.expert_parallel, request.model.hidden_size, moe.ffn_hidden_size
    share = routing.shares(ranks)[routing.busiest(ranks) if request.expert_rank < 0 else request.expert_rank]
    sent = local * moe.experts_per_token
    got = round(sent * ranks * share)
    exchange = {
        "kind": OpKind.COLLECTIVE,
        "axis": Axis.EXPERT,
        "collective": Collective.ALL_TO_ALL,
        "message_bytes": 2.0 * hidden * max(sent, got),
        "name": "all_to_all",
    }
    products = [_gemm(got, width, hidden), _gemm(got, hidden, width)]
    forward = [exchange, *products, exchange] if ranks > 1 else products
    backward = [exchange, *products, *products, exchange] if ranks > 1 else [*products, *products]
    graphs = (
        _graph(request, rows, phase, layer=0) for rows, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD))
    )
    ahead, behind = graphs
    return replace(dense, forward=concatenate([dense.forward, ahead]), backward=concatenate([behind, dense.backward]))


def _graph(
    request: TraceRequest, rows: Sequence[Mapping[str, Any]], phase: Phase, *, layer: int = -1
) -> ExecutionGraph:
    dtype = DType.FP16 if request.precision == "fp16" else DType.BF16
    return build_graph([OpRow(**{"phase": phase, "layer": layer, "dtype": dtype, **row}) for row in rows])


def _parameter(name: str, *shape: int, split: int = -1, sequence: bool = False, embedding: bool = False) -> Parameter:
    return Parameter(
        name=name,
        num_elements=math.prod(shape),
        shape=shape,
        partition_dim=split,
        tensor_sharded=split >= 0,
        sequence_parallel=sequence,
        embedding=embedding,
    )


def _gemm(m: int, n: int, k: int) -> dict[str, Any]:
    return {
        "op_class": OpClass.GEMM,
        "name": "gemm",
        "dims": (1, m, n, k),
        "flop": 2.0 * m * n * k,
        "bytes_read": 2.0 * (m * k + k * n),
        "bytes_written": 2.0 * m * n,
    }


def _attention(request: TraceRequest, heads: int) -> dict[str, Any]:
    b, s, d = request.micro_batch_size, request.sequence_length, request.model.head_dim
    size = 2.0 * b * s * heads * d
    causal = request.attention == "flash"
    return {
        "op_class": OpClass.ATTENTION,
        "name": "attention",
        "dims": (b, heads, heads, s, s, d, int(causal), 0),
        "flop": (2.0 if causal else 4.0) * b * heads * s * s * d,
        "bytes_read": 3 * size,
        "bytes_written": size,
    }


def _stream(op_class: OpClass, rows: int, columns: int) -> dict[str, Any]:
    by_rows = op_class in (OpClass.NORM, OpClass.EMBEDDING, OpClass.CROSS_ENTROPY)
    return {
        "op_class": op_class,
        "name": op_class.name.lower(),
        "dims": (rows, columns) if by_rows else (rows * columns,),
        "bytes_read": 2.0 * rows * columns,
        "bytes_written": 2.0 * rows * columns,
    }


def _sum(request: TraceRequest, rows: int) -> list[dict[str, Any]]:
    if request.tensor_parallel == 1:
        return []
    size = 2.0 * rows * request.model.hidden_size
    kinds = [Collective.ALL_REDUCE]
    if request.sequence_parallel:
        kinds = [Collective.REDUCE_SCATTER, Collective.ALL_GATHER]
    return [
        {"kind": OpKind.COLLECTIVE, "axis": Axis.TENSOR, "collective": kind, "message_bytes": size, "name": "comm"}
        for kind in kinds
    ]
