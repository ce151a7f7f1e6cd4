"""From a candidate and its trace to the job that the timeline simulates: price, replicate, bucket, place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from echo_explore.graph import (
    Axis,
    ChunkShape,
    Collective,
    Parameter,
    TimedGraph,
    Trace,
    chunk_pieces,
    concatenate,
    input_rows,
    with_pieces,
)
from echo_explore.memory import SHARED_WEIGHT, prediction_embedding, stage_chunks
from echo_explore.simulate.buckets import Bucket, bucket_layout, default_bucket_elements
from echo_explore.simulate.epilogue import EpilogueFacts, epilogue_graph
from echo_explore.simulate.host_collectives import collective_seconds
from echo_explore.simulate.muon import muon_updates
from echo_explore.simulate.muon_price import muon_seconds
from echo_explore.simulate.pricing import Pricer
from echo_explore.simulate.tensor_overlap import TensorOverlap
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import Candidate, StackProfile
from echo_explore.specs.optimizer import adam_states
from echo_explore.timeline import (
    ChunkJob,
    GradientBucket,
    HostModules,
    ModuleSeconds,
    ParameterGather,
    PipelineJob,
    SplitBackward,
    StageJob,
    split_rows,
)

PARAMETER_BYTES = {"fp32": 4.0}
"""Bytes of a parameter element by precision; every mixed precision keeps 16-bit parameters (2)."""
GRADIENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}


@dataclass(frozen=True)
class _ChunkPlan:
    """A chunk before pricing: its pieces, parameters in module order, and where each piece's rows end."""

    shape: ChunkShape
    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    piece_of: tuple[int, ...]
    forward_ends: tuple[int, ...]
    backward_ends: tuple[int, ...]


