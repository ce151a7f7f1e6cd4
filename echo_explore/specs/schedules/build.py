"""Schedules by name, and which layouts each of them takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from echo_explore.core import SpecError, nearest
from echo_explore.specs.schedules.dualpipe import dualpipe
from echo_explore.specs.schedules.dualpipev import dualpipev
from echo_explore.specs.schedules.file import parse_orders
from echo_explore.specs.schedules.megatron import stage_order
from echo_explore.specs.schedules.passes import PipelineSchedule, StageOrder
from echo_explore.specs.schedules.placement import chunks_of_stage
from echo_explore.specs.schedules.zero_bubble import gpipe, zb_h1, zbv

Maker = Callable[[int, int, int, int], StageOrder]
"""(num_stages, num_chunks, num_micro_batches, stage) to the order of that stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A schedule by name.

    Attributes:
        make: the order of a stage.
        num_chunks: chunks a stage it needs; 0: two or more.
        is_periodic: see `PipelineSchedule`.
        num_copies: see `PipelineSchedule`.
        posts_receives: receives are posted ahead, so that no send holds its stage; else as the recipe says.
    """

    make: Maker
    num_chunks: int
    is_periodic: bool
    posts_receives: bool
    num_copies: int = 1


def _megatron(p: int, v: int, m: int, stage: int, ahead: int = 0) -> StageOrder:
    return stage_order(pipeline_parallel=p, virtual_pipeline=v, num_micro_batches=m, rank=stage, ahead=ahead)


SCHEDULES: dict[str, ScheduleKind] = {
    "no-pipelining": ScheduleKind(make=_megatron, num_chunks=1, is_periodic=True, posts_receives=False),
    "1f1b": ScheduleKind(make=_megatron, num_chunks=1, is_periodic=True, posts_receives=False),
    "interleaved": ScheduleKind(make=_megatron, num_chunks=0, is_periodic=True, posts_receives=False),
    "gpipe": ScheduleKind(
        make=lambda p, v, m, stage: StageOrder.of(gpipe(m)), num_chunks=1, is_periodic=False, posts_receives=True
    ),
    "zb-h1": ScheduleKind(
        make=lambda p, v, m, stage: StageOrder.of(zb_h1(pipeline_parallel=p, num_micro_batches=m, rank=stage)),
        num_chunks=1,
        is_periodic=False,
        posts_receives=True,
    ),
    "zbv": ScheduleKind(
        make=lambda p, v, m, stage: StageOrder.of(zbv(pipeline_parallel=p, num_micro_batches=m, rank=stage)),
        num_chunks=2,
        is_periodic=False,
        posts_receives=True,
    ),
    "dualpipev": ScheduleKind(
        make=lambda p, v, m, stage: StageOrder.of(dualpipev(pipeline_parallel=p, num_micro_batches=m, rank=stage)),
        num_chunks=2,
        is_periodic=False,
        posts_receives=True,
    ),
    "dualpipe": ScheduleKind(
        make=lambda p, v, m, stage: dualpipe(pipeline_parallel=p, num_micro_batches=m, rank=stage),
        num_chunks=2,
        is_periodic=False,
        posts_receives=True,
        num_copies=2,
    ),
}
"""By name; "custom" takes its orders from a file."""
CUSTOM = "custom"


def posts_receives(name: str) -> bool:
    """Whether the schedule's program posts receives ahead, whatever the recipe says."""
    return name == CUSTOM or SCHEDULES[name].posts_receives


def num_ahead(name: str, *, overlap_exchanges: bool) -> int:
    """Forwards that the schedule runs ahead where exchanges of experts run beside another micro-batch.

    Megatron's schedules need one, so that a forward and the backward behind it are of different micro-batches; DualPipe
    is made of such pairs.
    """
    return int(overlap_exchanges and name in ("no-pipelining", "interleaved"))


def num_copies(name: str) -> int:
    """Copies of the model on one pipeline under the schedule of that name, see `PipelineSchedule`."""
    return 1 if name == CUSTOM else SCHEDULES[name].num_copies


