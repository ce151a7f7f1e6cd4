"""Time the compute model: distinct kernels priced a second, and its load. By hand: python -m scripts.bench_kernels.

Every kernel is of another shape, so that none is priced from its like. Loading: from an imported package to a priced
product and a priced cast, in a process of its own, files and networks read. Everything runs on one thread; seconds are
those of the processor, so that neighbours on a shared machine do not count.
"""
# ruff: noqa: E402

import argparse
import os

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
os.environ.update(dict.fromkeys(THREADS, "1"))  # before numpy: its BLAS reads them once

import platform
import statistics
import subprocess
import sys
import time

import numpy as np

from echo_explore.calibration.kernel_rows import attention_row, gemm_row, stream_row
from echo_explore.compute import RooflineModel
from echo_explore.graph import DType, OpClass, OpRow, build_graph
from echo_explore.specs import load_cluster, load_stack

LOAD = """
import time
from echo_explore.calibration.kernel_rows import gemm_row, stream_row
from echo_explore.compute import RooflineModel
from echo_explore.graph import DType, OpClass, build_graph
from echo_explore.specs import load_cluster, load_stack
device, stack = load_cluster("h100-ndr").device, load_stack("megatron-core")
rows = [gemm_row(1, 512, 512, 512, DType.BF16), stream_row(OpClass.QUANTISE, 512, 512, 1e6)]
graph = build_graph(rows)
start = time.process_time()
RooflineModel.shipped().kernel_times(graph, device, stack)
print(time.process_time() - start)
"""


def rows_of(kind: str, count: int, seed: int = 0) -> list[OpRow]:
    """`count` distinct kernels: products in 16 or 8 bits, attention, streams, or a mix of them as in a step."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 2000, (count, 3)) * 8
    if kind in ("bf16", "fp8"):
        return [gemm_row(1, int(m), int(n), int(k), DType[kind.upper()]) for m, n, k in sizes]
    if kind == "attention":
        heads, sequence, width = (sizes / 8 % 64 + 1, sizes, sizes / 8 % 3 * 64 + 64)
        made = zip(heads[:, 0], sequence[:, 1], width[:, 2], strict=True)
        return [attention_row((1, int(h), int(h), int(s), int(s), int(w), 1, 0), DType.BF16) for h, s, w in made]
    if kind == "streams":
        return [stream_row(OpClass.NORM, int(r), int(c), 4.0 * r * c) for r, c, _ in sizes]
    share = count // 10
    parts = (("bf16", 4 * share), ("attention", share), ("streams", count - 5 * share))
    return [row for part, number in parts for row in rows_of(part, number, seed)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--cluster", default="h100-ndr")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device, stack, model = load_cluster(args.cluster).device, load_stack("megatron-core"), RooflineModel.shipped()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {args.cluster}")
    for kind in ("bf16", "fp8", "attention", "streams", "mix"):
        graph = build_graph(rows_of(kind, args.count))
        seconds = []
        for _ in range(args.repeats):
            start = time.process_time()
            model.kernel_times(graph, device, stack)
            seconds.append(time.process_time() - start)
        print(f"{kind:10s} {args.count / statistics.median(seconds):12,.0f} distinct kernels a second of one core")
    loads = [
        float(subprocess.run([sys.executable, "-c", LOAD], check=True, capture_output=True, text=True).stdout)
        for _ in range(args.repeats)
    ]
    print(f"load and first price: {statistics.median(loads):.3f} s")


if __name__ == "__main__":
    main()
