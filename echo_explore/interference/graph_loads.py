"""What each kernel of a graph asks of a GPU, from its sizes, its bytes, its FLOP and its price."""

import numpy as np

from echo_explore.graph import DType, ExecutionGraph, OpClass, Phase
from echo_explore.interference.coefficients import InterferenceCoefficients
from echo_explore.interference.loads import Chip, Floats, KernelLoads
from echo_explore.specs import DeviceSpec

PRODUCTS = (OpClass.GEMM, OpClass.GROUPED_GEMM, OpClass.ATTENTION, OpClass.CONVOLUTION)
"""Classes whose blocks fill their SM: accumulators take the registers."""
LEAST_ARITHMETIC = 1e-3
"""Share of the peak of a product whose FLOP are not known."""
TILE_ROWS, TILE_COLUMNS = 128.0, 256.0
"""Of a block of a large product, one to an SM [CUTLASS 3.x default for 16-bit products, 2024]."""
ATTENTION_ROWS = 128.0
"""Rows of the query of a block [FlashAttention-2, arXiv 2307.08691, section 3.3, 2023]."""
MANY_BLOCKS = 1e6
"""Of a kernel that computes and has no class: taken as many waves."""
STREAM_BLOCK_BYTES = 12288.0
"""That a block of a streaming kernel moves: 256 threads x 4 elements x 4 bytes x 3 arrays [PyTorch 2.1 Loops.cuh,
2023]."""
STREAM_BLOCKS_PER_SM = 8.0
"""2,048 threads of an SM over 256 of a block [NVIDIA CUDA C programming guide, compute capabilities, 2024]."""
NORM_COLUMNS = 32.0
"""Columns of one block of the weight gradient of a norm [PyTorch 2.1 layer_norm_kernel.cu, 2023]."""
WEIGHT_GRADIENT_FRACTION = 0.6
"""Of the backward of a layer norm, the kernel of its weights: 97 of 162 us and 71 of 128 us at 768 columns on A100
[NetX-lab/Echo-slowdown merged_features.csv, 2024]."""

SHARING_BLOCKS = {"hopper": 2, "blackwell": 2}
"""Blocks of a cluster that read an operand from the L2 cache once together, by architecture; elsewhere 1 [CUTLASS 3.x
default cluster of 2 x 1 with multicast loads, 2024]."""

_RATES = {
    DType.FP32: "fp32", DType.TF32: "tf32", DType.BF16: "bf16", DType.FP16: "fp16", DType.FP8: "fp8",
    DType.MXFP8: "mxfp8", DType.NVFP4: "nvfp4",
}  # fmt: skip


_ELEMENT_BYTES = {
    DType.FP32: 4.0, DType.TF32: 4.0, DType.FP8: 1.0, DType.MXFP8: 1.0, DType.NVFP4: 0.5,
}  # fmt: skip
"""Of operands; others 2."""


def chip_of_device(device: DeviceSpec, coefficients: InterferenceCoefficients) -> Chip:
    """What of the GPU matters here."""
    return Chip(
        num_sms=device.num_sms,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        l2_bandwidth_bytes_per_s=coefficients.l2_bytes_per_s(device.architecture, device.clock_hz),
    )


def l2_bytes_per_flop(architecture: str, element_bytes: float) -> float:
    """That a large product loads from the L2 cache: an element of each side of a tile for each product of its other.

    e (1 / (c m) + 1 / n) / 2 for tiles of m x n of which c in a row share what they load.
    """
    rows = SHARING_BLOCKS.get(architecture, 1) * TILE_ROWS
    return element_bytes * (1.0 / rows + 1.0 / TILE_COLUMNS) / 2.0


