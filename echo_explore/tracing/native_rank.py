"""One iteration of one rank in plain PyTorch: the real `fully_shard` or DistributedDataParallel around the model."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from echo_explore.core import TraceError
from echo_explore.graph import Axis, OpRow, Phase, RankTrace
from echo_explore.tracing import fake_cluster, megatron_shims, native_parallel
from echo_explore.tracing.megatron_config import DTYPES
from echo_explore.tracing.native_ddp import replicas
from echo_explore.tracing.native_model import rotary_angles
from echo_explore.tracing.native_pieces import autocast, build_model, name_modules, refuse_unsupported
from echo_explore.tracing.quantise import quantiser_of
from echo_explore.tracing.rank_request import RankRequest
from echo_explore.tracing.recorded_step import issued_step
from echo_explore.tracing.recorder import Recorder


def trace_rank(request: RankRequest) -> RankTrace:
    """Rows of forward, backward, gradient norm and optimizer of the second iteration.

    Raises:
        TraceError: the tracer can't do it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    trace = request.trace
    refuse_unsupported(trace)
    axes, mesh = _cluster(request)
    quantiser = quantiser_of(trace)
    recorder = Recorder(axes, fuse=trace.fusion == "fused", quantiser=quantiser)
    with replicas(), FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(trace, sum(request.chunk_layers), wide=True)
        name_modules(recorder, model)
        wrapped = _sharded(model, mesh, request) if trace.framework == "fsdp2" else _replicated(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(trace.sequence_length, trace.micro_batch_size, dtype=torch.int64, device="cuda")
        angles = rotary_angles(trace)

        def forward() -> torch.Tensor:
            with autocast(trace):
                loss: torch.Tensor = wrapped(tokens, angles)
            return loss

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        with no_global_shapes(recorder):
            waits = wrapped.no_sync if trace.framework == "ddp" else contextlib.nullcontext
            return second_iteration(
                recorder, forward, update, num_micro_batches=request.num_micro_batches, accumulating=waits
            )


def _cluster(request: RankRequest) -> tuple[dict[str, Axis], Any]:
    """Start the fake cluster of a request; the axis of each of its groups, and the mesh over which FSDP2 shards."""
    from torch.distributed.device_mesh import init_device_mesh

    tensor = request.trace.tensor_parallel
    fake_cluster.start(request.rank, request.data_parallel * tensor)
    axes = {dist.group.WORLD.group_name: Axis.DATA}  # type: ignore[union-attr]
    # Meshes hold real tensors, so they are made before the fake mode.
    mesh = init_device_mesh("cuda", (request.data_parallel, tensor), mesh_dim_names=("dp", "tp"))
    axes[mesh.get_group("dp").group_name] = Axis.DATA
    axes[mesh.get_group("tp").group_name] = Axis.TENSOR
    native_parallel.use_group(mesh.get_group("tp") if tensor > 1 else None)
    return axes, mesh["dp"]


def second_iteration(
    recorder: Recorder,
    forward: Callable[[], torch.Tensor],
    update: Callable[[], None],
    *,
    num_micro_batches: int,
    accumulating: Callable[[], Any] = contextlib.nullcontext,
    finish: Callable[[Sequence[OpRow]], None] = lambda _: None,
) -> RankTrace:
    """An iteration whose optimizer has its states, and in which FSDP2 knows its order.

    Args:
        recorder: of the trace.
        forward: of one micro-batch, to its loss.
        update: from the last backward to the end of the step.
        num_micro_batches: of a step.
        accumulating: the context of all micro-batches but the last.
        finish: is given the rows before they become a graph.
    """

    def iteration() -> None:
        for number in range(num_micro_batches):
            recorder.micro_batch, recorder.phase = number, Phase.FORWARD
            with accumulating() if number < num_micro_batches - 1 else contextlib.nullcontext():
                loss = forward()
                recorder.phase = Phase.BACKWARD
                loss.backward()  # type: ignore[no-untyped-call]
        recorder.micro_batch, recorder.phase = -1, Phase.OPTIMIZER
        update()

    with torch.autograd.set_multithreading_enabled(False), megatron_shims.recording(recorder):
        iteration()
        recorder.flush()
        recorder.host_syncs.clear()
        first = len(recorder.rows)
        iteration()
        recorder.flush()
    finish(recorder.rows)
    return issued_step(recorder, first, rank=dist.get_rank(), world_size=dist.get_world_size())


@contextlib.contextmanager
def no_global_shapes(recorder: Recorder) -> Iterator[None]:
    """DTensor tries every operator on tensors of global shape first, to learn the shape of its result: not the program.

    Written for torch 2.13.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    real = getattr(propagator, name, None)
    if real is None:
        raise TraceError(f"torch = {torch.__version__}: ShardingPropagator.{name} is gone; fix: use torch 2.13")

    def quiet(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return real(*args, **kwargs)

    setattr(propagator, name, quiet)
    try:
        yield
    finally:
        setattr(propagator, name, real)


def _sharded(model: Any, mesh: Any, request: RankRequest) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=DTYPES[request.trace.precision], reduce_dtype=torch.float32)
    last = len(model.decoder.layers) - 1
    for number, layer in enumerate(model.decoder.layers):
        frees = request.reshard_after_forward and (request.reshard_last_layer or number < last)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _replicated(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)
