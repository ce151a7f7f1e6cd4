"""Kernels and their shapes from traces of the PyTorch profiler (Kineto, `record_shapes=True`).

A kernel is tied to the operator that launched it by its `External id`; the operator holds `Input Dims` and
`Input type`. Operators that launched several kernels count with the sum of their times. What has no class here is left
out and counted.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echo_explore.calibration.kernel_rows import MeasuredKernels, attention_row, gemm_row, stream_row
from echo_explore.core import SpecError, plain_bytes
from echo_explore.graph import DType, OpClass, OpRow

DTYPES: Mapping[str, DType] = {
    "c10::bfloat16": DType.BF16, "c10::half": DType.FP16, "float": DType.FP32, "c10::float8_e4m3fn": DType.FP8,
    "c10::float8_e5m2": DType.FP8,
}  # fmt: skip
"""Names of data types in traces."""
STREAMS: Mapping[str, tuple[OpClass, float, bool]] = {
    # operator: class, arrays of the size of its first input that it moves, backward
    "aten::native_layer_norm": (OpClass.NORM, 2, False), "aten::_fused_rms_norm": (OpClass.NORM, 2, False),
    "aten::native_layer_norm_backward": (OpClass.NORM, 3, True), "aten::_softmax": (OpClass.SOFTMAX, 2, False),
    "aten::_softmax_backward_data": (OpClass.SOFTMAX, 3, True), "aten::gelu": (OpClass.ELEMENTWISE, 2, False),
    "aten::silu": (OpClass.ELEMENTWISE, 2, False), "aten::gelu_backward": (OpClass.ELEMENTWISE, 3, True),
    "aten::silu_backward": (OpClass.ELEMENTWISE, 3, True), "aten::copy_": (OpClass.COPY, 2, False),
    "aten::fill_": (OpClass.COPY, 1, False), "aten::zero_": (OpClass.COPY, 1, False),
}  # fmt: skip
PAIRS = ("aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::sub", "aten::div", "aten::div_")
"""Elementwise operators whose second input counts where it has the size of the first."""
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_mm")
ATTENTION: Mapping[str, bool] = {
    "aten::_flash_attention_forward": False, "aten::_scaled_dot_product_flash_attention": False,
    "aten::_scaled_dot_product_cudnn_attention": False, "aten::_flash_attention_backward": True,
    "aten::_scaled_dot_product_flash_attention_backward": True,
    "aten::_scaled_dot_product_cudnn_attention_backward": True,
    "flash_attn::_flash_attn_forward": False, "flash_attn::_flash_attn_backward": True,
}  # fmt: skip
"""Operator: whether it is a backward. Inputs are query, key, value of [batch, heads, sequence, head_dim] except for
`_flash_attention_forward` and those of flash-attn, which have [batch, sequence, heads, head_dim]."""
FLASH_CAUSAL: Mapping[str, int] = {"flash_attn::_flash_attn_forward": 5, "flash_attn::_flash_attn_backward": 11}
"""Place of `causal` among the arguments of flash-attn's operators, the keys to the left that a query sees one after it:
flash-attn 2.7 (2024) flash_attn_interface.py. Other operators have no other true argument than `is_causal`."""


def read_profiler_trace(path: Path) -> MeasuredKernels:
    """The kernels of a trace that have a class, as measured inside a step (sustained clocks).

    Raises:
        SpecError: no trace, no kernels in it, or none of a known class.
    """
    events = read_events(path).events
    operators = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and external_id(e) is not None}
    times: dict[Any, float] = defaultdict(float)
    kernels = [e for e in events if str(e.get("cat", "")).lower() == "kernel"]
    if not kernels:
        raise SpecError(
            f"{path.name}: traceEvents", 0, "holds no GPU kernels",
            "profile with ProfilerActivity.CUDA on a GPU",
        )  # fmt: skip
    ignored: dict[str, int] = defaultdict(int)
    for event in kernels:
        duration = event.get("dur")
        if isinstance(duration, bool) or not isinstance(duration, int | float) or not duration > 0:
            ignored["kernels without a duration above 0"] += 1
        elif external_id(event) not in operators:
            ignored["kernels without an operator"] += 1
        else:
            times[external_id(event)] += float(duration)
    rows, seconds = [], []
    for key, microseconds in times.items():
        row = operator_row_or_none(operators[key])
        if row is None:
            ignored["operators of no class, or whose shapes are missing or don't fit together"] += 1
            continue
        rows.append(row)
        seconds.append(microseconds * 1e-6)
    if ignored["kernels without a duration above 0"] == len(kernels):
        raise SpecError(
            f"{path.name}: dur", kernels[0].get("dur"), "must be microseconds above 0, and no kernel has such a one",
            "export the trace of a run on a GPU again",
        )  # fmt: skip
    if not rows:
        raise SpecError(
            f"{path.name}: traceEvents", len(kernels), "no kernel belongs to an operator with known shapes",
            "profile with record_shapes=True",
        )  # fmt: skip
    return MeasuredKernels(
        rows=tuple(rows),
        time_s=np.array(seconds),
        measured="sustained",
        source=path.name,
        num_ignored={reason: n for reason, n in ignored.items() if n},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvents:
    """What a trace holds.

    Attributes:
        events: its events.
        gpu_names: of the devices, by their number.
    """

    events: list[dict[str, Any]]
    gpu_names: Mapping[int, str]

    def gpu_name(self, device: int) -> str:
        """Of a device; empty where the trace does not say."""
        return self.gpu_names.get(device, "")


def read_events(path: Path) -> TraceEvents:
    """The events of a JSON trace, gzipped or not.

    Raises:
        SpecError: the file cannot be read, or is no such trace.
    """
    try:
        data = path.read_bytes()
        trace = json.loads(plain_bytes(data))
    except FileNotFoundError:
        raise SpecError("file", str(path), "does not exist", "check the path") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError("file", str(path), f"is no JSON trace: {error}", "export it with export_chrome_trace") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise SpecError(
            f"{path.name}: traceEvents", "(missing)", "must be a list", "export it with export_chrome_trace"
        )
    devices = trace.get("deviceProperties") if isinstance(trace, dict) else None
    names = {
        int(device["id"]): str(device.get("name", ""))
        for device in (devices if isinstance(devices, list) else ())
        if isinstance(device, dict) and isinstance(device.get("id"), int)
    }
    found = [event for event in events if isinstance(event, dict)]
    for number, event in enumerate(found):
        _check_event(path, number, event)
    return TraceEvents(events=found, gpu_names=names)


_PLAIN = ("ph", "cat", "name", "pid", "tid", "id")
_PLAIN_ARGUMENTS = ("External id", "correlation", "stream", "wait_on_stream", "wait_on_cuda_event_record_corr_id")


def _check_event(path: Path, number: int, event: Mapping[str, Any]) -> None:
    """Raise for what no profiler writes: names that are lists, times that are no moments.

    Raises:
        SpecError: with the place of the event and its field.
    """
    arguments = event.get("args")
    fields = [(name, event.get(name)) for name in _PLAIN]
    if isinstance(arguments, dict):
        fields += [(f"args.{name}", arguments.get(name)) for name in _PLAIN_ARGUMENTS]
    wrong: list[tuple[str, Any, str]] = [
        (name, value, "must be text or a number") for name, value in fields if isinstance(value, list | dict)
    ]
    if arguments is not None and not isinstance(arguments, dict):
        wrong.append(("args", arguments, "must be a table"))
    for name, least in (("ts", -math.inf), ("dur", 0.0)):
        value = event.get(name)
        # An int beyond the largest float is no moment either.
        if isinstance(value, int | float) and not (least <= value and abs(value) < _NO_MOMENT_US):
            wrong.append((name, value, "must be microseconds, finite" + (" and not negative" * (name == "dur"))))
    if wrong:
        name, value, rule = wrong[0]
        shown = f"{value}"[:40]
        raise SpecError(f"{path.name}: traceEvents[{number}].{name}", shown, rule, "export the trace again")


_NO_MOMENT_US = 1e18
"""Microseconds; Kineto counts them from 1970 at most, 1.8e15 in 2026."""
_LARGEST_WORK = 2.0**62
"""No kernel has more elements, FLOP or bytes."""


def external_id(event: Mapping[str, Any]) -> Any:
    """What ties a kernel to the operator that launched it; None without one."""
    arguments = event.get("args")
    return arguments.get("External id") if isinstance(arguments, dict) else None


def operator_row_or_none(operator: Mapping[str, Any]) -> OpRow | None:
    """As `operator_row`, and None for an operator whose arguments are missing, of other types, or too large."""
    try:
        row = operator_row(operator)
    except (ValueError, IndexError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return None if row is None or max(*row.dims, row.flop, row.bytes_read) > _LARGEST_WORK else row


def operator_row(operator: Mapping[str, Any]) -> OpRow | None:
    """The graph row of an operator of a trace; None where no class describes it."""
    name, arguments = str(operator.get("name")), operator["args"]
    dims: Sequence[Any] = arguments.get("Input Dims") or ()
    types: Sequence[str] = arguments.get("Input type") or ()
    if name in PRODUCTS:
        first = 1 if name in ("aten::addmm", "aten::baddbmm") else 0
        dtype = DTYPES.get(types[first].lower())
        a, b = dims[first], dims[first + 1]
        if dtype is None or len(a) not in (2, 3) or len(a) != len(b):
            return None
        batch = int(a[0]) if len(a) == 3 else 1
        if min(*a, *b) < 1 or a[-1] != b[-2] or a[:-2] != b[:-2]:
            return None  # shapes of no product
        return gemm_row(batch, int(a[-2]), int(b[-1]), int(a[-1]), dtype)
    if name in ATTENTION:
        return _attention(name, dims, types, arguments.get("Concrete Inputs") or ())
    dtype = DTYPES.get(types[0].lower()) if types else None
    if dtype is None or not dims or not dims[0]:
        return None
    width = {DType.BF16: 2.0, DType.FP16: 2.0, DType.FP32: 4.0}.get(dtype, 1.0)
    if min(dims[0]) < 1:
        return None
    columns = int(dims[0][-1])
    rows = int(np.prod(dims[0][:-1]))
    if name in STREAMS:
        op_class, arrays, backward = STREAMS[name]
        return stream_row(op_class, rows, columns, arrays * width * rows * columns, backward=backward)
    if name in PAIRS:
        second = len(dims) > 1 and list(dims[1]) == list(dims[0])
        return stream_row(OpClass.ELEMENTWISE, rows, columns, (3.0 if second else 2.0) * width * rows * columns)
    return None


def _attention(name: str, dims: Sequence[Any], types: Sequence[str], concrete: Sequence[str]) -> OpRow | None:
    backward = ATTENTION[name]
    first = 1 if backward else 0  # a backward starts with the gradient of the output
    dtype = DTYPES.get(types[first].lower())
    query, key = dims[first], dims[first + 1]
    if dtype is None or len(query) != 4:
        return None
    sequence_first = name in FLASH_CAUSAL or ("_flash_attention_" in name and "scaled" not in name)
    order = (0, 2, 1, 3) if sequence_first else (0, 1, 2, 3)
    batch, heads, seq_q, head_dim = (int(query[i]) for i in order)
    kv_heads, seq_k = int(key[order[1]]), int(key[order[2]])
    if min(*query, *key) < 1 or heads % kv_heads or int(key[order[3]]) != head_dim:
        return None  # shapes of no attention
    window = 0
    if name in FLASH_CAUSAL:
        place = FLASH_CAUSAL[name]
        causal, window = int(concrete[place] == "True"), max(0, int(concrete[place + 1]) + 1)
    else:
        causal = int(any(str(value) == "True" for value in concrete))
    return attention_row((batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, window), dtype, backward=backward)
