"""One iteration of one rank in plain PyTorch: the real `fully_shard` around the model."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from echo_explore.core import TraceError
from echo_explore.graph import Axis, ExecutionGraph, Phase, build_graph
from echo_explore.tracing import fake_cluster, megatron_shims
from echo_explore.tracing.megatron_model import DTYPES
from echo_explore.tracing.megatron_pieces import move_rows
from echo_explore.tracing.native_model import rotary_angles
from echo_explore.tracing.native_pieces import autocast, build_model, name_modules, refuse_unsupported
from echo_explore.tracing.quantise import quantiser_of
from echo_explore.tracing.rank_request import RankRequest
from echo_explore.tracing.recorder import Recorder


def trace_rank(request: RankRequest) -> ExecutionGraph:
    """Rows of forward, backward, gradient norm and optimizer of the second iteration.

    Raises:
        TraceError: the tracer can't do it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    trace = request.trace
    refuse_unsupported(trace)
    if trace.framework == "ddp":
        raise TraceError("framework: whole ranks of ddp are traced from a script only; use --script")
    if trace.tensor_parallel > 1:
        raise TraceError("layout.tp: whole ranks of plain PyTorch are traced with tp=1 only; use tp=1")
    fake_cluster.start(request.rank, request.data_parallel)
    axes = {dist.group.WORLD.group_name: Axis.DATA}  # type: ignore[union-attr]
    mesh = init_device_mesh("cuda", (request.data_parallel,))  # holds real tensors, so before the fake mode
    axes[mesh.get_group().group_name] = Axis.DATA
    quantiser = quantiser_of(trace)
    recorder = Recorder(axes, fuse=trace.fusion == "fused", quantiser=quantiser)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(trace, sum(request.chunk_layers), wide=True)
        name_modules(recorder, model)
        wrapped = _sharded(model, mesh, trace.precision)
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
        tokens = torch.zeros(trace.sequence_length, trace.micro_batch_size, dtype=torch.int64, device="cuda")
        angles = rotary_angles(trace)

        def iteration() -> None:
            for number in range(request.num_micro_batches):
                recorder.micro_batch, recorder.phase = number, Phase.FORWARD
                with autocast(trace):
                    loss = wrapped(tokens, angles)
                recorder.phase = Phase.BACKWARD
                loss.backward()
            recorder.micro_batch, recorder.phase = -1, Phase.OPTIMIZER
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        first = _run(recorder, iteration)
    return build_graph(move_rows(recorder.rows, first, len(recorder.rows)))


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


def _run(recorder: Recorder, iteration: Callable[[], None]) -> int:
    with (
        torch.autograd.set_multithreading_enabled(False),
        no_global_shapes(recorder),
        megatron_shims.recording(recorder),
    ):
        iteration()  # makes the optimizer's states, and what FSDP2 learns of its order
        recorder.flush()
        first = len(recorder.rows)
        iteration()
    return first


def _sharded(model: Any, mesh: Any, precision: str) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
