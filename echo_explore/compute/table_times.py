"""Predicted times of the rows of a table of kernels: the isolated kernel, as such tables measure it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from echo_explore.compute.attention_features import attention_work
from echo_explore.compute.chip import Chip, card_of, named_chip
from echo_explore.compute.coefficients import Calibration
from echo_explore.compute.gemm_features import gemm_bytes
from echo_explore.compute.kernel_table import PASSES, KernelTable, Kind
from echo_explore.compute.learned import (
    MEASURED_BACKWARD,
    Learned,
    learned_attention,
    learned_gemm,
    learned_stream,
)
from echo_explore.compute.pricing import FALLBACK_SIGMA_LOG, LARGEST_EXTENT, OTHER_RATE_FRACTION
from echo_explore.compute.tables import (
    attention_table_columns,
    element_bytes_of,
    normal_kernel,
    normal_kv,
    normal_source,
    op_class_of,
    precision_of,
)
from echo_explore.core import MissingCalibration, SpecError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
TENSORS: Mapping[str, float] = {
    "add": 3, "sub": 3, "mul": 3, "div": 3, "pow": 3, "mlp_act": 3, "fp8_quant_scale_matrix": 1.5,
    "fp8_quant_computescale": 1.5,
}  # fmt: skip
"""Arrays that an operation reads and writes, where a table has no approx_bytes; 2 for any other, 3 for a backward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableTimes:
    """Predictions beside a table.

    Attributes:
        predicted_s: (num_rows,) NaN where declined.
        sigma_log: (num_rows,) NaN where declined.
        reason: by row why it was declined.
        num_fallbacks: rows priced by the roofline alone.
    """

    predicted_s: Floats
    sigma_log: Floats
    reason: Mapping[int, str]
    num_fallbacks: int


def table_times(
    table: KernelTable,
    calibration: Calibration,
    *,
    chips: Mapping[str, Chip] | None = None,
    allow_fallback: bool = False,
) -> TableTimes:
    """Predict every row; what has no model is declined with its reason.

    Args:
        table: as read.
        calibration: gives ratios of backward to forward, and the user's corrections.
        chips: GPUs that the catalogue does not have, or has differently, by the name in the table.
        allow_fallback: price rows without a model by the roofline.

    Raises:
        SpecError: a cell is not what it must be.
    """
    predicted = np.full(table.num_rows, np.nan)
    sigma = np.full(table.num_rows, np.nan)
    reasons: dict[int, str] = {}
    num_fallbacks = 0
    price = _KINDS[table.kind](table)
    largest = np.max(price.extents, axis=1)
    for words, rows in price.groups.items():
        for index in _split(np.array(rows, dtype=np.intp), largest > LARGEST_EXTENT):
            try:
                chip = (chips or {}).get(words[0]) or named_chip(card_of(words[0], normal_source(words[2])))
                precision_of(words[1].partition("->")[0])  # without its width not even the bytes are known
                try:
                    _check_domain(float(largest[index[0]]))
                    found = price.learned(chip, words, index, calibration)
                    found_s = _corrected(found.time_s, calibration, chip, words, price.op_class(words))
                except MissingCalibration:
                    if not allow_fallback:
                        raise
                    found, num_fallbacks = price.roofline(chip, index), num_fallbacks + index.size
                    found_s = found.time_s
            except MissingCalibration as error:
                reasons.update(dict.fromkeys(index.tolist(), str(error)))
                continue
            predicted[index], sigma[index] = found_s, found.sigma_log
    return TableTimes(predicted_s=predicted, sigma_log=sigma, reason=reasons, num_fallbacks=num_fallbacks)


def _split(index: Ints, beyond: npt.NDArray[np.bool_]) -> list[Ints]:
    """The rows within the domain and those beyond it, without empty parts."""
    return [part for part in (index[~beyond[index]], index[beyond[index]]) if part.size]


def _check_domain(largest: float) -> None:
    if largest > LARGEST_EXTENT:
        raise MissingCalibration(
            f"size = {largest:.0f}: is beyond {LARGEST_EXTENT}, the largest that the model prices; fix: correct it, or "
            "give --allow-fallback to price it by the roofline"
        )


def _corrected(time_s: Floats, calibration: Calibration, chip: Chip, words: tuple[str, ...], op_class: str) -> Floats:
    matrix = op_class in ("gemm", "attention")
    for wanted in (precision_of(words[1]) if matrix else "any", "any"):
        for c in calibration.corrections:
            named = c.device in (chip.key, words[0].lower())
            if named and (c.op_class, c.dtype, c.measured) == (op_class, wanted, "isolated"):
                return c.applied(time_s)
    return time_s


