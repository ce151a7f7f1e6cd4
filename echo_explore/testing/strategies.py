"""Hypothesis strategies of small random jobs, and the builders of synthetic graphs that they use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st

from echo_explore.graph import Axis, Collective, OpClass, OpKind, OpRow, Phase, TimedGraph, build_graph
from echo_explore.graph.execution_graph import Floats
from echo_explore.specs.schedules import default_schedule
from echo_explore.timeline import ChunkJob, GradientBucket, ParameterGather, PipelineJob, SplitBackward, StageJob
from echo_explore.timeline.split import split_rows

Item = tuple[str, float]
"""A row of a synthetic graph: what it is, and its seconds; see `timed_graph`."""


def timed_graph(items: Sequence[Item], *, phase: Phase = Phase.FORWARD, sigma_log: float = 0.05) -> TimedGraph:
    """A graph of rows in short form.

    Args:
        items: ("gemm" | "norm" | "optimizer" | "recompute", s): a kernel; ("sync" | "context", s): a synchronous
            collective over tensor or context ranks; ("async", s): an asynchronous one over tensor ranks; ("wait", 0):
            wait for the latest asynchronous one; ("embedding" | "model" | "data", s): a synchronous collective over
            that axis.
        phase: of all rows but "recompute" and "optimizer".
        sigma_log: of all times.
    """
    axes = {
        "sync": Axis.TENSOR,
        "async": Axis.TENSOR,
        "context": Axis.CONTEXT,
        "embedding": Axis.EMBEDDING,
        "model": Axis.MODEL,
        "data": Axis.DATA,
        "exchange": Axis.EXPERT,
        "expert tensor": Axis.EXPERT_TENSOR,
    }
    classes = {"gemm": OpClass.GEMM, "norm": OpClass.NORM, "optimizer": OpClass.OPTIMIZER, "recompute": OpClass.GEMM}
    phases = {"optimizer": Phase.OPTIMIZER, "recompute": Phase.RECOMPUTE}
    rows, latest = [], -1
    for i, (what, _) in enumerate(items):
        own_phase = phases.get(what, phase)
        if what in classes:
            rows.append(OpRow(op_class=classes[what], phase=own_phase, name=f"aten.{what}", module=f"m{i}"))
        elif what == "host":
            rows.append(OpRow(kind=OpKind.HOST_SYNC, phase=own_phase))
        elif what == "wait":
            rows.append(OpRow(kind=OpKind.WAIT, phase=own_phase, awaits=latest))
        else:
            latest = i if what == "async" else latest
            rows.append(
                OpRow(
                    kind=OpKind.COLLECTIVE,
                    phase=own_phase,
                    axis=axes[what],
                    collective=Collective.ALL_REDUCE,
                    asynchronous=what == "async",
                    message_bytes=1.0,
                )
            )
    seconds = np.array([s for _, s in items], dtype=np.float64)
    return TimedGraph(graph=build_graph(rows), time_s=seconds, sigma_log=np.full(len(items), sigma_log))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableInterference:
    """An interference model that is its table."""

    reference: ClassVar[str] = "made up for tests"
    version: ClassVar[int] = 1
    compute: Floats
    collective: Floats

    def pair_table(self) -> "TableInterference":
        """Itself."""
        return self


OTHER_SCHEDULES = {"gpipe": 1, "zb-h1": 1, "zbv": 2, "dualpipev": 2, "dualpipe": 2}
"""Schedules besides Megatron's, with the chunks of a stage that they need."""


def split_backward(whole: TimedGraph, leads: Sequence[bool]) -> SplitBackward:
    """The backward in two passes, the rows in `leads` first; a wait goes with what it waits for."""
    mask = np.array(leads, dtype=np.bool_)
    waits = whole.graph.awaits >= 0
    mask[waits] = mask[whole.graph.awaits[waits]]
    return split_rows(whole, mask)


