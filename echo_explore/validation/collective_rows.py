"""Rows of a table of measured collectives: what each column may hold, by rule and by name of the column."""

import math
from collections.abc import Mapping

from echo_explore.comm.custom import FRAMEWORKS
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective, DType

REQUIRED = ("gpu", "fabric", "collective", "dtype", "num_gpus", "nodes", "size_bytes", "latency_us", "algo")
"""Columns that a table must have; proto, lib and tool may be missing."""
COLLECTIVES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
    "send_recv": Collective.SEND,
}
DTYPES = {
    "float64": DType.FP64, "double": DType.FP64, "fp64": DType.FP64, "f64": DType.FP64,
    "float32": DType.FP32, "float": DType.FP32, "fp32": DType.FP32, "f32": DType.FP32,
    "float16": DType.FP16, "half": DType.FP16, "fp16": DType.FP16, "f16": DType.FP16,
    "bfloat16": DType.BF16, "bf16": DType.BF16,
    "fp8": DType.FP8, "float8": DType.FP8, "f8e4m3": DType.FP8, "f8e5m2": DType.FP8, "fp8_e4m3": DType.FP8,
    "fp8_e5m2": DType.FP8, "float8_e4m3": DType.FP8, "float8_e5m2": DType.FP8,
    "int8": DType.INT8, "uint8": DType.INT8, "int32": DType.INT32, "uint32": DType.INT32, "int64": DType.INT64,
    "uint64": DType.INT64,
}  # fmt: skip
PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}
LIBRARIES = ("nccl", "rccl", "oneccl", *FRAMEWORKS)
"""First words of `lib`; frameworks are those whose own all-reduce a `custom` row may be of."""
TOOLS = ("nccl-tests", "rccl-tests", "xla", "kineto", "lut", "framework")
"""Words of which `tool` must hold one where it is not empty."""


def check_row(row: Mapping[str, str]) -> None:
    """Refuse what cannot be priced, before anything is.

    Raises:
        SpecError: names the column, the value and the rule.
    """
    if missing := [name for name in REQUIRED if row.get(name) is None]:
        raise SpecError("row", missing[0], "has no cell in this column", "complete the row")
    if row.get(None):  # type: ignore[call-overload]
        raise SpecError("row", "", "has more cells than the table has columns", "quote cells that hold commas")
    ranks, nodes = _whole("num_gpus", row, 2), _whole("nodes", row, 1)
    if nodes > ranks:
        raise SpecError("nodes", nodes, f"must be at most num_gpus ({ranks})", "correct the row")
    if not _number("size_bytes", row) > 0:
        raise SpecError("size_bytes", row["size_bytes"], "must be above 0", "correct the row")
    if row["latency_us"].strip() and not _number("latency_us", row) > 0:
        raise SpecError("latency_us", row["latency_us"], "must be above 0, or empty", "correct the row")
    _one_of("collective", row["collective"], COLLECTIVES)
    _one_of("dtype", row["dtype"].lower(), DTYPES)
    _one_of("proto", (row.get("proto") or "auto").lower(), ("auto", *PROTOCOLS))
    library, tool = (row.get("lib") or "").strip(), (row.get("tool") or "").strip()
    if library:
        _one_of("lib", library.lower().partition(" ")[0], LIBRARIES)
    if tool and not any(word in tool.lower() for word in TOOLS):
        raise SpecError("tool", tool, f"must name one of {', '.join(TOOLS)}", "correct the row, or leave it empty")


def check_host(row: Mapping[str, str], most_gpus: int) -> None:
    """Refuse more GPUs a node than a node, or the domain that it is part of, has.

    Raises:
        SpecError: names the row's GPUs and the most.
    """
    ranks, nodes = int(float(row["num_gpus"])), int(float(row["nodes"]))
    if -(-ranks // nodes) > most_gpus:
        rule = f"on {nodes} nodes, but nodes of {row['gpu']} have at most {most_gpus} GPUs"
        raise SpecError("num_gpus", ranks, rule, "correct the row")


def _number(name: str, row: Mapping[str, str]) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SpecError(name, row[name], "must be a number", "correct the row")
    return value


def _whole(name: str, row: Mapping[str, str], least: int) -> int:
    value = _number(name, row)
    if value < least or value != int(value):
        raise SpecError(name, row[name], f"must be a whole number of {least} or more", "correct the row")
    return int(value)


def _one_of(name: str, value: str, known: Mapping[str, object] | tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(name, value, f"must be one of {', '.join(known)}", "correct the row")