def _grouped(*columns: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row, words in enumerate(zip(*columns, strict=True)):
        groups[words].append(row)
    return dict(groups)


class _Rows(Protocol):
    """Rows of one kind: groups that share their words (gpu, dtype and source first), and how to price a group."""

    @property
    def extents(self) -> Floats:
        """(num_rows, num_sizes) that must lie in the domain."""

    @property
    def groups(self) -> Mapping[tuple[str, ...], list[int]]:
        """Rows by their words."""

    def op_class(self, words: tuple[str, ...]) -> str:
        """Op class of a group, in lower case."""

    def learned(self, chip: Chip, words: tuple[str, ...], index: Ints, calibration: Calibration) -> Learned:
        """Times of the rows `index`."""

    def roofline(self, chip: Chip, index: Ints) -> Learned:
        """Times of the rows `index` without a model."""


def _roofline(chip: Chip, flop: Floats, moved: Floats) -> Learned:
    peak = chip.peak_flop_per_s.get("bf16") or max(chip.peak_flop_per_s.values())
    time = np.maximum(flop / peak, moved / chip.bandwidth_bytes_per_s) / OTHER_RATE_FRACTION
    return Learned(time_s=time, sigma_log=FALLBACK_SIGMA_LOG, generic=True)


class _Gemm:
    def __init__(self, table: KernelTable) -> None:
        self.shape = np.column_stack([table.numbers(name) for name in ("batch", "m", "n", "k")])
        self.extents = self.shape
        self.groups = _grouped(table.text("gpu"), table.text("dtype"), table.text("source"))

    def op_class(self, words: tuple[str, ...]) -> str:
        """See `_Rows`."""
        return "gemm"

    def learned(self, chip: Chip, words: tuple[str, ...], index: Ints, calibration: Calibration) -> Learned:
        """See `_Rows`."""
        return learned_gemm(self.shape[index], chip, precision_of(words[1]), source=normal_source(words[2]))

    def roofline(self, chip: Chip, index: Ints) -> Learned:
        """See `_Rows`."""
        shape = self.shape[index]
        return _roofline(chip, 2.0 * np.prod(shape, axis=1), gemm_bytes(shape, 2.0))


class _Attention:
    def __init__(self, table: KernelTable) -> None:
        sizes = ("batch", "heads", "kv_heads", "seq_q", "seq_k")
        self.extents = np.column_stack([table.numbers(column) for column in sizes])
        table.check_heads()
        for name, allowed in (("pass", PASSES), ("causal", ("0", "1"))):
            for row, cell in enumerate(table.text(name)):
                if cell.strip() not in allowed:
                    raise SpecError(
                        f"{table.name}: row {row + 2}: {name}", cell, f"must be {' or '.join(allowed)}", "correct it"
                    )
        names = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal", "kernel", "pass")
        self.columns = attention_table_columns({name: table.text(name) for name in names})
        words = [table.text(name) for name in ("gpu", "dtype", "source", "kv_dtype", "kernel", "pass")]
        self.groups = _grouped(*words)

    def op_class(self, words: tuple[str, ...]) -> str:
        """See `_Rows`."""
        return "attention"

    def _part(self, index: Ints, *, backward: bool) -> dict[str, Floats]:
        part = {name: values[index] for name, values in self.columns.items()}
        return part | {"backward": np.full(index.size, float(backward))}

    def learned(self, chip: Chip, words: tuple[str, ...], index: Ints, calibration: Calibration) -> Learned:
        """See `_Rows`; forward, backward or both."""
        _, dtype, source, kv_dtype, kernel, passes = words
        precision = precision_of(dtype), precision_of(normal_kv(dtype, kv_dtype))

        def price(*, backward: bool) -> Learned:
            return learned_attention(
                self._part(index, backward=backward), chip, *precision,
                kernel=normal_kernel(kernel), source=normal_source(source),
            )  # fmt: skip

        forward = price(backward=False)
        if passes == "fwd":
            return forward
        if normal_kernel(kernel) == MEASURED_BACKWARD and not forward.generic:
            backward = price(backward=True)
        else:
            known = calibration.devices.get(chip.key, calibration.generic).attention
            c = known.get("bf16") or calibration.generic.attention["bf16"]
            backward = Learned(
                time_s=c.backward_ratio * forward.time_s, sigma_log=c.backward_sigma_log, generic=forward.generic
            )
        both = forward.time_s if passes == "fwd+bwd" else 0.0
        return Learned(time_s=backward.time_s + both, sigma_log=backward.sigma_log, generic=backward.generic)

    def roofline(self, chip: Chip, index: Ints) -> Learned:
        """See `_Rows`."""
        return _roofline(chip, *attention_work({n: v[index] for n, v in self.columns.items()}, 2.0, 2.0))


class _Stream:
    def __init__(self, table: KernelTable) -> None:
        self.rows, self.columns = table.numbers("rows"), table.numbers("cols")
        self.extents = np.column_stack([self.rows, self.columns])
        self.backward = np.array([cell.strip() == "bwd" for cell in table.text("pass")], dtype=np.float64)
        self.num_bytes = self._bytes(table)
        self.groups = _grouped(*(table.text(name) for name in ("gpu", "dtype", "source", "op", "kernel")))

    def _bytes(self, table: KernelTable) -> Floats:
        known = table.bytes_or_zero()
        arrays = np.array([TENSORS.get(op.strip().lower(), 2.0) for op in table.text("op")]) + self.backward
        widths = np.array([self._width(dtype) for dtype in table.text("dtype")])
        return np.where(known > 0, known, arrays * widths * self.rows * self.columns)

    @staticmethod
    def _width(dtype: str) -> float:
        try:
            return element_bytes_of(precision_of(dtype.partition("->")[0]))
        except MissingCalibration:
            return np.nan  # its rows are declined

    def op_class(self, words: tuple[str, ...]) -> str:
        """See `_Rows`."""
        found = op_class_of(words[3])
        if found is None:
            raise MissingCalibration(
                f"op = {words[3]!r}: is no operation that the model knows; fix: use one of docs/compute_model.md, or "
                "give --allow-fallback to price it by the roofline"
            )
        return found

    def learned(self, chip: Chip, words: tuple[str, ...], index: Ints, calibration: Calibration) -> Learned:
        """See `_Rows`."""
        self.op_class(words)
        return learned_stream(
            self.rows[index], self.columns[index], self.num_bytes[index], self.backward[index], chip,
            op=words[3], kernel=words[4],
        )  # fmt: skip

    def roofline(self, chip: Chip, index: Ints) -> Learned:
        """See `_Rows`."""
        return _roofline(chip, np.zeros(index.size), self.num_bytes[index])


_KINDS: Mapping[Kind, Callable[[KernelTable], _Rows]] = {
    "gemm": _Gemm, "attention": _Attention, "elementwise": _Stream,
}  # fmt: skip
