"""Which bytes of which storage are alive, and which row wrote them last."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Access:
    """The extent [start, stop) in bytes of a storage that a tensor covers; `new`: the storage was not known before."""

    key: int
    start: int
    stop: int
    storage_bytes: int
    new: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """Storages that are alive at a moment: the row that made each, and its bytes."""

    storages: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """All of them together."""
        return sum(size for _, size in self.storages)

    def made_in(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Row and bytes of those that rows [first, last) made."""
        return tuple((row, size) for row, size in self.storages if first <= row < last)


@dataclass(slots=True)
class _Storage:
    nbytes: int
    counted_bytes: int
    born: int
    reference: Any
    writers: list[tuple[int, int, int]] = field(default_factory=list)


class StorageMap:
    """Live storages of the fake GPU.

    Attributes:
        live_bytes: of storages made since recording began.
        hold_peak: temporaries do not count now, because they live inside one fused kernel.
        levels: (row, live bytes before, live bytes after) of every growth, in order.
        freed_bytes: given back since the last `take_freed`.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.hold_peak = False
        self.levels: list[tuple[int, int, int]] = []
        self.freed_bytes = 0
        self._fresh: dict[int, int] = {}
        self._storages: dict[int, _Storage] = {}

    def take_freed(self) -> float:
        """Bytes given back since the last call, of what an earlier row was told of by `take_allocated`."""
        freed, self.freed_bytes = self.freed_bytes, 0
        return float(freed)

    def take_allocated(self) -> float:
        """Bytes of storages made since the last call and alive now."""
        allocated = sum(self._fresh.values())
        self._fresh.clear()
        return float(allocated)

    def _free(self, key: int) -> None:
        storage = self._storages.pop(key, None)
        if storage is not None:
            self.live_bytes -= storage.counted_bytes
            self.freed_bytes += storage.counted_bytes - self._fresh.pop(key, 0)

    def _find(self, tensor: torch.Tensor, row: int | None) -> tuple[int, _Storage, bool]:
        """Key and record of the tensor's storage, and whether it is new; `row` makes it, None: it was there before."""
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        storage = self._storages.get(key)
        if storage is not None:
            return key, storage, False
        nbytes = untyped.nbytes() if tensor.device.type == "cuda" else 0
        counted_bytes = 0 if row is None else nbytes
        reference = weakref.ref(untyped, lambda _: self._free(key))
        storage = self._storages[key] = _Storage(nbytes, counted_bytes, -1 if row is None else row, reference)
        self.live_bytes += counted_bytes
        if counted_bytes:
            self._fresh[key] = counted_bytes
        return key, storage, True

    def access(self, tensor: torch.Tensor) -> Access:
        """The extent of a tensor that is read; one not seen before was there before recording began."""
        key, storage, new = self._find(tensor, None)
        return Access(key, *_extent(tensor), storage.nbytes, new)

    def written(self, tensor: torch.Tensor, row: int) -> Access:
        """Note that `row` wrote the tensor."""
        key, storage, new = self._find(tensor, row)
        start, stop = _extent(tensor)
        storage.writers = [w for w in storage.writers if w[0] < start or w[1] > stop]
        storage.writers.append((start, stop, row))
        return Access(key, start, stop, storage.nbytes, new)

    def produced(self, tensor: torch.Tensor, row: int) -> int | None:
        """Note an allocation without a kernel before `row`; the key of the storage if it is new."""
        before = self.live_bytes
        key, _, new = self._find(tensor, row)
        if not new:
            return None
        self.note(row, before)
        return key

    def resized(self, untyped: torch.UntypedStorage, row: int) -> None:
        """Note that before `row` a storage was given another size, as FSDP2 frees and fills what it gathers."""
        key = untyped._cdata
        storage = self._storages.get(key)
        if storage is None or untyped.nbytes() == storage.nbytes:
            return
        before = self.live_bytes
        change = untyped.nbytes() - storage.nbytes
        storage.nbytes += change
        storage.counted_bytes += change  # of one that was there before recording began: below 0
        self.live_bytes += change
        fresh = self._fresh.get(key, 0)
        if change > 0:
            self._fresh[key] = fresh + change
            self.note(row, before)
        else:
            self._fresh[key] = max(fresh + change, 0)
            self.freed_bytes += max(-change - fresh, 0)

    def note(self, row: int, before: int) -> None:
        """Note the live bytes as they are now, while `row` runs."""
        if not self.hold_peak:
            self.levels.append((row, before, self.live_bytes))

    def dependences(self, accesses: Iterable[Access]) -> set[int]:
        """Rows that wrote any byte of the extents."""
        found: set[int] = set()
        for access in accesses:
            for start, stop, row in self._storages[access.key].writers:
                if start < access.stop and stop > access.start:
                    found.add(row)
        return found

    def kept_since(self, row: int) -> Kept:
        """What `row` and later rows made and is alive."""
        alive = (s for s in self._storages.values() if s.born >= row and s.counted_bytes)
        return Kept(tuple((s.born, s.counted_bytes) for s in alive))

    def peak_since(self, row: int) -> float:
        """Largest sum of live bytes while `row` or a later one ran, with what was there before recording began."""
        before = sum(s.nbytes - s.counted_bytes for s in self._storages.values())
        return float(before + max((after for at, _, after in self.levels if at >= row), default=self.live_bytes))

    def nbytes(self, key: int) -> float:
        """Bytes of a storage, 0 if it is gone."""
        storage = self._storages.get(key)
        return 0.0 if storage is None else float(storage.nbytes)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    last: int = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


@contextmanager
def watching_sizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` after every change of a storage's size, which no dispatch mode sees."""
    kind: Any = torch.UntypedStorage
    real = kind.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = real(storage, size)
        resized(storage)
        return result

    kind.resize_ = resize
    try:
        yield
    finally:
        kind.resize_ = real
