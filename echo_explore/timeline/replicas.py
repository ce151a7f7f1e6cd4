"""A job whose data-parallel replicas are not all alike, folded into as few kinds of them as there are."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError
from echo_explore.graph import Axis, TimedGraph
from echo_explore.timeline.job import ChunkJob, PipelineJob, ReplicaVariant, StageJob

Stages = tuple[StageJob, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaKind:
    """What some replicas run.

    Attributes:
        label: what sets them apart.
        stages: theirs; their multiplicities are those of a job of which all replicas are of this kind.
        is_usual: nothing that the labels of those that exchange tokens with it need to say.
    """

    label: str
    stages: Stages
    is_usual: bool = False


def with_unlike_replicas(
    job: PipelineJob,
    kinds: Sequence[ReplicaKind],
    kind_of: Sequence[int],
    *,
    replicas_per_exchange: int = 1,
    own: ReplicaKind | None = None,
) -> PipelineJob:
    """The job with replicas of these kinds beside its own.

    Replicas of one kind, or of kinds that run the same, are one with a rank class a stage; so are those of a kind that
    exchange tokens with replicas of the same kinds. Where ranks of one replica differ (in the tokens that their experts
    get), ranks of a stage stand where replicas are named here.

    Args:
        job: the step, all of whose replicas are alike.
        kinds: the others.
        kind_of: (num_replicas,) by replica: 0, as the job has them, or 1.. of `kinds`.
        replicas_per_exchange: replicas, one behind the other, that exchange tokens with each other.
        own: kind 0, where it has a label; its stages are those of the job.

    Raises:
        SpecError: no replica, a kind that does not exist, groups of exchanges that do not come out even.
    """
    num_replicas = len(kind_of)
    if not num_replicas or not all(0 <= kind <= len(kinds) for kind in kind_of):
        rule = f"needs a kind from 0 to {len(kinds)} for every replica"
        raise SpecError("kind_of", list(kind_of), rule, "give one a replica")
    if replicas_per_exchange < 1 or num_replicas % replicas_per_exchange:
        rule = f"must divide the {num_replicas} replicas"
        raise SpecError("replicas_per_exchange", replicas_per_exchange, rule, "give the replicas of an expert group")
    all_kinds = [own or ReplicaKind(label="", stages=job.stages, is_usual=True), *kinds]
    first_alike = [_first_alike(all_kinds, kind) for kind in range(len(all_kinds))]
    kind_of = [first_alike[kind] for kind in kind_of]
    first = range(0, num_replicas, replicas_per_exchange)
    together = [tuple(sorted(kind_of[i : i + replicas_per_exchange])) for i in first]
    counts = Counter((kind, together[i // replicas_per_exchange]) for i, kind in enumerate(kind_of))
    classes = sorted(counts)
    groups = {company: number for number, company in enumerate(dict.fromkeys(company for _, company in classes))}
    variants = [
        ReplicaVariant(
            label=(label := _label(all_kinds, kind, company)),
            num_replicas=counts[kind, company],
            stages=_counted(all_kinds[kind].stages, label, counts[kind, company], num_replicas),
            exchange_group=groups[company],
        )
        for kind, company in classes
    ]
    first_kind, *others = variants
    return replace(job, stages=first_kind.stages, num_replicas=first_kind.num_replicas, variants=tuple(others))


def one_by_one(job: PipelineJob) -> PipelineJob:
    """The same job with every replica a kind of its own: slower to simulate, and nothing else."""
    own = ReplicaVariant(label="", num_replicas=job.num_replicas, stages=job.stages)
    first, *others = [
        replace(variant, num_replicas=1, stages=_counted(variant.stages, "", 1, variant.num_replicas))
        for variant in (own, *job.variants)
        for _ in range(variant.num_replicas)
    ]
    return replace(job, stages=first.stages, num_replicas=1, variants=tuple(others))


def slowed_kernels(stages: Stages, factors: Mapping[int, float]) -> Stages:
    """The stages with kernels that take so many times as long, by stage."""

    def slowed(stage: StageJob, factor: float) -> StageJob:
        if factor == 1.0:
            return stage
        (slow,) = changed_graphs((stage,), lambda timed: _longer(timed, timed.graph.is_compute, factor))
        return replace(slow, label=f"{stage.label}, {factor:g} x as slow")

    return tuple(slowed(stage, factors.get(s, 1.0)) for s, stage in enumerate(stages))


def slowed_transfers(stages: Stages, axes: Sequence[Axis], factor: float) -> Stages:
    """The stages with collectives and transfers over these axes that take so many times as long.

    # Approximation: they hold back kernels beside them as much as before (over-estimates).
    """
    sends = factor if Axis.PIPELINE in axes else 1.0

    def chunk_of(chunk: ChunkJob) -> ChunkJob:
        return replace(
            chunk,
            buckets=tuple(replace(b, time_s=b.time_s * factor) if b.axis in axes else b for b in chunk.buckets),
            gathers=tuple(replace(g, time_s=g.time_s * factor) if g.axis in axes else g for g in chunk.gathers),
        )

    def longer(timed: TimedGraph) -> TimedGraph:
        return _longer(timed, timed.graph.is_collective & np.isin(timed.graph.axis, axes), factor)

    if factor == 1.0:
        return stages
    return tuple(
        replace(
            slow,
            chunks=tuple(chunk_of(chunk) for chunk in slow.chunks),
            send_forward_s=slow.send_forward_s * sends,
            send_backward_s=slow.send_backward_s * sends,
        )
        for slow in changed_graphs(stages, longer)
    )


def _first_alike(kinds: Sequence[ReplicaKind], kind: int) -> int:
    """The first kind that runs the same."""
    stages = kinds[kind].stages

    def is_alike(others: Stages) -> bool:
        return all(a is b or a.content == b.content for a, b in zip(others, stages, strict=True))

    return next(k for k, other in enumerate(kinds) if is_alike(other.stages))


def _label(kinds: Sequence[ReplicaKind], kind: int, company: tuple[int, ...]) -> str:
    """What sets a class of replicas apart: its kind, and others that it exchanges tokens with."""
    others = sorted({other for other in company if other != kind and not kinds[other].is_usual})
    with_others = f"exchanges with {', '.join(kinds[other].label for other in others)}" if others else ""
    return ", ".join(part for part in (kinds[kind].label, with_others) if part)


def _counted(stages: Stages, label: str, num_replicas: int, of_replicas: int) -> Stages:
    """The stages of some of so many replicas."""
    return tuple(
        replace(
            stage,
            label=f"{stage.label}, {label}" if label else stage.label,
            multiplicity=stage.multiplicity * num_replicas // of_replicas,
        )
        for stage in stages
    )


def _longer(timed: TimedGraph, rows: npt.NDArray[np.bool_], factor: float) -> TimedGraph:
    return replace(timed, time_s=np.where(rows, timed.time_s * factor, timed.time_s))


def changed_graphs(stages: Stages, change: Callable[[TimedGraph], TimedGraph]) -> Stages:
    """The stages with all their graphs changed; one that they have twice is changed once."""
    known: dict[int, TimedGraph] = {}

    def changed(timed: TimedGraph) -> TimedGraph:
        if id(timed) not in known:
            known[id(timed)] = change(timed)
        return known[id(timed)]

    def chunk_of(chunk: ChunkJob) -> ChunkJob:
        split = chunk.split
        if split is not None:
            split = replace(split, input=changed(split.input), weight=changed(split.weight))
        return replace(chunk, forward=changed(chunk.forward), backward=changed(chunk.backward), split=split)

    return tuple(
        replace(stage, chunks=tuple(map(chunk_of, stage.chunks)), epilogue=changed(stage.epilogue)) for stage in stages
    )
