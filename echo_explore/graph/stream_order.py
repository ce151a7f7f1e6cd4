"""Rows of a program with several streams, in the order in which they can run, with the waits that it only implies.

A program issues kernels and collectives on streams of its own and orders these by events. The timeline knows one stream
of kernels, and a collective starts after the kernels before it. So what a program put on another stream moves up to
behind the last thing that it waits for, collectives of other streams become asynchronous, and kernels wait for them
where they, or the stream that they run on, first need the result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from echo_explore.graph.execution_graph import OpRow
from echo_explore.graph.kinds import Axis, Collective, DType, OpClass, OpKind

MAIN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamJoin:
    """A stream was told to wait for another.

    Attributes:
        at: rows issued before that.
        waiting: number of the stream that waits.
        awaited: number of the stream that it waits for.
        last: last row issued, on any stream, when the moment that is waited for was recorded; -1: none.
    """

    at: int
    waiting: int
    awaited: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Rows in their new order, and for each the row that it was, -1 for a wait that was added."""

    rows: list[OpRow]
    origin: list[int]


def order_streams(rows: Sequence[OpRow], joins: Iterable[StreamJoin]) -> Ordered:
    """The rows as one stream of kernels with asynchronous collectives beside it.

    # Approximation: a kernel of another stream that waits for a collective runs where the main stream first needs it,
    # or at the end (either direction).

    Args:
        rows: in issue order; `deps`, `awaits` and `forward_op` count from the first.
        joins: in issue order.
    """
    return _Orderer(rows, joins).run()


Key = tuple[int, int, int]


class _Orderer:
    def __init__(self, rows: Sequence[OpRow], joins: Iterable[StreamJoin]) -> None:
        self._rows = rows
        self._needs = _needs(rows, joins)
        self._key: dict[int, Key] = {}
        self._waits: list[tuple[Key, OpRow]] = []
        self._joined: dict[int, Key] = {}
        self._deferred: dict[int, list[int]] = {}
        self._main = 0
        self._floor = 0
        self._count = 0

    def run(self) -> Ordered:
        for index, row in enumerate(self._rows):
            if row.stream == MAIN:
                self._place_main(index, row)
            else:
                self._place_aside(index, row)
        for stream in list(self._deferred):
            self._settle_stream(stream, len(self._rows))
        return self._renumbered()

    def _place_main(self, index: int, row: OpRow) -> None:
        for need in sorted(self._needs[index]):
            if not (row.kind is OpKind.WAIT and need == row.awaits):
                self._settle(need, row)
        self._emit(index)
        if row.kind is OpKind.WAIT and row.awaits >= 0:
            self._joined[row.awaits] = self._key[index]
        if row.kind is OpKind.HOST_SYNC:
            self._floor = self._main

    def _place_aside(self, index: int, row: OpRow) -> None:
        blocked = any(self._is_pending(need) for need in self._needs[index])
        if row.kind is OpKind.COLLECTIVE:
            for need in sorted(self._needs[index]):
                if self._rows[need].axis != row.axis:  # one queue per axis keeps the order of its own
                    self._settle(need, row)
        elif blocked or row.kind is OpKind.HOST_SYNC:
            self._deferred.setdefault(row.stream, []).append(index)
            return
        ends = [self._end(need) for need in self._needs[index] if need in self._key]
        if row.kind is not OpKind.COLLECTIVE:  # a kernel comes behind the wait for the collective that it reads
            ends += [self._joined[need] for need in self._needs[index] if need in self._joined]
        after = max(ends, default=(0, 0, 0))
        self._count += 1
        self._key[index] = (max(after[0], self._floor), 1, self._count)

    def _end(self, index: int) -> Key:
        """Where a placed row stands; of a wait that is left out, the last of what it waited for."""
        key = self._key[index]
        if key[0] >= 0:
            return key
        needs = [need for need in self._needs[index] if need in self._key]
        return max((self._joined.get(need) or self._end(need) for need in needs), default=(0, 0, 0))

    def _is_pending(self, index: int) -> bool:
        """Whether kernels have to wait for the row: a collective not waited for yet, or what waits for one."""
        row = self._rows[index]
        if row.kind is OpKind.COLLECTIVE:
            return index not in self._joined and (row.asynchronous or row.stream != MAIN)
        return index not in self._key

    def _settle(self, index: int, reader: OpRow) -> None:
        """Make the main stream wait for what row `index` is or waits for."""
        row = self._rows[index]
        if row.kind is OpKind.COLLECTIVE:
            if self._is_pending(index):
                self._joined[index] = self._next()
                self._waits.append((self._joined[index], _wait_for(index, reader)))
        elif index not in self._key:
            self._settle_stream(row.stream, index)

    def _settle_stream(self, stream: int, last: int) -> None:
        waiting = self._deferred.get(stream, [])
        while waiting and waiting[0] <= last:
            index = waiting.pop(0)
            row = self._rows[index]
            for need in sorted(self._needs[index]):
                self._settle(need, row)
            self._emit(index)

    def _next(self) -> Key:
        self._main += 1
        return (self._main, 0, 0)

    def _emit(self, index: int) -> None:
        if not (self._rows[index].kind is OpKind.WAIT and self._rows[index].stream != MAIN):
            self._key[index] = self._next()
        else:  # the main stream waits already
            self._key[index] = (-1, 0, 0)

    def _renumbered(self) -> Ordered:
        dropped = {index for index, key in self._key.items() if key[0] < 0}
        items: list[tuple[Key, int, OpRow]] = [
            (key, index, self._rows[index]) for index, key in self._key.items() if index not in dropped
        ]
        items += [(key, -1, row) for key, row in self._waits]
        items.sort(key=lambda item: item[0])
        place = {index: position for position, (_, index, _) in enumerate(items) if index >= 0}

        def moved(index: int) -> int:
            return place.get(index, -1)

        rows = [
            replace(
                row,
                asynchronous=row.asynchronous or (row.kind is OpKind.COLLECTIVE and row.stream != MAIN),
                awaits=moved(row.awaits),
                forward_op=moved(row.forward_op),
                deps=tuple(sorted(place[d] for d in row.deps if d in place and place[d] < position)),
            )
            for position, (_, _, row) in enumerate(items)
        ]
        return Ordered(rows=rows, origin=[index for _, index, _ in items])


