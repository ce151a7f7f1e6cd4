"""The small vocabularies of an execution graph. Codes are part of the file format: append, never renumber."""

from enum import IntEnum


class OpKind(IntEnum):
    """What a row of a graph is."""

    COMPUTE = 0
    """A kernel on the GPU."""
    COLLECTIVE = 1
    """A collective or a point-to-point transfer, launched here."""
    WAIT = 2
    """The compute stream waits for the collective in `awaits`."""
    HOST_SYNC = 3
    """The host waits for the GPU (an `item()`, a synchronize)."""


class OpClass(IntEnum):
    """Families of kernels that one formula prices; `dims` of a graph holds the sizes named here (unused: 0)."""

    NONE = 0
    """Not a kernel."""
    GEMM = 1
    """dims: batch, m, n, k; C[m, n] = A[m, k] B[k, n], `batch` times."""
    ATTENTION = 2
    """One fused attention kernel. dims: batch, heads, kv_heads, seq_q, seq_k, head_dim of queries and keys, causal (the
    last query sees the last key), window (0: none), head_dim of values (0: that of keys)."""
    NORM = 3
    """Layer or RMS norm. dims: rows, columns."""
    SOFTMAX = 4
    """Softmax, scale and mask included where fused. dims: rows, columns."""
    ELEMENTWISE = 5
    """One pass over arrays: activations, bias, dropout, residual, scale, casts of a chain. dims: elements."""
    REDUCTION = 6
    """Sums and norms of arrays. dims: elements read, elements written."""
    EMBEDDING = 7
    """Gather of rows or its backward scatter. dims: rows, columns."""
    CROSS_ENTROPY = 8
    """Fused softmax cross-entropy. dims: rows, columns (this rank's share of the vocabulary)."""
    COPY = 9
    """Copies, transposes, casts, fills. dims: elements."""
    OPTIMIZER = 10
    """Multi-tensor update. dims: elements."""
    ROPE = 11
    """Rotary embedding. dims: elements."""
    GROUPED_GEMM = 12
    """dims: groups, total m, n, k."""
    PERMUTE = 13
    """Token permutation of a mixture of experts. dims: rows, columns."""
    OTHER = 14
    """A kernel that no class here describes; priced by bytes; with FLOP only where a fallback is allowed."""
    CONVOLUTION = 15
    """As its implicit product. dims: groups, batch x output pixels, output channels and input x window of a group."""
    BATCH_NORM = 16
    """dims: rows (batch x pixels), columns (channels); the forward reads its input twice."""
    QUANTISE = 17
    """Cast to 8 or 4 bits with its scales. dims: rows, columns."""


class Phase(IntEnum):
    """Which part of the step a row belongs to."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OPTIMIZER = 3
    """From the end of the last backward to the end of the step."""


class Axis(IntEnum):
    """The parallelism axis whose group a collective runs on."""

    NONE = 0
    TENSOR = 1
    CONTEXT = 2
    EXPERT = 3
    DATA = 4
    """Data-parallel replicas (with context parallelism: both)."""
    PIPELINE = 5
    EMBEDDING = 6
    """First and last pipeline stage, which share tied embeddings."""
    MODEL = 7
    """All ranks of one model replica (gradient norm)."""
    EXPERT_DATA = 8
    """Replicas of the same experts."""
    EXPERT_TENSOR = 9
    """Ranks over which each expert is split."""
    EXPERT_MODEL = 10
    """Ranks that hold all experts once: expert and expert-tensor axis together."""
    HOST = 11
    """No group: copies to the memory of the rank's own host (SEND) and back (RECV)."""


class Collective(IntEnum):
    """Kinds of communication; `message_bytes` is nccl-tests' S for each."""

    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    SEND = 7
    RECV = 8
    BARRIER = 9


class DType(IntEnum):
    """Element types."""

    NONE = 0
    FP32 = 1
    BF16 = 2
    FP16 = 3
    FP8 = 4
    INT64 = 5
    INT32 = 6
    INT8 = 7
    BOOL = 8
    FP64 = 9
    MXFP8 = 10
    NVFP4 = 11
    TF32 = 12


DTYPE_BYTES: dict[DType, float] = {
    DType.NONE: 0.0,
    DType.FP32: 4.0,
    DType.BF16: 2.0,
    DType.FP16: 2.0,
    DType.FP8: 1.0,
    DType.INT64: 8.0,
    DType.INT32: 4.0,
    DType.INT8: 1.0,
    DType.BOOL: 1.0,
    DType.FP64: 8.0,
    DType.MXFP8: 1.0,
    DType.NVFP4: 0.5,
    DType.TF32: 4.0,
}
NUM_DIMS = 9
"""Width of the `dims` column."""