def interference(compute: float = 1.0, collective: float = 1.0) -> TableInterference:
    """One factor for every kernel beside any collective, and one for every collective beside any kernel."""
    return TableInterference(compute=np.full((16, 16), compute), collective=np.full((16, 16), collective))


def seconds() -> st.SearchStrategy[float]:
    """Times of rows: multiples of 1/8 s up to 2 s, so that ties are common, or anything."""
    return st.one_of(st.integers(0, 16).map(lambda n: n / 8), st.floats(0.01, 2.0))


@st.composite
def items(draw: st.DrawFn, *, data: bool = False) -> list[Item]:
    """A few rows with at least one kernel; with asynchronous collectives, most of them waited for."""
    kinds = [
        "gemm",
        "gemm",
        "norm",
        "recompute",
        "sync",
        "context",
        "async",
        "wait",
        "exchange",
        "expert tensor",
        "host",
        *(["data"] if data else []),
    ]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=0, max_size=7))
    rows: list[Item] = [("gemm", draw(st.floats(0.1, 2.0)))]
    seen_async = False
    for what in chosen:
        if what == "wait" and not seen_async:
            continue
        seen_async = seen_async or what == "async"
        rows.append((what, 0.0 if what in ("wait", "host") else draw(seconds())))
    return rows


@st.composite
def pipeline_jobs(
    draw: st.DrawFn, *, max_stages: int = 4, max_micro_batches: int = 8, data_parallel: bool = True
) -> PipelineJob:
    """Small jobs of any schedule, with uneven stages, data-parallel traffic and epilogues that meet."""
    schedule = draw(st.sampled_from(["megatron", "megatron", *OTHER_SCHEDULES]))
    num_stages = draw(st.integers(1 if schedule == "megatron" else 2, max_stages))
    num_chunks = OTHER_SCHEDULES.get(schedule, 0) or (draw(st.integers(1, 3)) if num_stages > 1 else 1)
    if schedule == "dualpipev":
        num_micro_batches = draw(st.integers(2 * num_stages, 2 * num_stages + 4))
    elif schedule == "dualpipe":
        num_stages -= num_stages % 2
        num_micro_batches = 2 * num_stages + 2 * draw(st.integers(0, 2))
    elif schedule == "megatron" and num_chunks > 1:
        num_micro_batches = num_stages * draw(st.integers(1, max(1, max_micro_batches // num_stages)))
    else:
        num_micro_batches = draw(st.integers(1, max_micro_batches))
    uneven = draw(st.booleans())
    in_blocks = data_parallel and draw(st.sampled_from([False, False, True]))  # as sharded parameters need it
    shared = (draw(items(data=in_blocks)), draw(items(data=in_blocks)))
    stages = []
    for s in range(num_stages):
        chunks = []
        for _ in range(num_chunks):
            forward, backward = (draw(items(data=in_blocks)), draw(items(data=in_blocks))) if uneven else shared
            chunks.append(draw(_chunks(forward, backward, data_parallel=data_parallel)))
        stages.append(
            StageJob(
                label=f"stage {s}",
                multiplicity=draw(st.integers(1, 8)),
                chunks=tuple(chunks),
                send_forward_s=draw(seconds()) / 4,
                send_backward_s=draw(seconds()) / 4,
                send_sigma_log=0.1,
                epilogue=timed_graph(draw(_epilogues(s, num_stages)), phase=Phase.OPTIMIZER),
            )
        )
    return PipelineJob(
        stages=tuple(stages),
        schedule=default_schedule(num_stages, num_chunks) if schedule == "megatron" else schedule,
        num_micro_batches=num_micro_batches,
        overlap_grad_reduce=draw(st.booleans()),
        overlap_param_gather=draw(st.booleans()),
        overlap_p2p=draw(st.booleans()),
        host_call_s=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        host_backward_call_s=draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])),
        host_step_s=draw(st.sampled_from([0.0, 0.5])),
        host_update_s=draw(st.sampled_from([0.0, 0.0, 0.4])),
        overlap_exchanges=schedule == "megatron" and (num_stages == 1 or num_chunks > 1) and draw(st.booleans()),
        launch_blocking=draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def _chunks(draw: st.DrawFn, forward: list[Item], backward: list[Item], *, data_parallel: bool) -> ChunkJob:
    buckets: list[GradientBucket] = []
    gathers: list[ParameterGather] = []
    if data_parallel and draw(st.booleans()):
        kind = draw(st.sampled_from([Collective.ALL_REDUCE, Collective.REDUCE_SCATTER]))
        ready = sorted(draw(st.lists(st.integers(0, len(backward) - 1), max_size=3)))
        needed = sorted(draw(st.lists(st.integers(0, len(forward) - 1), max_size=3)))
        axes = st.sampled_from([Axis.DATA, Axis.DATA, Axis.EXPERT_DATA])
        buckets = [
            GradientBucket(
                collective=kind,
                message_bytes=1.0,
                time_s=draw(seconds()),
                sigma_log=0.2,
                ready_after=row,
                axis=draw(axes),
            )
            for row in ready
        ]
        gathers = [
            ParameterGather(
                message_bytes=1.0, time_s=draw(seconds()), sigma_log=0.2, needed_before=row, axis=draw(axes)
            )
            for row in needed
        ]
    whole = timed_graph(backward, phase=Phase.BACKWARD)
    return ChunkJob(
        forward=timed_graph(forward),
        backward=whole,
        split=split_backward(whole, draw(st.lists(st.booleans(), min_size=len(backward), max_size=len(backward)))),
        buckets=tuple(buckets),
        gathers=tuple(gathers),
    )


@st.composite
def _epilogues(draw: st.DrawFn, stage: int, num_stages: int) -> list[Item]:
    rows: list[Item] = [("sync", draw(seconds()))]
    if stage in (0, num_stages - 1):
        rows.append(("embedding", 0.25))
    rows += [("data", draw(seconds())), ("model", 0.125), ("optimizer", draw(seconds()))]
    return rows


def equal_stages_job(
    *,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    forward: Sequence[Item] = (("gemm", 1.0),),
    backward: Sequence[Item] = (("gemm", 2.0),),
    weight: Sequence[Item] = (),
    schedule: str = "",
    buckets: tuple[GradientBucket, ...] = (),
    gathers: tuple[ParameterGather, ...] = (),
    send_s: float = 0.0,
    overlap_p2p: bool = True,
    overlap_data: bool = True,
    host_call_s: float = 0.0,
    overlap_exchanges: bool = False,
) -> PipelineJob:
    """A job whose stages are all alike, with an empty epilogue.

    With `weight` the backward is `backward` and then those rows, and may be split there.
    """
    whole = timed_graph([*backward, *weight], phase=Phase.BACKWARD)
    chunk = ChunkJob(
        forward=timed_graph(forward),
        backward=whole,
        split=split_backward(whole, [True] * len(backward) + [False] * len(weight)) if weight else None,
        buckets=buckets,
        gathers=gathers,
    )
    stage = StageJob(
        label="stage",
        multiplicity=1,
        chunks=(chunk,) * num_chunks,
        send_forward_s=send_s,
        send_backward_s=send_s,
        send_sigma_log=0.0,
        epilogue=timed_graph([]),
    )
    return PipelineJob(
        stages=(stage,) * num_stages,
        schedule=schedule or default_schedule(num_stages, num_chunks),
        num_micro_batches=num_micro_batches,
        overlap_grad_reduce=overlap_data,
        overlap_param_gather=overlap_data,
        overlap_p2p=overlap_p2p,
        host_call_s=host_call_s,
        host_backward_call_s=host_call_s,
        host_step_s=0.0,
        overlap_exchanges=overlap_exchanges,
    )
