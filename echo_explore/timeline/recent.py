"""The last values by key: candidates of a search often differ in other things than what a value depends on."""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = tuple[object, ...]
Value = TypeVar("Value")


class Recent(Generic[Value]):
    """A number of values, of which the one that was not asked for longest goes first."""

    def __init__(self, size: int) -> None:
        """Keep up to `size` values."""
        self._size = size
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """The value, or None."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def keep(self, key: Key, value: Value) -> None:
        """Keep a value."""
        self._values[key] = value
        while len(self._values) > self._size:
            self._values.popitem(last=False)
