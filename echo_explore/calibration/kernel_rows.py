"""Measured kernels as rows of a graph, so that the compute model prices exactly what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.compute.chip import chip_names
from echo_explore.compute.corrections import Clock
from echo_explore.compute.kernel_table import KernelTable
from echo_explore.compute.table_times import TENSORS
from echo_explore.compute.tables import attention_table_columns, element_bytes_of, op_class_of, precision_of
from echo_explore.core import SpecError
from echo_explore.graph import DTYPE_BYTES, DType, OpClass, OpRow, Phase
from echo_explore.specs import DeviceSpec

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredKernels:
    """Kernels and their times.

    Attributes:
        rows: one a measurement.
        time_s: (num_rows,).
        measured: alone at high clocks, or inside training steps.
        source: where they come from.
        num_ignored: measurements that are of no use here, by reason.
    """

    rows: tuple[OpRow, ...]
    time_s: Floats
    measured: Clock
    source: str
    num_ignored: dict[str, int]


def gemm_row(batch: int, m: int, n: int, k: int, dtype: DType) -> OpRow:
    """A batched product that moves its least bytes; the output has at least 2 bytes an element."""
    element = DTYPE_BYTES[dtype]
    return OpRow(
        op_class=OpClass.GEMM,
        dtype=dtype,
        dims=(batch, m, n, k),
        flop=2.0 * batch * m * n * k,
        bytes_read=element * batch * (m * k + k * n),
        bytes_written=max(element, 2.0) * batch * m * n,
    )


def attention_row(dims: Sequence[int], dtype: DType, *, backward: bool = False) -> OpRow:
    """Fused attention of dims batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, window."""
    return OpRow(
        op_class=OpClass.ATTENTION,
        dtype=dtype,
        phase=Phase.BACKWARD if backward else Phase.FORWARD,
        dims=tuple(dims),
    )


def stream_row(op_class: OpClass, rows: int, columns: int, num_bytes: float, *, backward: bool = False) -> OpRow:
    """A kernel that moves bytes; two thirds of them are taken as read."""
    return OpRow(
        op_class=op_class,
        phase=Phase.BACKWARD if backward else Phase.FORWARD,
        dims=(rows, columns),
        bytes_read=num_bytes * 2.0 / 3.0,
        bytes_written=num_bytes / 3.0,
    )


def measured_table(table: KernelTable, device: DeviceSpec) -> MeasuredKernels:
    """The rows of a table that are of `device`.

    Raises:
        SpecError: a time is not above 0, no row is of the device, or a cell is not what it must be.
    """
    latency = table.latency_us()
    if not (latency > 0).all():
        row = int(np.flatnonzero(latency <= 0)[0])
        where = f"{table.name}: row {row + 2}: latency_us"
        raise SpecError(
            where, table.columns["latency_us"][row], "must be above 0", "leave the row out or measure again"
        )
    own = [_is_device(name, device) for name in table.text("gpu")]
    if not any(own):
        raise SpecError(f"{table.name}: gpu", ", ".join(sorted(set(table.text("gpu"))))[:80],
                        f"no row is of {device.name}", "give the table of that GPU or another --cluster")  # fmt: skip
    maker = {"gemm": _gemm_rows, "attention": _attention_rows, "elementwise": _stream_rows}[table.kind]
    both = [cell.strip() == "fwd+bwd" for cell in table.text("pass")]
    made = zip(maker(table), latency, own, both, strict=True)
    rows = [(row, float(time)) for row, time, mine, two in made if mine and not two]
    if not rows:
        raise SpecError(
            f"{table.name}: pass", "fwd+bwd", "holds two kernels in one time", "time forward and backward apart"
        )
    left_out = (
        ("of another GPU", own.count(False)),
        ("of two passes in one time", sum(map(all, zip(own, both, strict=True)))),
    )
    return MeasuredKernels(
        rows=tuple(row for row, _ in rows),
        time_s=np.array([time for _, time in rows]) * 1e-6,
        measured="isolated",
        source=table.name,
        num_ignored={reason: count for reason, count in left_out if count},
    )


def _is_device(name: str, device: DeviceSpec) -> bool:
    word = name.strip().lower()
    return word in (device.name.lower(), device.calibration.lower()) or chip_names().get(word) == device.calibration


def _dtype(text: str) -> DType:
    return DType[precision_of(text).upper()]


def _gemm_rows(table: KernelTable) -> list[OpRow]:
    shapes = np.column_stack([table.numbers(name) for name in ("batch", "m", "n", "k")]).astype(np.int64).tolist()
    words = zip(shapes, table.text("dtype"), strict=True)
    return [gemm_row(batch, m, n, k, _dtype(dtype)) for (batch, m, n, k), dtype in words]


def _attention_rows(table: KernelTable) -> list[OpRow]:
    table.check_heads()
    names = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal", "kernel", "pass")
    columns = attention_table_columns({name: table.text(name) for name in names})
    order = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal", "window")
    dims = np.column_stack([columns[name] for name in order]).astype(np.int64).tolist()
    words = zip(dims, table.text("dtype"), table.text("pass"), strict=True)
    return [attention_row(d, _dtype(dtype), backward=direction == "bwd") for d, dtype, direction in words]


def _stream_rows(table: KernelTable) -> list[OpRow]:
    made = []
    words = zip(
        table.text("op"), table.text("dtype"), table.text("pass"), table.bytes_or_zero().tolist(),
        table.numbers("rows").astype(np.int64).tolist(), table.numbers("cols").astype(np.int64).tolist(),
        strict=True,
    )  # fmt: skip
    for number, (op, dtype, direction, stated, rows, columns) in enumerate(words, start=2):
        op_class = op_class_of(op)
        if op_class is None:
            raise SpecError(
                f"{table.name}: row {number}: op", op, "is no operation that the model knows",
                "use a name of docs/compute_model.md, or leave the row out",
            )  # fmt: skip
        backward = direction == "bwd"
        width = element_bytes_of(precision_of(dtype.partition("->")[0]))
        num_bytes = stated or (TENSORS.get(op.strip().lower(), 2.0) + backward) * width * rows * columns
        made.append(stream_row(OpClass[op_class.upper()], rows, columns, num_bytes, backward=backward))
    return made
