"""Reads the keys of one TOML table, with the table's name in every error."""

from collections.abc import Mapping
from typing import Any

from echo_explore.core import SpecError, parse_quantity

_NAMES = {3: "LL, LL128, Simple", 2: "LL, Simple"}


class TableReader:
    """One table of a calibration file."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table, self._where = table, where

    def _get(self, key: str) -> Any:
        if key not in self._table:
            raise SpecError(f"{self._where}.{key}", "(missing)", "must be given", f"add {key}")
        return self._table[key]

    def has(self, key: str) -> bool:
        """The table has that key."""
        return key in self._table

    def inner(self, key: str) -> "TableReader":
        """The table below this one."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise SpecError(f"{self._where}.{key}", value, "must be a table", "fit it again")
        return TableReader(value, f"{self._where}.{key}")

    def seconds(self, key: str) -> float:
        """A time with its unit."""
        return parse_quantity(self._get(key), unit="s", field=f"{self._where}.{key}")

    def bytes(self, key: str) -> float:
        """An amount of bytes with its unit."""
        return parse_quantity(self._get(key), unit="bytes", field=f"{self._where}.{key}")

    def bytes_per_s(self, key: str) -> float:
        """A bandwidth with its unit."""
        return parse_quantity(self._get(key), unit="bytes_per_s", field=f"{self._where}.{key}")

    def flag(self, key: str) -> bool:
        """Yes or no; no where the key is missing."""
        value = self._table.get(key, False)
        if not isinstance(value, bool):
            raise SpecError(f"{self._where}.{key}", value, "must be true or false", "correct it")
        return value

    def number(self, key: str, *, most: float) -> float:
        """A number from 0 to `most`."""
        return self._checked(key, self._get(key), most)

    def _checked(self, key: str, value: object, most: float) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
            raise SpecError(f"{self._where}.{key}", value, f"must be a number from 0 to {most:g}", "fit it again")
        return float(value)

    def numbers(self, key: str, *, most: float) -> tuple[float, float, float]:
        """Three numbers."""
        first, second, third = (self._checked(key, value, most) for value in self._list(key, 3))
        return first, second, third

    def number_pair(self, key: str, *, most: float) -> tuple[float, float]:
        """Two numbers."""
        first, second = (self._checked(key, value, most) for value in self._list(key, 2))
        return first, second

    def times(self, key: str) -> tuple[float, float, float]:
        """Three times."""
        first, second, third = self._times(key, 3)
        return first, second, third

    def time_pair(self, key: str) -> tuple[float, float]:
        """Two times."""
        first, second = self._times(key, 2)
        return first, second

    def byte_pair(self, key: str) -> tuple[float, float]:
        """Two amounts of bytes."""
        field = f"{self._where}.{key}"
        first, second = (parse_quantity(v, unit="bytes", field=field) for v in self._list(key, 2))
        return first, second

    def byte_triple(self, key: str) -> tuple[float, float, float]:
        """Three sizes, each 0 or more."""
        a, b, c = (parse_quantity(v, unit="bytes", field=f"{self._where}.{key}") for v in self._list(key, 3))
        return a, b, c

    def shares(self, key: str) -> dict[int, float]:
        """Shares from 0 to 1 by number of ranks; none where the key is missing."""
        table = self._table.get(key, {})
        if not isinstance(table, dict) or not all(name.isdecimal() for name in table):
            raise SpecError(f"{self._where}.{key}", table, "must be a table by number of ranks", "fit it again")
        return {int(name): self._checked(f"{key}.{name}", value, 1.0) for name, value in table.items()}

    def _times(self, key: str, count: int) -> list[float]:
        return [parse_quantity(v, unit="s", field=f"{self._where}.{key}") for v in self._list(key, count)]

    def _list(self, key: str, count: int) -> list[object]:
        values = self._get(key)
        if not isinstance(values, list) or len(values) != count:
            rule = f"needs {count} entries"
            raise SpecError(f"{self._where}.{key}", values, rule, f"give one each for {_NAMES[count]}")
        return values
