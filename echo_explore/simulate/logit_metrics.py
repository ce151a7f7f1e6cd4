"""Metrics that a trainer computes on the logits of every micro-batch, beside the loss."""

from typing import Final

from echo_explore.graph import DTYPE_BYTES, DType, OpClass, OpRow
from echo_explore.specs import Candidate

_LOGITS: Final = {"fp32": DType.FP32, "fp16": DType.FP16}


def logit_metric_rows(candidate: Candidate) -> tuple[OpRow, ...]:
    """Rows of `stack.logit_metrics` cross-entropies of PyTorch over the logits, without a backward.

    Each is what autocast makes of torch.nn.CrossEntropyLoss: a copy of the logits in fp32, unless they are, and a log
    softmax that reads and writes them; picking the target of a row is left out (below 1e-4 of it).

    # Approximation: of their arrays none is counted in the peak of memory (under-estimates).

    References:
        composer 0.14 (2023), metrics/nlp.py, LanguageCrossEntropy.
    """
    layout, recipe = candidate.layout, candidate.recipe
    tokens = recipe.micro_batch_size * recipe.sequence_length // layout.context_parallel
    width = candidate.model.vocab_size // layout.tensor_parallel
    logits, dtype = float(tokens * width), _LOGITS.get(recipe.precision, DType.BF16)
    wide = 4.0 * logits
    copy = OpRow(
        op_class=OpClass.COPY,
        dtype=dtype,
        name="aten._to_copy",
        module="metrics",
        dims=(tokens, width),
        bytes_read=DTYPE_BYTES[dtype] * logits,
        bytes_written=wide,
        host_calls=1,
    )
    softmax = OpRow(
        op_class=OpClass.SOFTMAX,
        dtype=DType.FP32,
        name="aten._log_softmax",
        module="metrics",
        dims=(tokens, width),
        bytes_read=wide,
        bytes_written=wide,
        host_calls=1,
    )
    one = (softmax,) if dtype is DType.FP32 else (copy, softmax)
    return one * candidate.stack.logit_metrics
