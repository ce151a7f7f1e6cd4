"""What a recorder saw of one step, as the trace of a rank with the groups of its collectives."""

from collections.abc import Sequence
from dataclasses import replace

from echo_explore.graph import OpRow, RankTrace, build_graph, groups_of_rows, order_streams
from echo_explore.tracing.megatron_pieces import move_rows
from echo_explore.tracing.recorder import Recorder
from echo_explore.tracing.versions import framework_versions


def issued_step(recorder: Recorder, first: int, *, rank: int, world_size: int) -> RankTrace:
    """The rows from `first` on, as a framework issued them whose streams mean what the timeline takes them for."""
    rows = move_rows(recorder.rows, first, len(recorder.rows))
    return _step(recorder, first, rows, range(len(rows)), rank=rank, world_size=world_size)


def ordered_step(recorder: Recorder, first: int, *, rank: int, world_size: int) -> RankTrace:
    """The rows from `first` on, in the order in which streams and events let them run."""
    rows = move_rows(recorder.rows, first, len(recorder.rows))
    joins = [replace(join, at=max(join.at - first, 0), last=join.last - first) for join in recorder.joins]
    ordered = order_streams(rows, joins)
    return _step(recorder, first, ordered.rows, ordered.origin, rank=rank, world_size=world_size)


def _step(
    recorder: Recorder, first: int, rows: Sequence[OpRow], origin: Sequence[int], *, rank: int, world_size: int
) -> RankTrace:
    # Streams are numbered by the process, which may have traced before; a trace counts those that it has.
    numbers = {stream: n for n, stream in enumerate(dict.fromkeys([0, *(row.stream for row in rows)]))}
    rows = [replace(row, stream=numbers[row.stream]) if row.stream else row for row in rows]
    groups, group_of_row = groups_of_rows([recorder.groups.get(first + o) if o >= 0 else None for o in origin])
    return RankTrace(
        graph=build_graph(rows),
        rank=rank,
        world_size=world_size,
        groups=groups,
        group_of_row=group_of_row,
        peak_memory_bytes=recorder.storages.peak_since(first),
        versions=framework_versions(),
        oracles=tuple(recorder.host_syncs),
    )
