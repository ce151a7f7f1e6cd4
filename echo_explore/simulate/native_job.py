"""The job of a candidate on PyTorch's own parallelism: one stage, sharded by FSDP2 or replicated by DDP."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from echo_explore.graph import (
    Axis,
    ChunkShape,
    Collective,
    DType,
    OpRow,
    Parameter,
    TimedGraph,
    Trace,
    build_graph,
    concatenate,
)
from echo_explore.memory import SHARED_WEIGHT
from echo_explore.simulate.ddp_buckets import ddp_buckets
from echo_explore.simulate.host_collectives import collective_seconds
from echo_explore.simulate.logit_metrics import logit_metric_rows
from echo_explore.simulate.native_epilogue import native_epilogue
from echo_explore.simulate.pricing import Pricer
from echo_explore.simulate.sharded_graph import (
    ShardingFacts,
    Unit,
    behind_optimizer,
    sharded_backward,
    sharded_forward,
)
from echo_explore.simulate.slice_rows import SliceCalls, kept_host_s, kept_rows
from echo_explore.simulate.tensor_overlap import TensorOverlap
from echo_explore.simulate.what_if import WhatIf
from echo_explore.specs import Candidate
from echo_explore.specs.recompute import recomputed_groups
from echo_explore.specs.sharding import layers_ahead
from echo_explore.timeline import ChunkJob, GradientBucket, PipelineJob, StageJob

_DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}


class NativeJobBuilder:
    """Builds the PipelineJob of one candidate whose stack is on fsdp2, torchtitan or ddp."""

    def __init__(self, candidate: Candidate, trace: Trace, pricer: Pricer, what_if: WhatIf) -> None:
        self._candidate = candidate
        self._overlap = TensorOverlap(candidate, trace, pricer)
        self._trace = self._overlap.trace
        self._pricer = pricer
        self._what_if = what_if
        self._pieces: dict[tuple[str, bool], TimedGraph] = {}
        self._rows: dict[tuple[object, ...], TimedGraph] = {}

    @cached_property
    def job(self) -> PipelineJob:
        """The job: all ranks are one class."""
        candidate, stack = self._candidate, self._candidate.stack_on_host
        sharded = stack.fully_sharded
        shard = -(-self._num_elements // candidate.num_shards)
        kept_s = kept_host_s(self._tensors, self._slices) if self._slices is not None else 0.0
        epilogue = native_epilogue(
            num_elements=shard,
            data_ranks=candidate.num_shards,
            tensor_ranks=candidate.layout.tensor_parallel,
            bucket_elements=0 if sharded or candidate.layout.data_parallel == 1 else self._num_elements,
            loss_scaling=candidate.recipe.precision == "fp16",
            kept=self._behind_optimizer(),
        )
        stage = StageJob(
            label="every rank",
            multiplicity=candidate.num_gpus,
            chunks=(self._sharded_chunk() if sharded else self._replicated_chunk(),),
            send_forward_s=0.0,
            send_backward_s=0.0,
            send_sigma_log=0.0,
            epilogue=self._pricer.price(epilogue),
        )
        host_factor = 0.0 if stack.cuda_graphs else self._what_if.host_factor
        return PipelineJob(
            stages=(stage,),
            schedule="no-pipelining",
            num_micro_batches=candidate.num_micro_batches,
            overlap_grad_reduce=bool(candidate.recipe.overlap_grad_reduce),
            overlap_param_gather=False,
            overlap_p2p=False,
            host_call_s=stack.host_call_s * host_factor,
            host_backward_call_s=stack.host_backward_call_s * host_factor,
            host_collective_s=collective_seconds(stack, self._pricer.shape, factor=host_factor),
            host_step_s=(stack.host_step_s + kept_s) * self._what_if.host_factor,
            launch_blocking=stack.launch_blocking and host_factor > 0.0,
        )

    # -- what `sharded_graph` asks for --------------------------------------------------------------------------------

    def piece(self, name: str, *, backward: bool) -> TimedGraph:
        """A priced piece."""
        key = (name, backward)
        if key not in self._pieces:
            priced = self._overlap.price(name, backward=backward)
            if name == "head" and not backward and (metrics := logit_metric_rows(self._candidate)):
                parts = [priced, self.rows(metrics)]
                priced = TimedGraph.joined(parts, concatenate([part.graph for part in parts]))
            self._pieces[key] = priced
        return self._pieces[key]

    def rows(self, rows: tuple[OpRow, ...]) -> TimedGraph:
        """Priced rows of our own.

        Under hybrid sharding gathers and reductions run among the ranks of a host, sums among equal ranks of all hosts.
        """
        key = tuple(
            (
                r.kind,
                r.op_class,
                r.phase,
                r.dtype,
                r.name,
                r.dims,
                r.bytes_read,
                r.bytes_written,
                r.message_bytes,
                r.host_calls,
            )
            for r in rows
        )
        if key not in self._rows:
            priced = self._pricer.price(build_graph(rows))
            self._rows[key] = priced if self._hybrid is None else self._over_groups(priced, self._hybrid)
        return self._rows[key]

    @cached_property
    def _hybrid(self) -> Pricer | None:
        """Prices groups of `num_shards` neighbouring replicas and the groups across them; None where all are one."""
        candidate = self._candidate
        if candidate.num_shards in (1, candidate.num_replicas):
            return None
        # Groups of neighbours and groups across them lie as those of experts do.
        layout = candidate.layout.model_copy(
            update={
                "expert_parallel": candidate.num_shards,
                "expert_tensor_parallel": candidate.layout.tensor_parallel,
            }
        )
        return self._pricer.over(replace(candidate, layout=layout))

    def _over_groups(self, priced: TimedGraph, pricer: Pricer) -> TimedGraph:
        graph, factor = priced.graph, self._what_if.axis_factor(Axis.DATA)
        time_s, sigma_log, pair_class = priced.time_s.copy(), priced.sigma_log.copy(), priced.pair_class.copy()
        for row in np.flatnonzero(graph.is_collective).tolist():
            kind = Collective(int(graph.collective[row]))
            axis = Axis.EXPERT_DATA if kind == Collective.ALL_REDUCE else Axis.EXPERT
            size = float(graph.message_bytes[row])
            alone_s, sigma_log[row] = pricer.collective(axis, kind, size)
            time_s[row] = alone_s * factor
            pair_class[row] = pricer.traffic_class(axis, kind, size, time_s=float(time_s[row]))
        return replace(priced, time_s=time_s, sigma_log=sigma_log, pair_class=pair_class)

    # -- chunks -------------------------------------------------------------------------------------------------------

    @property
    def _layer_pieces(self) -> tuple[str, ...]:
        kinds = self._trace.layer_kinds
        groups = recomputed_groups(self._candidate.recipe.recompute, len(kinds))
        chunk = ChunkShape(
            first_layer=0, num_layers=len(kinds), has_embedding=False, has_head=False, recomputed=groups
        )  # fmt: skip
        return chunk.piece_names(kinds)

    @cached_property
    def _root_parameters(self) -> tuple[Parameter, ...]:
        """Of embedding and head; a tied matrix counts once."""
        tied = self._candidate.model.tied_embeddings
        head = self._trace.pieces["head"].parameters
        own = tuple(p for p in head if not (tied and p.name.endswith(SHARED_WEIGHT)))
        return (*self._trace.pieces["embedding"].parameters, *own)

    @property
    def _num_elements(self) -> int:
        layers = sum(self._trace.pieces[name].num_parameters for name in self._layer_pieces)
        return layers + sum(p.num_elements for p in self._root_parameters)

    @property
    def _tensors(self) -> tuple[int, ...]:
        """Elements of every parameter."""
        layers = [p.num_elements for name in self._layer_pieces for p in self._trace.pieces[name].parameters]
        return (*layers, *(p.num_elements for p in self._root_parameters))

    @cached_property
    def _slices(self) -> SliceCalls | None:
        candidate, stack = self._candidate, self._candidate.stack_on_host
        spec = stack.sharding.slices
        if not stack.fully_sharded or spec is None or candidate.num_shards == 1:
            return None
        wide = candidate.recipe.precision == "fp32"
        return SliceCalls(
            num_ranks=candidate.num_shards,
            kept_elements=spec.kept_elements,
            dtype=DType.FP32 if wide else _DTYPES[stack.sharding.gather_dtype],
            view_s=spec.view_s,
            copy_s=spec.copy_s,
            call_s=stack.host_call_s,
            backward_call_s=stack.host_backward_call_s,
        )

    def _plain(self, *, backward: bool) -> TimedGraph:
        names = ("embedding", *self._layer_pieces, "head")
        parts = [self.piece(name, backward=backward) for name in (reversed(names) if backward else names)]
        return TimedGraph.joined(parts, concatenate([p.graph for p in parts]))

    def _behind_optimizer(self) -> tuple[OpRow, ...]:
        """Gathers of parameters that stay whole until the next step."""
        if self._slices is not None:
            return tuple(kept_rows(self._tensors, self._slices))
        if not self._candidate.stack.fully_sharded or self._candidate.num_replicas == 1:
            return ()
        root, layers = self._units
        return behind_optimizer(root, layers, self._sharding_facts(layers))

    def _sharded_chunk(self) -> ChunkJob:
        if self._candidate.num_replicas == 1:
            return ChunkJob(forward=self._plain(backward=False), backward=self._plain(backward=True))
        root, layers = self._units
        facts = self._sharding_facts(layers)
        return ChunkJob(
            forward=sharded_forward(root, layers, facts, self), backward=sharded_backward(root, layers, facts, self)
        )

    @cached_property
    def _units(self) -> tuple[Unit, list[Unit]]:
        """The root, and every layer."""
        root = Unit(
            elements=sum(p.num_elements for p in self._root_parameters),
            pieces=("embedding", "head"),
            tensors=tuple(p.num_elements for p in self._root_parameters),
        )
        units = {
            name: Unit(
                elements=self._trace.pieces[name].num_parameters,
                pieces=(name,),
                tensors=tuple(p.num_elements for p in self._trace.pieces[name].parameters),
            )
            for name in set(self._layer_pieces)
        }
        return root, [units[name] for name in self._layer_pieces]

    def _sharding_facts(self, layers: Sequence[Unit]) -> ShardingFacts:
        candidate, spec = self._candidate, self._candidate.stack.sharding
        wide = candidate.recipe.precision == "fp32"
        return ShardingFacts(
            num_shards=candidate.num_shards,
            num_copies=candidate.num_replicas // candidate.num_shards,
            gather_dtype=DType.FP32 if wide else _DTYPES[spec.gather_dtype],
            reduce_dtype=DType.FP32 if wide else _DTYPES[candidate.stack.gradient_dtype],
            flat_parameters=spec.flat_parameters,
            reshard=candidate.recipe.reshard_after_forward is not False,
            reshard_last=spec.reshard_last_layer,
            regathers=spec.regathers and candidate.recipe.recompute == "full",
            slices=self._slices,
            ahead=layers_ahead(spec, max(unit.elements for unit in layers)),
            megatron=spec.wrapper == "megatron" and candidate.recipe.reshard_after_forward is not False,
        )

    def _replicated_chunk(self) -> ChunkJob:
        """Buckets are reduced in the last backward: the micro-batches before it run under no_sync()."""
        forward, backward = self._plain(backward=False), self._plain(backward=True)
        if self._candidate.layout.data_parallel == 1:
            return ChunkJob(forward=forward, backward=backward)
        names = ("embedding", *self._layer_pieces, "head")
        ends, rows = [0] * len(names), 0
        for position in range(len(names) - 1, -1, -1):
            rows += self._trace.pieces[names[position]].backward.num_ops
            ends[position] = rows
        tied = self._candidate.model.tied_embeddings
        parameters = [
            (parameter.num_elements, position)
            for position, name in enumerate(names)
            for parameter in self._trace.pieces[name].parameters
            if not (tied and name == "head" and parameter.name.endswith(SHARED_WEIGHT))
        ]
        spec = self._candidate.stack.buckets
        found = []
        layout = ddp_buckets(
            [count * 4 for count, _ in parameters], first_bytes=spec.first_bytes, others_bytes=spec.bucket_bytes
        )
        for bucket in layout:
            size = float(sum(parameters[index][0] for index in bucket) * 4)
            time_s, sigma = self._pricer.collective(Axis.DATA, Collective.ALL_REDUCE, size)
            found.append(
                GradientBucket(
                    collective=Collective.ALL_REDUCE,
                    message_bytes=size,
                    time_s=time_s,
                    sigma_log=sigma,
                    ready_after=max(ends[parameters[index][1]] for index in bucket) - 1,
                    traffic_class=self._pricer.traffic_class(Axis.DATA, Collective.ALL_REDUCE, size, time_s=time_s),
                )
            )
        return ChunkJob(forward=forward, backward=backward, buckets=tuple(found))
