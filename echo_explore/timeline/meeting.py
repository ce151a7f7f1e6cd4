"""Where different replicas of a job wait for each other: collectives over replicas, and exchanges of tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError
from echo_explore.graph import Axis, TimedGraph
from echo_explore.graph.execution_graph import Floats, Ints
from echo_explore.specs.schedules import PassKind
from echo_explore.timeline.blocks import Blocks
from echo_explore.timeline.exchange_groups import OF_EXCHANGES, shares_exchanges
from echo_explore.timeline.job import ChunkJob, GradientBucket, ParameterGather, PipelineJob, SplitBackward, StageJob
from echo_explore.timeline.layout import Layout
from echo_explore.timeline.program import Copies

OVER_REPLICAS = (Axis.DATA, Axis.EXPERT_DATA)
"""Axes whose groups have ranks of all replicas."""
_Traffic = TypeVar("_Traffic", GradientBucket, ParameterGather)


def meets_over_replicas(job: PipelineJob) -> bool:
    """Whether kinds of replicas meet inside forwards or backwards at collectives over all replicas."""
    graphs = [timed.graph for stage in job.classes for c in stage.chunks for timed in (c.forward, c.backward)]
    return any((graph.is_collective & np.isin(graph.axis, OVER_REPLICAS)).any() for graph in graphs)


def coupled_blocks(job: PipelineJob, blocks: Blocks, layout: Layout) -> npt.NDArray[np.bool_]:
    """(num_blocks,) blocks inside of which kinds of replicas meet; where one has its rows all must."""
    if not job.variants:
        return np.zeros(layout.num_blocks, dtype=np.bool_)
    axes = [template.ops.axis for template in blocks.expanded]
    over_replicas = np.array([np.isin(axis, OVER_REPLICAS).any() for axis in axes], dtype=np.bool_)
    exchanging = np.array([np.isin(axis, OF_EXCHANGES).any() for axis in axes], dtype=np.bool_)
    distinct = blocks.which[layout.rank, layout.phase, layout.chunk]
    shares = np.array(shares_exchanges(job))[layout.rank // layout.schedule.num_stages]
    coupled: npt.NDArray[np.bool_] = over_replicas[distinct] | (exchanging[distinct] & shares)
    return coupled


def blocks_in_step(job: PipelineJob, blocks: Blocks, layout: Layout) -> npt.NDArray[np.bool_]:
    """(num_blocks,) coupled blocks that may run as one body as long as all kinds that meet in them start together."""
    if not job.variants:
        return np.zeros(layout.num_blocks, dtype=np.bool_)
    axes = [bool(np.isin(template.ops.axis, OVER_REPLICAS).any()) for template in blocks.expanded]
    distinct = blocks.which[layout.rank, layout.phase, layout.chunk]
    in_step: npt.NDArray[np.bool_] = blocks.in_step[layout.rank, layout.phase, layout.chunk]
    return in_step & ~np.array(axes, dtype=np.bool_)[distinct]


def out_of_step(
    job: PipelineJob, layout: Layout, start_s: Floats, is_body: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """(num_blocks,) those of `is_body` that kinds which meet in them did not start together.

    Args:
        job: the step.
        layout: its blocks.
        start_s: (num_blocks,) when they started.
        is_body: (num_blocks,) blocks that ran as one body and must start together.
    """
    late = np.zeros(layout.num_blocks, dtype=np.bool_)
    by_kind = np.arange(layout.num_blocks).reshape(layout.num_variants, -1)
    groups = np.array(job.exchange_groups)
    for group in np.unique(groups):
        mine = by_kind[groups == group]
        apart = np.ptp(start_s[mine], axis=0) > _TOGETHER * start_s.max()
        late[mine] = apart[None, :]
    return late & is_body


def with_peers(job: PipelineJob, layout: Layout, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(num_blocks,) the chosen blocks and those that they meet, in all kinds of an exchange group."""
    wider = chosen.copy()
    by_kind = np.arange(layout.num_blocks).reshape(layout.num_variants, -1)
    groups = np.array(job.exchange_groups)
    for group in np.unique(groups):
        mine = by_kind[groups == group]
        wider[mine] = chosen[mine].any(axis=0)[None, :]
    return wider


_TOGETHER = 1e-11
"""Of the step: rounding over a million ops, far below any effect."""


def pair_groups(job: PipelineJob, layout: Layout, is_paired: npt.NDArray[np.bool_], first: int) -> Ints:
    """(num_blocks,) rendezvous group of the first op of forwards that start a pair, from `first` on; -1 for none.

    Kinds that exchange tokens start their pairs together.
    """
    group = np.full(layout.num_blocks, -1, dtype=np.int64)
    per_kind = layout.num_blocks // layout.num_variants
    kind, place = np.divmod(np.arange(layout.num_blocks), per_kind)
    starts = is_paired & (layout.phase == PassKind.FORWARD) & np.array(shares_exchanges(job))[kind]
    keys = np.stack([place, np.array(job.exchange_groups)[kind]], axis=1)[starts]
    if keys.size:
        group[starts] = first + np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    return group