class JobBuilder:
    """Builds the PipelineJob of one candidate."""

    def __init__(self, candidate: Candidate, trace: Trace, pricer: Pricer, what_if: WhatIf) -> None:
        self._candidate = candidate
        shapes = [
            shape for stage in range(candidate.layout.pipeline_parallel) for shape in stage_chunks(candidate, stage)
        ]
        trace = with_pieces(trace, {name for shape in shapes for name in shape.piece_names(trace.layer_kinds)})
        self._overlap = TensorOverlap(candidate, trace, pricer)
        self._trace = self._overlap.trace
        self._pricer = pricer.with_copies(candidate.schedule.num_copies)
        self._what_if = what_if
        self._pieces: dict[tuple[str, bool], TimedGraph] = {}
        self._graphs: dict[tuple[tuple[str, ...], bool], TimedGraph] = {}
        self._splits: dict[tuple[str, ...], SplitBackward] = {}

    @cached_property
    def job(self) -> PipelineJob:
        """The job: one rank class a stage."""
        candidate = self._candidate
        layout, recipe, stack = candidate.layout, candidate.recipe, candidate.stack_on_host
        stages = tuple(self._stage(stage, stage_chunks(candidate, stage)) for stage in range(layout.pipeline_parallel))
        host_factor = 0.0 if stack.cuda_graphs else self._what_if.host_factor
        return PipelineJob(
            stages=stages,
            schedule=candidate.schedule.name,
            schedule_lines=recipe.schedule_lines,
            num_micro_batches=candidate.num_micro_batches,
            overlap_grad_reduce=bool(recipe.overlap_grad_reduce) and not self._sums_whole,
            overlap_param_gather=self._gathers_overlap,
            overlap_p2p=bool(recipe.overlap_p2p) and layout.virtual_pipeline > 1,
            host_call_s=stack.host_call_s * host_factor,
            host_backward_call_s=stack.host_backward_call_s * host_factor,
            host_expert_call_s=stack.host_backward_call_s * host_factor if stack.experts_apart else 0.0,
            host_modules=_modules(stack).times(host_factor),
            host_collective_s=self._host_collective_s,
            overlap_exchanges=candidate.overlaps_exchanges,
            host_step_s=stack.host_step_s * self._what_if.host_factor,
            host_update_s=self._host_parameter_s * self._what_if.host_factor,
            launch_blocking=stack.launch_blocking and host_factor > 0.0,
        )

    @cached_property
    def _host_collective_s(self) -> tuple[float, ...]:
        """By code of its axis, what a collective takes the host."""
        stack = self._candidate.stack_on_host
        factor = 0.0 if stack.cuda_graphs else self._what_if.host_factor
        return collective_seconds(stack, self._pricer.shape, factor=factor)

    @property
    def _sums_whole(self) -> bool:
        """Whether a stage sums its gradients in one piece behind its last backward."""
        return self._candidate.stack.sums_whole_gradients and bool(self._candidate.recipe.distributed_optimizer)

    @property
    def _gathers_overlap(self) -> bool:
        recipe = self._candidate.recipe
        return bool(recipe.distributed_optimizer and recipe.overlap_param_gather)

    def _stage(self, stage: int, shapes: tuple[ChunkShape, ...]) -> StageJob:
        layout = self._candidate.layout
        plans = [self._plan(shape) for shape in shapes]
        buckets = [self._buckets(plan, stage, chunk) for chunk, plan in enumerate(plans)]
        chunks = tuple(self._chunk(plan, plan_buckets) for plan, plan_buckets in zip(plans, buckets, strict=True))
        return StageJob(
            label=f"stage {stage}",
            multiplicity=layout.num_gpus // layout.pipeline_parallel,
            chunks=chunks,
            send_forward_s=self._send(stage, forward=True),
            send_backward_s=self._send(stage, forward=False),
            send_sigma_log=self._send_price(stage)[1],
            send_bytes=self._trace.boundary_bytes,
            epilogue=self._epilogue(self._epilogue_facts(stage, plans, buckets)),
        )

    def _epilogue(self, facts: EpilogueFacts) -> TimedGraph:
        call_s = self._candidate.stack_on_host.host_call_s * self._what_if.host_factor
        graph = epilogue_graph(facts)
        return self._pricer.price(graph, known_s=muon_seconds(graph, facts.muon, self._pricer, call_s=call_s))

    def _plan(self, shape: ChunkShape) -> _ChunkPlan:
        names = shape.piece_names(self._trace.layer_kinds)
        pieces = chunk_pieces(self._trace, shape)
        stage_of, _ = self._candidate.schedule.stage_and_chunk()
        once = self._candidate.model.tied_embeddings and shape.has_head and stage_of[0] == stage_of[-1]
        parameters = [
            (p, i)
            for i, piece in enumerate(pieces)
            for p in piece.parameters
            if p.trainable and not (once and names[i] == "head" and p.name.endswith(SHARED_WEIGHT))
        ]
        parameters += [(p, len(pieces) - 1) for p in prediction_embedding(self._candidate.model, self._trace, shape)]
        forward_ends, backward_ends, forward, backward = [], [0] * len(pieces), 0, 0
        for piece in pieces:
            forward += piece.forward.num_ops
            forward_ends.append(forward)
        for index in range(len(pieces) - 1, -1, -1):
            backward += pieces[index].backward.num_ops
            backward_ends[index] = backward
        return _ChunkPlan(
            shape=shape,
            names=names,
            parameters=tuple(p for p, _ in parameters),
            piece_of=tuple(i for _, i in parameters),
            forward_ends=tuple(forward_ends),
            backward_ends=tuple(backward_ends),
        )

    def _timed(self, names: tuple[str, ...], *, backward: bool) -> TimedGraph:
        """The priced graph of a chunk; chunks of equal pieces share one object."""
        key = (names, backward)
        if key not in self._graphs:
            parts = [self._piece(name, backward=backward) for name in (reversed(names) if backward else names)]
            self._graphs[key] = TimedGraph.joined(parts, concatenate([p.graph for p in parts]))
        return self._graphs[key]

    def _split(self, names: tuple[str, ...]) -> SplitBackward:
        """The backward of a chunk in two passes; an embedding has no gradient of its input to make."""
        if names not in self._splits:
            leads = [
                np.zeros(graph.num_ops, dtype=np.bool_) if name == "embedding" else input_rows(graph)
                for name, graph in ((name, self._trace.pieces[name].backward) for name in reversed(names))
            ]
            self._splits[names] = split_rows(self._timed(names, backward=True), np.concatenate(leads))
        return self._splits[names]

    def _piece(self, name: str, *, backward: bool) -> TimedGraph:
        key = (name, backward)
        if key not in self._pieces:
            self._pieces[key] = self._overlap.price(name, backward=backward)
        return self._pieces[key]

    def _buckets(self, plan: _ChunkPlan, stage: int, chunk: int) -> tuple[Bucket, ...]:
        """Buckets of the chunk in the order in which they are ready; routed experts have buckets of their own."""
        parts = [bucket for expert in (False, True) for bucket in self._buckets_of(plan, stage, chunk, expert=expert)]
        return tuple(sorted(parts, key=lambda bucket: -bucket.first))

    def _group(self, *, expert: bool) -> int:
        """Ranks that hold copies of the same parameters and sum their gradients."""
        layout, copies = self._candidate.layout, self._candidate.schedule.num_copies
        return copies * (layout.expert_data_parallel if expert else layout.data_parallel * layout.context_parallel)

    def _buckets_of(self, plan: _ChunkPlan, stage: int, chunk: int, *, expert: bool) -> list[Bucket]:
        """Megatron closes buckets only on the first stage's first chunk and with overlap; elsewhere one bucket."""
        candidate = self._candidate
        places = [i for i, p in enumerate(plan.parameters) if p.expert == expert]
        group = self._group(expert=expert)
        bucketing = bool(candidate.recipe.overlap_grad_reduce) and stage == 0 and chunk == 0 and not self._sums_whole
        limit = default_bucket_elements(group, candidate.stack.bucket_elements) if bucketing else None
        shared = frozenset(
            n
            for n, i in enumerate(places)
            if self._is_shared_embedding(plan.parameters[i], plan.names[plan.piece_of[i]])
        )
        buckets = bucket_layout(
            [plan.parameters[i].num_elements for i in places],
            group_size=group,
            distributed_optimizer=bool(candidate.recipe.distributed_optimizer) and not self._sums_whole,
            bucket_elements=limit,
            own_bucket=shared,
        )
        return [replace(b, first=places[b.first], last=places[b.last], expert=expert) for b in buckets]

    def _is_shared_embedding(self, parameter: Parameter, piece: str) -> bool:
        if not self._candidate.model.tied_embeddings:
            return False
        return (piece == "embedding" and parameter.name.endswith("word_embeddings.weight")) or (
            piece == "head" and parameter.name.endswith(SHARED_WEIGHT)
        )

    def _chunk(self, plan: _ChunkPlan, buckets: tuple[Bucket, ...]) -> ChunkJob:
        candidate = self._candidate
        forward = self._timed(plan.names, backward=False)
        backward = self._timed(plan.names, backward=True)
        reduced = [bucket for bucket in buckets if self._group(expert=bucket.expert) > 1]
        sharded = bool(candidate.recipe.distributed_optimizer)
        kind = Collective.REDUCE_SCATTER if sharded and not self._sums_whole else Collective.ALL_REDUCE
        summed = candidate.stack.summed_gradient_dtype if self._sums_whole else ""
        gradient_bytes = GRADIENT_BYTES[summed or candidate.stack.main_gradient_dtype(candidate.recipe.precision)]
        reductions, gathers = [], []
        for bucket in reduced:
            size = bucket.num_elements * gradient_bytes
            time_s, sigma = self._pricer.collective(_axis(bucket), kind, size)
            # Approximation: the host launches a bucket while the one before is reduced.
            if self._host_collective_s and time_s > 0.0:
                time_s = max(time_s, self._host_collective_s[_axis(bucket)])
            reductions.append(
                GradientBucket(
                    collective=kind,
                    message_bytes=size,
                    time_s=time_s,
                    sigma_log=sigma,
                    ready_after=plan.backward_ends[plan.piece_of[bucket.first]] - 1,
                    traffic_class=self._pricer.traffic_class(_axis(bucket), kind, size, time_s=time_s),
                    axis=_axis(bucket),
                )
            )
        for bucket in reversed(reduced) if self._gathers_overlap else ():
            size = bucket.num_elements * self._parameter_bytes
            time_s, sigma = self._pricer.collective(_axis(bucket), Collective.ALL_GATHER, size)
            piece = plan.piece_of[bucket.first]
            gathers.append(
                ParameterGather(
                    message_bytes=size,
                    time_s=time_s,
                    sigma_log=sigma,
                    needed_before=plan.forward_ends[piece - 1] if piece else 0,
                    traffic_class=self._pricer.traffic_class(_axis(bucket), Collective.ALL_GATHER, size, time_s=time_s),
                    axis=_axis(bucket),
                )
            )
        return ChunkJob(
            forward=forward,
            backward=backward,
            split=self._split(plan.names) if candidate.schedule.splits_backward else None,
            buckets=tuple(reductions),
            gathers=tuple(gathers),
        )

    @property
    def _parameter_bytes(self) -> float:
        return PARAMETER_BYTES.get(self._candidate.recipe.precision, 2.0)

    def _send_price(self, stage: int) -> tuple[float, float]:
        return self._pricer.transfer(stage, self._trace.boundary_bytes)

    def _send(self, stage: int, *, forward: bool) -> float:
        """Seconds of a transfer from the stage to where its chunks hand over.

        # Approximation: a stage whose chunks hand over to both neighbours has the slower of the two (over-estimates).
        """
        schedule, turn = self._candidate.schedule, 1 if forward else -1
        stage_of, _ = schedule.stage_and_chunk()
        times_s = [0.0]
        for place in schedule.placement[stage].tolist():
            is_end = (place + forward) % schedule.num_model_chunks == 0
            if is_end or stage_of[place + turn] == stage:
                continue
            target = int(stage_of[place + turn])
            is_next = (target - stage) % schedule.num_stages == 1
            times_s.append(self._send_price(stage if is_next else target)[0])
        return max(times_s)

    @property
    def _host_parameter_s(self) -> float:
        stack = self._candidate.stack
        return stack.host_sharded_parameter_s if self._is_sharded else stack.host_parameter_s

    @property
    def _is_sharded(self) -> bool:
        return bool(self._candidate.recipe.distributed_optimizer) and self._group(expert=False) > 1

    def _updated(self, parameters: Sequence[Parameter], buckets: Sequence[Bucket]) -> int:
        """Parameters of which a rank holds a part: its share of those that lie whole in it, and two cut a bucket.

        # Approximation: parameters of one bucket are alike in size (over-estimates where few large ones fill it).
        """
        counts = {e: sum(p.expert == e for p in parameters) for e in (False, True)}
        whole = sum(-(-count // self._group(expert=expert)) for expert, count in counts.items())
        return min(len(parameters), whole + 2 * len(buckets))

    def _epilogue_facts(self, stage: int, plans: list[_ChunkPlan], buckets: list[tuple[Bucket, ...]]) -> EpilogueFacts:
        candidate = self._candidate
        layout, recipe = candidate.layout, candidate.recipe
        group = self._group(expert=False)
        parameters = [p for plan in plans for p in plan.parameters]
        total = sum(p.num_elements for p in parameters)
        sharded = self._is_sharded
        flat = [b for chunk in buckets for b in chunk]
        shard = sum(sum(b.num_elements for b in flat if b.expert == e) // self._group(expert=e) for e in (False, True))
        late = [b for b in flat if self._group(expert=b.expert) > 1] if sharded and not self._gathers_overlap else []
        if any(b.expert for b in flat):
            # megatron-core 0.16.1 (2026), distrib_optimizer.py, step_with_ready_grads: the optimizer of dense
            # parameters and that of experts each gather all buckets of the model.
            late *= 2
        stage_of, _ = candidate.schedule.stage_and_chunk()
        holders = {int(stage_of[0]), int(stage_of[-1])}
        model = candidate.model
        shared = model.tied_embeddings or model.multi_token_prediction_layers > 0
        tied = shared and stage in holders and len(holders) > 1
        embedding = [p for p in self._trace.pieces["embedding"].parameters if p.name.endswith("word_embeddings.weight")]
        return EpilogueFacts(
            num_elements=total,
            num_shard_elements=shard if sharded else total,
            sequence_parallel_elements=sum(p.num_elements for p in parameters if p.sequence_parallel),
            embedding_elements=sum(p.num_elements for p in embedding) if tied else 0,
            gather_elements=tuple(b.num_elements for b in late if not b.expert),
            expert_gather_elements=tuple(b.num_elements for b in late if b.expert),
            parameter_bytes=self._parameter_bytes,
            gradient_bytes=GRADIENT_BYTES[candidate.stack.main_gradient_dtype(candidate.recipe.precision)],
            master_copy=recipe.precision != "fp32",
            loss_scaling=recipe.precision == "fp16",
            tensor_parallel=layout.tensor_parallel,
            model_ranks=layout.model_gpus,
            data_ranks=group,
            num_updated=self._updated(parameters, flat) if sharded else len(parameters),
            muon=muon_updates(candidate, parameters),
            states=adam_states(recipe, candidate.stack),
        )


def _modules(stack: StackProfile) -> HostModules:
    wide, narrow = stack.host_modules.wide, stack.host_modules.narrow
    return HostModules(wide=ModuleSeconds(**wide.model_dump()), narrow=ModuleSeconds(**narrow.model_dump()))


def _axis(bucket: Bucket) -> Axis:
    return Axis.EXPERT_DATA if bucket.expert else Axis.DATA
