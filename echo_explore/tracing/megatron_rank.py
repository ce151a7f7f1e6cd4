"""Traces one whole iteration of one rank of a Megatron job: every micro-batch, gradient reduction, optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from echo_explore.graph import Phase, RankTrace
from echo_explore.tracing import (
    fused_adam,
    megatron_cluster,
    megatron_config,
    megatron_fsdp,
    megatron_model,
    megatron_shims,
)
from echo_explore.tracing.megatron_cluster import Degrees
from echo_explore.tracing.megatron_config import Schedule
from echo_explore.tracing.megatron_pieces import name_modules
from echo_explore.tracing.megatron_schedule import Batches, spans
from echo_explore.tracing.quantise import quantiser_of
from echo_explore.tracing.rank_request import RankRequest
from echo_explore.tracing.recorded_step import issued_step, ordered_step
from echo_explore.tracing.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRank:
    """A rank whose model and optimizer are built, inside the fake device.

    Attributes:
        recorder: sees everything it runs.
        models: chunks under Megatron's data-parallel wrapper.
    """

    request: RankRequest
    recorder: Recorder
    models: list[Any]
    optimizer: Any

    def run(self) -> RankTrace:
        """One iteration: forwards, backwards, reductions and optimizer."""
        batches = Batches(self.request.trace)
        self.recorder.flush()
        self.recorder.host_syncs.clear()
        first = len(self.recorder.rows)
        _iterate(self.recorder, self.models, self.optimizer, batches, self.request)
        self.recorder.flush()
        # Megatron-FSDP orders its streams by events; of the others only handles and waits count.
        step = ordered_step if self.request.megatron_fsdp else issued_step
        return step(self.recorder, first, rank=self.request.rank, world_size=dist.get_world_size())


def trace_rank(request: RankRequest) -> RankTrace:
    """The second iteration (the first one makes optimizer states and does not overlap).

    Raises:
        TraceError: the tracer or Megatron can't do it.
    """
    with prepared_rank(request) as rank:
        return rank.run()


@contextmanager
def prepared_rank(request: RankRequest) -> Iterator[PreparedRank]:
    """The rank with its optimizer states made.

    Raises:
        TraceError: the tracer or Megatron can't do it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    trace = request.trace
    megatron_model.refuse_unsupported(trace)
    degrees = Degrees(
        tensor=trace.tensor_parallel,
        pipeline=request.pipeline_parallel,
        virtual=request.virtual_pipeline,
        data=request.data_parallel,
        context=trace.context_parallel,
        expert=trace.expert_parallel,
        expert_tensor=trace.expert_tensor_parallel,
        rank=request.rank,
    )
    schedule = Schedule(
        layers_of_chunks=request.chunk_layers,
        overlap_p2p=request.overlap_p2p,
        distributed_optimizer=request.distributed_optimizer,
        overlap_grad_reduce=request.overlap_grad_reduce,
        overlap_param_gather=request.overlap_param_gather,
        bucket_elements=request.bucket_elements,
        narrow_gradients=trace.narrow_gradients,
    )
    axes = megatron_cluster.start_cluster(degrees)
    config = megatron_config.config_of(trace, trace.model.layer_kinds, degrees, schedule)
    quantiser = quantiser_of(trace)
    recorder = Recorder(axes, fuse=trace.fusion == "fused", quantiser=quantiser)
    sharded = request.megatron_fsdp
    with (
        megatron_fsdp.real_meshes(axes) if sharded else nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.set_multithreading_enabled(False),
        megatron_shims.recording(recorder),
    ):
        chunks = megatron_model.build_chunks(trace, config, degrees, tied=trace.model.tied_embeddings)
        models = (
            [megatron_fsdp.wrap_sharded(c, config, schedule, reshard=request.reshard_after_forward) for c in chunks]
            if sharded
            else megatron_model.wrap(chunks, config, schedule)
        )
        for chunk in chunks:
            name_modules(recorder, chunk)
        optimizer = _optimizer(request, models, schedule)
        _connect(config, models, optimizer, schedule, recorder, sharded=sharded)
        recorder.phase = Phase.OPTIMIZER
        if sharded:  # gradients exist only behind a backward, and states behind a step with gradients
            _iterate(recorder, models, optimizer, Batches(trace), replace(request, num_micro_batches=1))
        else:
            optimizer.step()
        yield PreparedRank(request=request, recorder=recorder, models=models, optimizer=optimizer)


def _optimizer(request: RankRequest, models: list[Any], schedule: Schedule) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    dtype = megatron_config.DTYPES[request.trace.precision]
    aware = request.precision_aware_optimizer
    with fused_adam.installed() if aware else nullcontext():
        settings = OptimizerConfig(
            optimizer=request.optimizer,
            muon_tp_mode=request.muon_tp_mode,
            muon_split_qkv=request.muon_split_qkv,
            lr=1e-4,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=schedule.distributed_optimizer,
            overlap_param_gather=schedule.overlap_param_gather,
            clip_grad=1.0,  # Megatron-LM's default
            **fused_adam.settings_of(request) if aware else {},
        )
        make = get_megatron_muon_optimizer if request.optimizer == "muon" else get_megatron_optimizer
        return make(settings, models, use_gloo_process_groups=False)


def _connect(
    config: Any, models: list[Any], optimizer: Any, schedule: Schedule, recorder: Recorder, *, sharded: bool
) -> None:
    """As Megatron-LM 0.16 does in training.py, `train`: what the schedule calls, and when gradients are reduced."""
    from megatron.core.distributed import finalize_model_grads

    def finalize(*args: Any, **kwargs: Any) -> None:
        recorder.flush()
        recorder.phase, recorder.micro_batch, recorder.chunk = Phase.OPTIMIZER, -1, 0
        finalize_model_grads(*args, **kwargs)

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize
    if schedule.overlap_grad_reduce and not sharded:
        no_sync = [model.no_sync for model in models]
        grad_sync = [model.start_grad_sync for model in models]  # --align-grad-reduce, the default
        config.no_sync_func = no_sync if len(models) > 1 else no_sync[0]
        config.grad_sync_func = grad_sync if len(models) > 1 else grad_sync[0]


def _iterate(recorder: Recorder, models: list[Any], optimizer: Any, batches: Batches, request: RankRequest) -> None:
    """Megatron-LM 0.16, training.py, `train_step`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    recorder.phase = Phase.FORWARD
    several = len(models) > 1
    with spans(recorder, models):
        get_forward_backward_func()(
            forward_step_func=batches.step,
            data_iterator=[None] * len(models) if several else None,
            model=models if several else models[0],
            num_microbatches=request.num_micro_batches,
            seq_length=request.trace.sequence_length,
            micro_batch_size=request.trace.micro_batch_size,
            forward_only=False,
        )
    recorder.phase, recorder.micro_batch, recorder.chunk = Phase.OPTIMIZER, -1, 0
    optimizer.step()