def meeting_groups(job: PipelineJob, layout: Layout, copies: Copies, first: int) -> Ints:
    """(num_ops of the copies,) rendezvous group of rows at which kinds of replicas meet, from `first` on; -1 for none.

    The n-th such row of a pass meets the n-th of the same pass of the other kinds, and so do rows of epilogues.
    """
    group = np.full(copies.num_ops, -1, dtype=np.int64)
    axis = copies.pool.ops.axis[copies.source]
    of_exchange = np.isin(axis, OF_EXCHANGES)
    rows = np.flatnonzero(of_exchange | np.isin(axis, OVER_REPLICAS))
    if not job.variants or not rows.size:
        return group
    num_stages, num_variants, n = layout.schedule.num_stages, layout.num_variants, layout.num_blocks
    rank_of_copy = np.concatenate([layout.rank, np.arange(num_stages * num_variants)])
    owner = copies.owner[rows]
    variant = rank_of_copy[owner] // num_stages
    place = np.where(owner < n, owner - variant * (n // num_variants), owner - variant * num_stages)
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    turn = np.arange(rows.shape[0]) - np.repeat(starts, np.diff(np.append(starts, rows.shape[0])))
    scope = np.where(of_exchange[rows], 1 + np.array(job.exchange_groups)[variant], 0)
    meets = ~of_exchange[rows] | np.array(shares_exchanges(job))[variant]
    keys = np.stack([place, turn, scope], axis=1)[meets]
    group[rows[meets]] = first + np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    return group


def with_shared_times(job: PipelineJob) -> PipelineJob:
    """The job in which a collective that kinds of replicas share takes as long as the slowest of them needs for it.

    # Approximation: what kernels beside a shared collective cost it holds back their own replicas only
    # (under-estimates).

    Raises:
        SpecError: the kinds do not have the same collectives.
    """
    if not job.variants:
        return job
    groups, known = job.exchange_groups, dict[tuple[int, ...], tuple[TimedGraph, ...]]()

    def met(graphs: Sequence[TimedGraph]) -> tuple[TimedGraph, ...]:
        key = tuple(id(timed) for timed in graphs)
        if key not in known:
            known[key] = _met_graphs(graphs, groups) if len(set(key)) > 1 else tuple(graphs)
        return known[key]

    def met_splits(splits: Sequence[SplitBackward | None]) -> Iterable[SplitBackward | None]:
        given = [split for split in splits if split is not None]
        if len(given) < len(splits):
            return splits
        parts = zip(given, met([s.input for s in given]), met([s.weight for s in given]), strict=True)
        return [replace(split, input=i, weight=w) for split, i, w in parts]

    def met_chunks(chunks: Sequence[ChunkJob]) -> list[ChunkJob]:
        columns = zip(
            chunks,
            met([chunk.forward for chunk in chunks]),
            met([chunk.backward for chunk in chunks]),
            met_splits([chunk.split for chunk in chunks]),
            _met_traffic("buckets", [chunk.buckets for chunk in chunks]),
            _met_traffic("gathers", [chunk.gathers for chunk in chunks]),
            strict=True,
        )
        return [
            replace(chunk, forward=forward, backward=backward, split=split, buckets=buckets, gathers=gathers)
            for chunk, forward, backward, split, buckets, gathers in columns
        ]

    kinds: list[list[StageJob]] = [[] for _ in groups]
    for peers in zip(job.stages, *(variant.stages for variant in job.variants), strict=True):
        by_chunk = [met_chunks(chunks) for chunks in zip(*(stage.chunks for stage in peers), strict=True)]
        epilogues = met([stage.epilogue for stage in peers])
        for k, stage in enumerate(peers):
            chunks = tuple(chunk[k] for chunk in by_chunk)
            kinds[k].append(replace(stage, chunks=chunks, epilogue=epilogues[k]))
    variants = [replace(v, stages=tuple(own)) for v, own in zip(job.variants, kinds[1:], strict=True)]
    return replace(job, stages=tuple(kinds[0]), variants=tuple(variants))


def _met_traffic(name: str, of_kinds: Sequence[tuple[_Traffic, ...]]) -> list[tuple[_Traffic, ...]]:
    """Buckets or gathers of one chunk, by kind of replica, each as long as the slowest."""
    axes = {tuple(item.axis for item in items) for items in of_kinds}
    if len(axes) > 1:
        raise SpecError(f"variants.{name}", len(axes), "all replicas need the same ones", "give them the same")
    longest = [max(item.time_s for item in peers) for peers in zip(*of_kinds, strict=True)]
    return [tuple(replace(item, time_s=t) for item, t in zip(items, longest, strict=True)) for items in of_kinds]


def _met_graphs(graphs: Sequence[TimedGraph], groups: Sequence[int]) -> tuple[TimedGraph, ...]:
    """The same rows of several kinds of replicas, those that they share as long as the slowest needs."""
    times = [timed.time_s.copy() for timed in graphs]
    for axis in (*OVER_REPLICAS, *OF_EXCHANGES):
        rows = [np.flatnonzero(timed.graph.is_collective & (timed.graph.axis == axis)) for timed in graphs]
        for group in sorted(set(groups)) if axis in OF_EXCHANGES else (None,):
            members = [k for k, own in enumerate(groups) if group in (None, own)]
            counts = {rows[k].shape[0] for k in members}
            if len(counts) > 1:
                rule = f"replicas that meet over {axis.name} need as many collectives on it"
                raise SpecError("variants.stages", sorted(counts), rule, "give them the same program")
            longest = np.max([times[k][rows[k]] for k in members], axis=0)
            for k in members:
                times[k][rows[k]] = longest
    return tuple(replace(timed, time_s=t) for timed, t in zip(graphs, times, strict=True))
