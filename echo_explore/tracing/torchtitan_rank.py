"""One iteration of one rank of torchtitan's Llama 3 behind its whole `parallelize_llama`, FSDP2 included."""

import torch

from echo_explore.graph import Axis, RankTrace
from echo_explore.tracing import fake_cluster
from echo_explore.tracing.native_rank import no_global_shapes, second_iteration
from echo_explore.tracing.rank_request import RankRequest
from echo_explore.tracing.recorder import Recorder
from echo_explore.tracing.script_attention import fused_attention
from echo_explore.tracing.script_meshes import meshes_with_axes
from echo_explore.tracing.torchao_casts import casts_of, narrow_copies
from echo_explore.tracing.torchtitan_import import titan
from echo_explore.tracing.torchtitan_model import build, parallel_dims, step_of, train_context
from echo_explore.tracing.torchtitan_pieces import name_modules, refuse_unsupported

MAX_NORM = 1.0
"""At which torchtitan clips the gradient norm (0.2.2, config/job_config.py, Training.max_norm)."""


def trace_rank(request: RankRequest) -> RankTrace:
    """Rows of forward, backward, gradient norm and optimizer of the second iteration.

    Raises:
        TraceError: the tracer can't do it.
        MissingExtra: torchtitan is not installed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    trace = request.trace
    refuse_unsupported(trace)
    titan("models.llama3.infra.parallelize")  # before fake tensors: imports make tables of their own
    utils = titan("distributed.utils")
    world_size = request.data_parallel * trace.context_parallel * trace.tensor_parallel
    fake_cluster.start(request.rank, world_size)
    axes: dict[str, Axis] = {}
    recorder = Recorder(axes, fuse=trace.fusion == "fused", quantiser=casts_of(trace))
    with meshes_with_axes(axes), fused_attention(), no_global_shapes(recorder):
        dims = parallel_dims(trace, world_size=world_size)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build(trace, dims, num_layers=sum(request.chunk_layers), sharded=True)
            name_modules(recorder, model)
            forward = step_of(trace, dims, model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)

            def update() -> None:
                utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
                optimizer.step()
                optimizer.zero_grad()

            with train_context(dims):
                step = second_iteration(
                    recorder, forward, update, num_micro_batches=request.num_micro_batches, finish=narrow_copies
                )
    return step
