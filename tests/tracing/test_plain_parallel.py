"""Parts of trainers that do without Megatron's own tensor-parallel products and loss."""

import numpy as np
import pytest

from echo_explore.graph import Collective, OpClass, OpKind
from echo_explore.tracing import TraceService
from tests.tracing.models import LLAMA, request
from tests.tracing.test_pieces import collectives, layer

pytestmark = pytest.mark.torch


def test_a_gate_apart_sums_the_gradient_of_its_input_too(service: TraceService) -> None:
    """Three sums in a backward, none beside the gradient of a weight; one product more, the same work."""
    joint = layer(service, model=LLAMA, fusion="eager", tensor_parallel=2)
    apart = layer(
        service, model=LLAMA, fusion="eager", tensor_parallel=2, gate_apart=True, blocking_input_gradients=True
    )
    assert [asynchronous for *_, asynchronous in collectives(joint)] == [False, False, True, True]
    assert [(name, asynchronous) for name, _, asynchronous in collectives(apart)] == [("ALL_REDUCE", False)] * 5
    products = [int((piece.forward.op_class == OpClass.GEMM).sum()) for piece in (joint, apart)]
    assert products[1] == products[0] + 1
    assert apart.forward.flop.sum() == joint.forward.flop.sum()
    assert apart.num_parameters == joint.num_parameters


def test_under_sequence_parallelism_gate_and_other_product_share_what_is_gathered(service: TraceService) -> None:
    apart = layer(
        service, model=LLAMA, fusion="eager", tensor_parallel=2, sequence_parallel=True, keeps_gathered_inputs=True,
        gate_apart=True,
    )  # fmt: skip
    names = [name for name, _, _ in collectives(apart)]
    assert (names.count("ALL_GATHER"), names.count("REDUCE_SCATTER")) == (2 + 2, 2 + 2)


def test_a_gathered_loss_is_whole_on_every_rank(service: TraceService) -> None:
    """Logits are gathered once and nothing is summed; softmax and its gradient see the whole vocabulary."""
    split, whole = (
        service.trace(request(model=LLAMA, fusion="eager", tensor_parallel=2, gathered_loss=g)).pieces["head"]
        for g in (False, True)
    )
    kinds = [Collective(int(k)).name for k in whole.forward.collective[np.flatnonzero(whole.forward.is_collective)]]
    assert kinds == ["ALL_GATHER"]
    logits = float(whole.forward.message_bytes.max())
    assert logits == 2.0 * 512 * 2 * LLAMA.padded_vocab_size(2)  # bf16, sequence, batch, vocabulary
    # Side by side, to fp32, log softmax, the accuracy's maximum: 2 + 2, 2 + 4, 4 + 4 and 4 bytes an element.
    compute = whole.forward.is_compute
    moved = float((whole.forward.bytes_read + whole.forward.bytes_written)[compute].sum())
    assert moved > logits / 2 * (2 + 2 + 2 + 4 + 4 + 4 + 4)
    assert whole.saved_bytes > split.saved_bytes


def test_the_host_reads_the_longest_sequence_ahead_of_attention(service: TraceService) -> None:
    graph = layer(service, model=LLAMA, fusion="eager", reads_sequence_lengths=True).forward
    (wait,) = np.flatnonzero(graph.kind == OpKind.HOST_SYNC)
    (attention,) = np.flatnonzero(graph.op_class == OpClass.ATTENTION)
    assert wait < attention
