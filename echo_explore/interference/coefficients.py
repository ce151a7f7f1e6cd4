"""Constants of the physical interference model: the calibration file `interference.toml`, checked.

The file is written by scripts/fit_interference.py; docs/interference.md explains its
keys. None of them is a slowdown: they are rates, bytes, counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from echo_explore.core import MissingCalibration, SpecError, parse_quantity
from echo_explore.core.home import find_data_file
from echo_explore.interference.residual import Residual, read_residual
from echo_explore.specs.base import read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingCoefficients:
    """What one channel of a collective takes of memory and of the paths to it; the same on every GPU.

    Attributes:
        packets_ahead: of a channel, that wait for its link, before each packet of a block on the same path.
        memory_bytes_per_link_byte: bytes read from and written to device memory for each that goes over the link.
    """

    packets_ahead: float
    memory_bytes_per_link_byte: float

    def __post_init__(self) -> None:
        """Check that both can be."""
        for name in ("packets_ahead", "memory_bytes_per_link_byte"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise SpecError(f"sharing.{name}", value, "must be finite and not negative", "fit it again")


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceCoefficients:
    """All constants.

    Attributes:
        sharing: fitted.
        num_channels: of a collective with large messages inside a node, by GPU architecture.
        chunk_bytes: that one channel has in flight, by protocol ("ll", "ll128", "simple").
        l2_bytes_per_clock: that the L2 cache gives to all SMs together, by GPU architecture.
        residual: learned, on top; None for none.
    """

    sharing: SharingCoefficients
    num_channels: Mapping[str, int]
    chunk_bytes: Mapping[str, float]
    l2_bytes_per_clock: Mapping[str, int]
    residual: Residual | None = None

    def channels_of(self, architecture: str) -> int:
        """Channels on a GPU of that architecture.

        Raises:
            MissingCalibration: the file does not name it.
        """
        return _of(self.num_channels, "channels", architecture)

    def l2_bytes_per_s(self, architecture: str, clock_hz: float) -> float:
        """Bandwidth of the L2 cache of a GPU of that architecture at that clock.

        Raises:
            MissingCalibration: the file does not name it.
        """
        return _of(self.l2_bytes_per_clock, "l2", architecture) * clock_hz


def _of(table: Mapping[str, int], name: str, architecture: str) -> int:
    if architecture not in table:
        raise MissingCalibration(
            f"{name}.{architecture}: not in the interference calibration; fix: add a line with its source"
        )
    return table[architecture]


def load_coefficients(path: Path) -> InterferenceCoefficients:
    """The constants in a TOML file.

    Raises:
        SpecError: missing file, unknown or missing key, a value out of range.
    """
    return _coefficients(read_toml(path), path.name)


def user_coefficients(path: Path) -> InterferenceCoefficients:
    """Those under `[interference]` of a user's calibration file, or the shipped ones where it has no such table.

    Raises:
        SpecError: the file or the table is wrong.
    """
    data = read_toml(path)
    if "interference" not in data:
        return shipped_coefficients()
    return _coefficients(_table(data, "interference", path.name), f"{path.name}: interference")


def _coefficients(data: Mapping[str, Any], where: str) -> InterferenceCoefficients:
    if data.get("schema") != 1:
        raise SpecError(f"{where}: schema", data.get("schema"), "must be 1, the only version so far", "fit it again")
    names = [item.name for item in fields(SharingCoefficients)]
    sharing = _table(data, "sharing", where)
    for name in names:
        if name not in sharing:
            raise SpecError(f"{where}: sharing.{name}", "(missing)", "must be given", f"add {name}")
    for name in sharing:
        if name not in names:
            raise SpecError(f"{where}: sharing.{name}", sharing[name], "is not a known key", "remove it")
    values = {name: _number(sharing[name], f"{where}: sharing.{name}") for name in names}
    channels = _counts(_table(data, "channels", where), f"{where}: channels")
    # files written before the L2 cache was a resource of its own have no such table: those of the shipped file
    l2 = (
        _counts(_table(data, "l2", where), f"{where}: l2")
        if "l2" in data
        else shipped_coefficients().l2_bytes_per_clock
    )
    chunks = {
        name: parse_quantity(value, unit="bytes", field=f"{where}: chunk.{name}")
        for name, value in _table(data, "chunk", where).items()
    }
    for name in ("ll", "ll128", "simple"):
        if name not in chunks:
            raise SpecError(f"{where}: chunk.{name}", "(missing)", "must be given", f"add {name}")
    residual = read_residual(_table(data, "residual", where), f"{where}: residual") if "residual" in data else None
    return InterferenceCoefficients(
        sharing=SharingCoefficients(**values),
        num_channels=channels,
        chunk_bytes=chunks,
        l2_bytes_per_clock=l2,
        residual=residual,
    )


def _counts(table: Mapping[str, Any], where: str) -> Mapping[str, int]:
    for name, count in table.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SpecError(f"{where}.{name}", count, "must be a whole number of 1 or more", "correct it")
    return dict(table)


def _table(data: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise SpecError(f"{where}: {name}", "(missing)" if value is None else value, "must be a table", f"add [{name}]")
    return value


def _number(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(field, value, "must be a number", "correct the value")
    return float(value)


@lru_cache(maxsize=1)
def shipped_coefficients() -> InterferenceCoefficients:
    """The constants of `interference.toml`, read once in a process.

    Raises:
        MissingCalibration: there is no such file.
    """
    path = find_data_file("calibrations", "interference")
    if path is None:
        raise MissingCalibration("calibrations/interference.toml: not found; fix: install the package again")
    return load_coefficients(path)


@lru_cache(maxsize=1)
def shipped_residual() -> Residual:
    """The residual of `interference_learned.toml`, trained by scripts/fit_interference.py on public tables.

    Raises:
        MissingCalibration: there is no such file.
    """
    path = find_data_file("calibrations", "interference_learned")
    if path is None:
        raise MissingCalibration("calibrations/interference_learned.toml: not found; fix: install the package again")
    data = read_toml(path)
    return read_residual(_table(data, "residual", path.name), f"{path.name}: residual")


def with_residual(coefficients: InterferenceCoefficients) -> InterferenceCoefficients:
    """The constants with a residual on top: their own, or the shipped one where they have none."""
    return coefficients if coefficients.residual is not None else replace(coefficients, residual=shipped_residual())


def learned_coefficients() -> InterferenceCoefficients:
    """The shipped constants and the shipped residual."""
    return with_residual(shipped_coefficients())
