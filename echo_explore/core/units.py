"""Quantities in files carry their unit; inside the package everything is SI.

`parse_quantity("400 Gbit/s", unit="bytes_per_s", field="fabric.nic_bandwidth") == 5e10`. Decimal prefixes are powers of
1,000; KiB, MiB, GiB and TiB are powers of 1,024. A bit is an eighth of a byte.
"""

import math
import re
from typing import Final

from echo_explore.core.errors import UnitError

_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _sizes() -> dict[str, float]:
    table = {f"{p}B": f for p, f in _DECIMAL.items()} | {f"{p}B": f for p, f in _BINARY.items()}
    table |= {f"{p}bit": f / 8 for p, f in _DECIMAL.items()}
    return table | {"byte": 1.0, "bytes": 1.0}


UNITS: Final[dict[str, dict[str, float]]] = {
    "bytes": _sizes(),
    "bytes_per_s": {f"{u}/s": f for u, f in _sizes().items()},
    "flop_per_s": {f"{p}FLOP/s": f for p, f in _DECIMAL.items()} | {f"{p}OP/s": f for p, f in _DECIMAL.items()},
    "flop": {f"{p}FLOP": f for p, f in _DECIMAL.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "day": 86400.0, "days": 86400.0},
    "hz": {f"{p}Hz": f for p, f in _DECIMAL.items()},
    "w": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "usd_per_h": {"USD/h": 1.0},
    "tokens": {"tokens": 1.0} | {f"{p} tokens": f for p, f in {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.items()},
}
"""Unit spellings by dimension, as factors to SI (USD per hour and tokens stay as they are)."""

SMALLEST: Final = 1e-15
LARGEST: Final = 1e30
"""No quantity that anybody builds or buys lies beyond; products and squares of those inside stay finite."""

_EXAMPLES: Final = {
    "bytes": "80 GiB", "bytes_per_s": "50 GB/s", "flop_per_s": "989 TFLOP/s", "flop": "1 PFLOP", "s": "5 us",
    "hz": "1755 MHz", "w": "700 W", "usd_per_h": "2.5 USD/h", "tokens": "300 B tokens",
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.*?)?\s*", re.ASCII)


def parse_quantity(text: object, *, unit: str, field: str) -> float:
    """The SI value of a quantity such as `"80 GiB"`.

    Args:
        text: what the file holds; anything but a string with a number and a unit is refused.
        unit: the dimension wanted, a key of `UNITS`.
        field: where it stands, for the message.

    Raises:
        UnitError: not a string, no number, no unit, an unknown unit, a unit of another dimension, a negative or
            non-finite value, or one beyond `SMALLEST` or `LARGEST`.
    """
    known = UNITS[unit]
    example = f'write for example {field.rsplit(".", 1)[-1]} = "{_EXAMPLES[unit]}"'
    if isinstance(text, bool) or not isinstance(text, str):
        raise UnitError(field, text, "a bare number has no unit, and a unit is due here", example)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UnitError(field, text, "is not a number with a unit", example)
    number, spelled = float(match[1].replace("_", "")), match[2]
    if spelled is None:
        raise UnitError(field, text, "a bare number has no unit, and a unit is due here", example)
    factor = known.get(spelled) or known.get(re.sub(r"\s*/\s*", "/", spelled))
    if factor is None:
        other = next((dim for dim, table in UNITS.items() if spelled in table), None)
        rule = f"{spelled!r} measures {other}, not {unit}" if other else f"unknown unit {spelled!r}"
        raise UnitError(field, text, rule, f"use one of {', '.join(sorted(known, key=len)[:12])}")
    value = number * factor
    if not math.isfinite(value) or value < 0:
        raise UnitError(field, text, "must be finite and not negative", example)
    if value and not SMALLEST <= value <= LARGEST:
        raise UnitError(field, text, f"must be 0, or from {SMALLEST:g} to {LARGEST:g} in SI units", example)
    return value


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` for people, in binary units: `"12.3 GiB"`."""
    size = float(num_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """`seconds` for people: `"13.75 s"`, `"4.2 ms"`, `"3 h 10 min"`."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 / 60:.0f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"
