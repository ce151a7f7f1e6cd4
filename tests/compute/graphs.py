"""Small graphs for the tests of the compute model."""

from echo_explore.graph import DType, ExecutionGraph, OpClass, OpRow, Phase, build_graph
from echo_explore.specs import DeviceSpec, StackProfile, load_cluster, load_stack


def device(cluster: str = "a100-80gb-hdr") -> DeviceSpec:
    return load_cluster(cluster).device


def stack() -> StackProfile:
    return load_stack("megatron-core")


def gemm(batch: int, m: int, n: int, k: int, *, dtype: DType = DType.FP16, phase: Phase = Phase.FORWARD) -> OpRow:
    return OpRow(
        op_class=OpClass.GEMM,
        dtype=dtype,
        phase=phase,
        dims=(batch, m, n, k),
        flop=2.0 * batch * m * n * k,
        bytes_read=2.0 * batch * (m * k + k * n),
        bytes_written=2.0 * batch * m * n,
    )


def stream(op_class: OpClass, bytes_read: float, bytes_written: float, *, phase: Phase = Phase.FORWARD) -> OpRow:
    return OpRow(op_class=op_class, dtype=DType.FP16, phase=phase, bytes_read=bytes_read, bytes_written=bytes_written)


def attention(
    batch: int, heads: int, kv_heads: int, sequence: int, head_dim: int, *, causal: bool = True, backward: bool = False
) -> OpRow:
    return OpRow(
        op_class=OpClass.ATTENTION,
        dtype=DType.FP16,
        phase=Phase.BACKWARD if backward else Phase.FORWARD,
        dims=(batch, heads, kv_heads, sequence, sequence, head_dim, int(causal), 0),
    )


def gpt_layer(*, hidden_size: int, heads: int, sequence: int, micro_batch: int, tensor_parallel: int) -> ExecutionGraph:
    """Kernels of one GPT layer on one rank as Megatron ran it in 2022: unfused attention, dropout; both directions."""
    h, tokens, width = hidden_size, sequence * micro_batch, 4 * hidden_size // tensor_parallel
    own_heads, head_dim = heads // tensor_parallel, hidden_size // heads
    products = [(3 * h // tensor_parallel, h), (h, h // tensor_parallel), (width, h), (h, width)]
    activation, inner = 2.0 * tokens * h, 2.0 * tokens * width
    scores = 2.0 * micro_batch * own_heads * sequence**2
    rows: list[OpRow] = []
    for n, k in products:
        rows.append(gemm(1, tokens, n, k))
        rows += [gemm(1, tokens, k, n, phase=Phase.BACKWARD), gemm(1, n, k, tokens, phase=Phase.BACKWARD)]
    batch = micro_batch * own_heads
    for n, k in ((sequence, head_dim), (head_dim, sequence)):
        rows.append(gemm(batch, sequence, n, k))
        rows += [gemm(batch, sequence, k, n, phase=Phase.BACKWARD), gemm(batch, n, k, sequence, phase=Phase.BACKWARD)]
    for phase, again in ((Phase.FORWARD, 1.0), (Phase.BACKWARD, 2.0)):
        rows.append(stream(OpClass.SOFTMAX, again * scores, scores, phase=phase))
        rows.append(stream(OpClass.ELEMENTWISE, scores, 1.5 * scores, phase=phase))  # dropout and its mask
        rows.append(stream(OpClass.ELEMENTWISE, again * inner, inner, phase=phase))  # bias and GeLU
        for _ in range(2):
            rows.append(stream(OpClass.NORM, again * activation, activation, phase=phase))
            rows.append(
                stream(OpClass.ELEMENTWISE, 2.0 * activation, 1.5 * activation, phase=phase)
            )  # bias-dropout-add
    return build_graph(rows)
