"""Quantities with units, and how numbers are shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import UnitError, format_bytes, format_seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("400 Gbit/s", "bytes_per_s", 5e10),
        ("400Gbit/s", "bytes_per_s", 5e10),
        (" 50  GB / s ", "bytes_per_s", 5e10),
        ("80 GiB", "bytes", 80 * 2**30),
        ("80 GB", "bytes", 8e10),
        ("1_000 kB", "bytes", 1e6),
        ("989.4 TFLOP/s", "flop_per_s", 989.4e12),
        ("5 us", "s", 5e-6),
        ("1.83e3 MHz", "hz", 1.83e9),
        ("700 W", "w", 700.0),
        (".5 ms", "s", 5e-4),
        ("2.5 USD/h", "usd_per_h", 2.5),
        ("15 T tokens", "tokens", 15e12),
    ],
)
def test_parse(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit=unit, field="x") == pytest.approx(value)


@pytest.mark.parametrize(
    "text", [None, True, 5, 5.0, [], "", "GB", "5", "5 gb", "five GB", "5 GB/s", "inf GB", "-5 GB", "5 GB GB"]
)
def test_refuse(text: object) -> None:
    with pytest.raises(
        UnitError, match=r"device\.memory = .*; fix: (write for example memory = \"80 GiB\"|use one of B, )"
    ):
        parse_quantity(text, unit="bytes", field="device.memory")


@given(st.text(max_size=20))
def test_any_text_is_a_quantity_or_a_unit_error(text: str) -> None:
    try:
        value = parse_quantity(text, unit="bytes", field="x")
    except UnitError:
        return
    assert value >= 0


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (2**30, "1.0 GiB"), (80 * 2**40, "80.0 TiB")])
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4e-6, "4.0 us"), (4.2e-3, "4.2 ms"), (13.75, "13.75 s"), (11400, "3 h 10 min")]
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