def graph_loads(graph: ExecutionGraph, time_s: Floats, device: DeviceSpec, chip: Chip) -> KernelLoads:
    """Loads of every row, (num_ops,); of rows that are no kernels they mean nothing.

    Memory is bytes over time and bandwidth, arithmetic is FLOP over time and peak, both at most 1; of the L2 cache
    products want what their tiles load, attention the keys and values once for each block of queries, others what they
    want of memory.

    # Approximation: products are cut into 128 x 256 tiles, one to an SM, whatever tile the library takes (either way).

    Args:
        graph: the rows.
        time_s: (num_ops,) alone.
        device: the GPU.
        chip: the same, as `chip_of_device` has it.
    """
    took = np.where(time_s > 0, time_s, np.inf)
    num_bytes = graph.bytes_read + graph.bytes_written
    rate = np.full(max(DType) + 1, max(device.peak_flop_per_s.values()))
    for dtype, name in _RATES.items():
        rate[dtype] = device.peak_flop_per_s.get(name, rate[dtype])
    computes = (graph.op_class == OpClass.OTHER) & (graph.flop > 0)
    is_product = np.isin(graph.op_class, PRODUCTS) | computes
    stream_blocks = np.maximum(1.0, np.ceil(num_bytes / STREAM_BLOCK_BYTES))
    arithmetic = np.clip(graph.flop / (took * rate[graph.dtype]), LEAST_ARITHMETIC, 1.0)
    element = np.full(max(DType) + 1, 2.0)
    for dtype, size in _ELEMENT_BYTES.items():
        element[dtype] = size
    per_flop = element[graph.dtype] * np.where(
        graph.op_class == OpClass.ATTENTION,
        1.0 / (2.0 * ATTENTION_ROWS),
        l2_bytes_per_flop(device.architecture, element_bytes=1.0),
    )
    l2_bytes = np.where(is_product, graph.flop * per_flop, num_bytes)
    return KernelLoads(
        time_s=np.asarray(took),
        memory_fraction=np.clip(num_bytes / (took * device.memory_bandwidth_bytes_per_s), 0.0, 1.0),
        l2_fraction=np.clip(l2_bytes / (took * chip.l2_bandwidth_bytes_per_s), 0.0, 1.0),
        arithmetic_fraction=np.where(is_product, arithmetic, 0.0),
        num_blocks=np.where(is_product, _product_blocks(graph), stream_blocks),
        blocks_per_sm=np.where(is_product, 1.0, STREAM_BLOCKS_PER_SM),
        fixed_grid=np.zeros(took.shape, dtype=np.bool_),
    )


def _product_blocks(graph: ExecutionGraph) -> Floats:
    dims = graph.dims.astype(np.float64)
    first, second, third = dims[:, 0], dims[:, 1], dims[:, 2]
    tiles = np.ceil(third / TILE_COLUMNS)
    batched = first * np.ceil(second / TILE_ROWS) * tiles
    grouped = np.maximum(first, np.ceil(second / TILE_ROWS)) * tiles
    attention = first * second * np.ceil(dims[:, 3] / ATTENTION_ROWS)
    unknown = np.full(first.shape, MANY_BLOCKS)
    classes = [graph.op_class == c for c in (OpClass.ATTENTION, OpClass.GROUPED_GEMM, OpClass.OTHER)]
    return np.asarray(np.maximum(1.0, np.select(classes, [attention, grouped, unknown], batched)))


def weight_gradient_share(graph: ExecutionGraph) -> Floats:
    """(num_ops,) share of the time of each row in which so few blocks run as the weight gradient of a norm has."""
    is_norm = (graph.op_class == OpClass.NORM) & (graph.phase == Phase.BACKWARD) & (graph.dims[:, 1] > 0)
    return np.asarray(np.where(is_norm, WEIGHT_GRADIENT_FRACTION, 0.0))


def weight_gradient_loads(loads: KernelLoads, graph: ExecutionGraph) -> KernelLoads:
    """The same rows as weight gradients of norms: a block for each 32 columns, an SM to each."""
    return KernelLoads(
        time_s=loads.time_s * WEIGHT_GRADIENT_FRACTION,
        memory_fraction=np.minimum(loads.memory_fraction, 0.5),
        l2_fraction=loads.l2_fraction,
        arithmetic_fraction=np.zeros(loads.time_s.shape),
        num_blocks=np.maximum(1.0, np.ceil(graph.dims[:, 1] / NORM_COLUMNS)),
        blocks_per_sm=np.full(loads.time_s.shape, 2.0),
        fixed_grid=np.ones(loads.time_s.shape, dtype=np.bool_),
    )