def _needs(rows: Sequence[OpRow], joins: Iterable[StreamJoin]) -> list[set[int]]:
    """Rows that each row waits for: what it reads, the row before it on its own stream, and what events order."""
    needs: list[set[int]] = []
    last_on: dict[int, int] = {}
    pending: dict[int, set[int]] = {}
    on_stream: dict[int, list[int]] = {}
    waiting = list(joins)
    position = 0
    for index, row in enumerate(rows):
        while position < len(waiting) and waiting[position].at <= index:
            join = waiting[position]
            position += 1
            found = [i for i in on_stream.get(join.awaited, ()) if i <= join.last]
            if found:
                pending.setdefault(join.waiting, set()).add(found[-1])
        own = {d for d in row.deps if d < index} | pending.pop(row.stream, set())
        if row.awaits >= 0:
            own.add(row.awaits)
        if row.stream != MAIN and row.stream in last_on:
            own.add(last_on[row.stream])
        needs.append(own)
        last_on[row.stream] = index
        on_stream.setdefault(row.stream, []).append(index)
    return needs


def _wait_for(index: int, reader: OpRow) -> OpRow:
    return replace(
        reader, kind=OpKind.WAIT, name="wait", op_class=OpClass.NONE, dtype=DType.NONE, shapes="",
        dims=(), flop=0.0, bytes_read=0.0, bytes_written=0.0, axis=Axis.NONE, collective=Collective.NONE,
        message_bytes=0.0, asynchronous=False, awaits=index, deps=(index,), stream=MAIN, host_calls=0, forward_op=-1,
    )  # fmt: skip
