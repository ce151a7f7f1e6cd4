"""A short suite of kernels on the user's own GPU, timed with CUDA events; the only module here that imports torch.

The same code runs on the CPU, with its own clock, so that it can be tested where there is no GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from echo_explore.calibration.kernel_rows import MeasuredKernels, attention_row, gemm_row, stream_row
from echo_explore.core import MissingExtra, SpecError
from echo_explore.graph import DType, OpClass, OpRow

try:
    import torch
except ImportError as error:
    raise MissingExtra("calibrate kernels --profile", "trace") from error

TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What is timed.

    Attributes:
        dtypes: of products and attention.
        products: batch, m, n, k.
        attention: batch, heads, kv_heads, sequence, head_dim; causal, forward.
        streams: rows, columns of elementwise, norm, softmax and copy kernels in the first data type.
        repeats: timed runs of each kernel; the median counts.
        warm_up: runs before.
    """

    dtypes: tuple[DType, ...] = (DType.BF16,)
    products: tuple[tuple[int, int, int, int], ...] = tuple(
        (1, m, n, k)
        for m in (512, 2048, 8192)
        for n, k in ((1024, 4096), (4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096), (8192, 1024))
    )
    attention: tuple[tuple[int, int, int, int, int], ...] = (
        (1, 32, 8, 2048, 128), (1, 32, 8, 8192, 128), (4, 16, 16, 2048, 64), (2, 8, 1, 4096, 128),
        (1, 8, 8, 16384, 128), (8, 12, 12, 1024, 64),
    )  # fmt: skip
    streams: tuple[tuple[int, int], ...] = (
        (2048, 4096), (8192, 4096), (8192, 8192), (4096, 14336), (16384, 8192), (2048, 12288),
    )  # fmt: skip
    repeats: int = 15
    warm_up: int = 5


SMALL_SUITE = Suite(
    dtypes=(DType.FP32,),
    products=((1, 64, 64, 64), (1, 128, 64, 64), (1, 64, 128, 64), (1, 64, 64, 128), (2, 64, 64, 64)),
    attention=((1, 2, 1, 64, 32),) * 5,
    streams=((64, 64), (128, 64), (64, 128), (128, 128), (32, 64)),
    repeats=9,
    warm_up=1,
)
"""A suite of a moment, for a CPU."""


def profile_kernels(device: str = "cuda", suite: Suite | None = None) -> MeasuredKernels:
    """Time the suite on a torch device.

    Args:
        device: `cuda`, `cuda:1`, `cpu`.
        suite: default: the full one, on a CPU a small one.

    Raises:
        SpecError: the device does not exist.
    """
    try:
        place = torch.device(device)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError) as error:
        rule = f"cannot be used: {str(error).splitlines()[0][:100]}"
        raise SpecError("torch-device", device, rule, "run it on a machine with a GPU, or give cpu") from error
    suite = suite or (SMALL_SUITE if place.type == "cpu" else Suite())
    timer = _cuda_seconds if place.type == "cuda" else _host_seconds
    flush = torch.empty(64 * 2**20 if place.type == "cuda" else 1, dtype=torch.int32, device=place)
    rows, seconds = [], []
    ignored: dict[str, int] = {}
    with torch.inference_mode(), _one_thread(place):
        for row, make in _work(suite, place):
            try:
                run = make()
                seconds.append(_median(run, timer, flush, suite))
                rows.append(row)
            except RuntimeError:  # out of memory, or a data type that this device does not compute in
                reason = f"kernels of {row.op_class.name.lower()} that the device refused"
                ignored[reason] = ignored.get(reason, 0) + 1
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    return MeasuredKernels(
        rows=tuple(rows), time_s=np.array(seconds), measured="isolated",
        source=f"profile of {name}, torch {torch.__version__}", num_ignored=ignored,
    )  # fmt: skip


@contextmanager
def _one_thread(place: "torch.device") -> Iterator[None]:
    """On a CPU kernels run on one thread: threads that wait for each other beside other work take milliseconds."""
    before = torch.get_num_threads()
    if place.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Run = Callable[[], object]


def _work(suite: Suite, place: "torch.device") -> list[tuple[OpRow, Callable[[], Run]]]:
    """Every kernel of the suite: its graph row, and what makes its inputs and gives back what to time."""
    work: list[tuple[OpRow, Callable[[], Run]]] = []
    for dtype in suite.dtypes:
        kind = TORCH_DTYPES[dtype]
        work += [(gemm_row(*shape, dtype), partial(_product, shape, kind, place)) for shape in suite.products]
        for batch, heads, kv_heads, sequence, width in suite.attention:
            dims = (batch, heads, kv_heads, sequence, sequence, width, 1, 0)
            work.append((attention_row(dims, dtype), partial(_attention, dims, kind, place)))
    kind, element = TORCH_DTYPES[suite.dtypes[0]], float(TORCH_DTYPES[suite.dtypes[0]].itemsize)
    for rows, columns in suite.streams:
        for op_class, arrays, function in _STREAMS:
            row = stream_row(op_class, rows, columns, arrays * element * rows * columns)
            work.append((row, partial(_stream, rows, columns, kind, place, function)))
    return work


_STREAMS: Sequence[tuple[OpClass, float, Callable[["torch.Tensor"], object]]] = (
    (OpClass.ELEMENTWISE, 2.0, torch.neg),
    (OpClass.NORM, 2.0, lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])),
    (OpClass.SOFTMAX, 2.0, lambda x: torch.softmax(x, dim=-1)),
    (OpClass.COPY, 2.0, torch.clone),
)


def _product(shape: tuple[int, int, int, int], dtype: "torch.dtype", place: "torch.device") -> Run:
    batch, m, n, k = shape
    a = torch.randn((batch, m, k), device=place, dtype=dtype)
    b = torch.randn((batch, n, k), device=place, dtype=dtype).transpose(1, 2)
    return (lambda: torch.mm(a[0], b[0])) if batch == 1 else (lambda: torch.bmm(a, b))


def _attention(dims: tuple[int, ...], dtype: "torch.dtype", place: "torch.device") -> Run:
    batch, heads, kv_heads, sequence, _, width, _, _ = dims
    query = torch.randn((batch, heads, sequence, width), device=place, dtype=dtype)
    key, value = (torch.randn((batch, kv_heads, sequence, width), device=place, dtype=dtype) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)


def _stream(
    rows: int, columns: int, dtype: "torch.dtype", place: "torch.device", function: Callable[["torch.Tensor"], object]
) -> Run:
    x = torch.randn((rows, columns), device=place, dtype=dtype)
    return lambda: function(x)


def _median(run: Run, timer: Callable[[Run], float], flush: "torch.Tensor", suite: Suite) -> float:
    """Seconds of the middle run; the L2 cache is overwritten before each, as other kernels of a step would."""
    for _ in range(suite.warm_up):
        run()
    times = []
    for _ in range(suite.repeats):
        flush.zero_()
        times.append(timer(run))
    return statistics.median(times)


def _cuda_seconds(run: Run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _host_seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return max(time.perf_counter() - start, 1e-9)