def check_shape(name: str, *, pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int) -> None:
    """Refuse a schedule on stages, chunks and micro-batches that it was not made for.

    Raises:
        SpecError: an unknown name, a count below 1, stages or chunks it cannot take, micro-batches it cannot group.
    """
    for field, value in (
        ("pipeline_parallel", pipeline_parallel),
        ("virtual_pipeline", virtual_pipeline),
        ("num_micro_batches", num_micro_batches),
    ):
        if value < 1:
            raise SpecError(field, value, "must be 1 or more", f"set {field}=1")
    if virtual_pipeline > 1 and pipeline_parallel == 1:
        raise SpecError(
            "virtual_pipeline", virtual_pipeline, "needs pipeline_parallel above 1", "set virtual_pipeline=1"
        )
    if name == CUSTOM:
        return
    if name not in SCHEDULES:
        raise SpecError("schedule", name, "is not known", f"use {', '.join(nearest(name, SCHEDULES))}")
    kind = SCHEDULES[name]
    chunks_fit = virtual_pipeline == kind.num_chunks if kind.num_chunks else virtual_pipeline > 1
    if not chunks_fit or (pipeline_parallel == 1) != (name == "no-pipelining"):
        right = "no-pipelining" if pipeline_parallel == 1 else "interleaved" if virtual_pipeline > 1 else "1f1b"
        rule = f"does not fit {pipeline_parallel} stages of {virtual_pipeline} chunks"
        raise SpecError("schedule", name, rule, f"use {right}, or {_needs(name, kind)}")
    if name == "interleaved" and num_micro_batches % pipeline_parallel:
        near = max(1, round(num_micro_batches / pipeline_parallel)) * pipeline_parallel
        raise SpecError(
            "num_micro_batches",
            num_micro_batches,
            f"interleaving needs a multiple of pipeline_parallel = {pipeline_parallel}",
            f"use {near} micro-batches, or virtual_pipeline=1",
        )
    if name == "dualpipev" and num_micro_batches < 2 * pipeline_parallel:
        raise SpecError(
            "num_micro_batches",
            num_micro_batches,
            f"dualpipev needs at least 2 * pipeline_parallel = {2 * pipeline_parallel}",
            f"use {2 * pipeline_parallel} micro-batches, or zbv",
        )
    if name == "dualpipe":
        _check_dualpipe(pipeline_parallel, num_micro_batches)


def _check_dualpipe(p: int, m: int) -> None:
    if p % 2:
        raise SpecError("pipeline_parallel", p, "dualpipe needs an even number of stages", f"use {p + 1} or {p - 1}")
    if m % 2 or m < 2 * p:
        rule = f"dualpipe feeds half into each end: an even number, 2 * pipeline_parallel = {2 * p} or more"
        raise SpecError("num_micro_batches", m, rule, f"use {max(2 * p, m + m % 2)} micro-batches, or zbv")


def _needs(name: str, kind: ScheduleKind) -> str:
    if name == "no-pipelining":
        return "pp=1"
    return f"pp above 1 and vpp={kind.num_chunks}" if kind.num_chunks else "pp and vpp above 1"


@lru_cache(maxsize=64)
def build_schedule(
    name: str,
    *,
    pipeline_parallel: int,
    virtual_pipeline: int,
    num_micro_batches: int,
    lines: tuple[str, ...] = (),
    ahead: int = 0,
) -> PipelineSchedule:
    """The schedule of that name for these stages.

    Args:
        name: of `SCHEDULES`, or "custom".
        pipeline_parallel: stages.
        virtual_pipeline: chunks a stage.
        num_micro_batches: micro-batches.
        lines: of "custom": one a stage, see `file.parse_orders`.
        ahead: forwards that Megatron's schedules run ahead, see `megatron.num_warm_up_forwards`.

    Raises:
        SpecError: see `check_shape`, `file.parse_orders`.
    """
    check_shape(
        name,
        pipeline_parallel=pipeline_parallel,
        virtual_pipeline=virtual_pipeline,
        num_micro_batches=num_micro_batches,
    )
    if ahead and name not in ("no-pipelining", "interleaved"):
        raise SpecError("schedule", name, "runs no forward ahead", "use no-pipelining or interleaved")
    if name == CUSTOM:
        return parse_orders(
            lines,
            pipeline_parallel=pipeline_parallel,
            virtual_pipeline=virtual_pipeline,
            num_micro_batches=num_micro_batches,
        )
    kind = SCHEDULES[name]
    p, v, m = pipeline_parallel, virtual_pipeline, num_micro_batches
    placement = np.array(
        [chunks_of_stage(name, stage=s, pipeline_parallel=p, virtual_pipeline=v) for s in range(p)], dtype=np.int64
    )
    placement.setflags(write=False)
    return PipelineSchedule(
        name=name,
        num_micro_batches=m,
        placement=placement,
        orders=tuple(_megatron(p, v, m, s, ahead) if ahead else kind.make(p, v, m, s) for s in range(p)),
        is_periodic=kind.is_periodic,
        num_copies=kind.num_copies,
    )
