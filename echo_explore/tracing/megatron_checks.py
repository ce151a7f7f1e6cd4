"""Questions to megatron-core that need no trace: does it accept a layout, in which order does it run, which buckets."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from echo_explore.graph import Axis
from echo_explore.tracing import megatron_cluster, megatron_config, megatron_model, megatron_shims
from echo_explore.tracing.megatron_cluster import Degrees
from echo_explore.tracing.megatron_config import Schedule
from echo_explore.tracing.megatron_schedule import Batches, spans
from echo_explore.tracing.recorder import Recorder
from echo_explore.tracing.request import TraceRequest


def _stub_models(config: Any, count: int) -> list[Any]:
    from megatron.core.transformer.enums import ModelType

    models: list[Any] = []
    for _ in range(count):
        model: Any = torch.nn.Module()
        model.config, model.model_type = config, ModelType.encoder_or_decoder
        models.append(model)
    return models


def run_schedule(
    config: Any, degrees: Degrees, num_micro_batches: int, axes: Mapping[str, Axis]
) -> list[tuple[str, int, int]]:
    """Run Megatron's schedule function on a model that computes nothing: (phase, micro-batch, chunk) in order."""
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    def forward(step: Any, iterator: Any, model: Any, count: int, inputs: Any, *_: Any, **__: Any) -> Any:
        output = torch.empty(1, device="cuda")
        return [output] if isinstance(inputs, list) else output, torch.tensor(0, dtype=torch.int)

    def backward(inputs: Any, *_: Any, **__: Any) -> Any:
        return inputs

    models = _stub_models(config, degrees.virtual)
    several = len(models) > 1
    recorder = Recorder(axes, fuse=False)
    real = schedules.forward_step, schedules.backward_step
    schedules.forward_step, schedules.backward_step = forward, backward
    try:
        with spans(recorder, models) as found, megatron_shims.recording(recorder):
            get_forward_backward_func()(
                forward_step_func=None,
                data_iterator=[None] * len(models) if several else None,
                model=models if several else models[0],
                num_microbatches=num_micro_batches,
                seq_length=degrees.tensor * degrees.context,
                micro_batch_size=1,
                forward_only=False,
            )
    finally:
        schedules.forward_step, schedules.backward_step = real
    return [("backward" if span.backward else "forward", span.micro_batch, span.chunk) for span in found]


def schedule_order(
    pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int, rank: int
) -> list[tuple[str, int, int]]:
    """(phase, micro-batch, chunk) of everything that pipeline stage `rank` runs, as Megatron's schedule runs it."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch._subclasses.fake_tensor import FakeTensorMode

    degrees = Degrees(pipeline=pipeline_parallel, virtual=virtual_pipeline, rank=rank)
    axes = megatron_cluster.start_cluster(degrees)
    config = TransformerConfig(
        num_layers=pipeline_parallel * virtual_pipeline,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_pipeline if virtual_pipeline > 1 else None,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,
        gradient_accumulation_fusion=False,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        return run_schedule(config, degrees, num_micro_batches, axes)


def process_groups(layout: Mapping[str, int], rank: int) -> dict[str, list[int]]:
    """Ranks of every process group of `rank` as Megatron initialises them, by name of the axis; none of one rank."""
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    tensor, pipeline, virtual, context, expert, expert_tensor, data = (layout.get(n, 1) for n in names)
    axes = megatron_cluster.start_cluster(
        Degrees(
            tensor=tensor, pipeline=pipeline, virtual=virtual, context=context, expert=expert,
            expert_tensor=expert_tensor, data=data, rank=rank,
        )
    )  # fmt: skip
    found: dict[str, list[int]] = {}
    for group in torch.distributed.distributed_c10d._world.pg_map:
        axis = axes.get(group.group_name)
        if axis is not None:
            found.setdefault(axis.name, sorted(torch.distributed.get_process_group_ranks(group)))
    return found


def bucket_layout(
    num_elements: Sequence[int],
    data_parallel: int,
    *,
    distributed_optimizer: bool,
    overlap_grad_reduce: bool,
    bucket_elements: int | None,
    own_bucket: Sequence[int],
    pipeline_rank: int,
) -> list[dict[str, Any]]:
    """Gradient buckets as Megatron's DistributedDataParallel lays them out: padded size and parameters of each."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch._subclasses.fake_tensor import FakeTensorMode

    stages = pipeline_rank + 1
    degrees = Degrees(pipeline=stages, data=data_parallel, rank=pipeline_rank * data_parallel)
    megatron_cluster.start_cluster(degrees)
    config = TransformerConfig(
        num_layers=stages,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=overlap_grad_reduce,
        grad_reduce_in_fp32=True,
        bucket_size=bucket_elements,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = torch.nn.Module()
        for number, count in enumerate(num_elements):
            parameter = torch.nn.Parameter(torch.empty(count, dtype=torch.bfloat16, device="cuda"))
            if number in own_bucket:
                parameter.shared_embedding = True  # type: ignore[attr-defined]
            module.register_parameter(f"p{number}", parameter)
        ddp = DistributedDataParallel(config, settings, module)
    positions = {parameter: number for number, parameter in enumerate(module.parameters())}
    return [
        {"num_elements": bucket.grad_data.numel(), "parameters": [positions[p] for p in bucket.params_list]}
        for buffer in ddp.buffers
        for bucket in buffer.buckets
    ]


def check_layout(
    request: TraceRequest,
    layout: Mapping[str, int],
    global_batch_size: int,
    num_gpus: int | None,
    chunk_layers: Sequence[int],
) -> str:
    """`ok`, or why megatron-core refuses: batch calculator, groups, config, schedule, chunk with the fewest layers."""
    try:
        _check_layout(request, layout, global_batch_size, num_gpus, tuple(chunk_layers))
    except Exception as error:  # whatever Megatron raises is its answer
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return "ok"


def _check_layout(
    request: TraceRequest,
    layout: Mapping[str, int],
    global_batch_size: int,
    num_gpus: int | None,
    chunk_layers: tuple[int, ...],
) -> None:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from torch._subclasses.fake_tensor import FakeTensorMode

    names = ("tp", "pp", "vpp", "cp", "ep", "etp")
    tensor, pipeline, virtual, context, expert, expert_tensor = (layout.get(n, 1) for n in names)
    model_gpus = tensor * pipeline * context
    data = layout.get("dp") or (num_gpus or model_gpus) // model_gpus
    world = num_gpus or model_gpus * data
    batches = ConstantNumMicroBatchesCalculator(global_batch_size, request.micro_batch_size, data, False, 0).get()
    smallest = chunk_layers.index(min(chunk_layers)) if chunk_layers else 0
    group = world // pipeline
    degrees = Degrees(
        tensor=tensor, pipeline=pipeline, virtual=virtual, data=data, context=context, expert=expert,
        expert_tensor=expert_tensor, rank=(smallest % pipeline) * group, num_gpus=world,
    )  # fmt: skip
    axes = megatron_cluster.start_cluster(degrees)
    config = megatron_config.config_of(
        request, request.model.layer_kinds, degrees, Schedule(layers_of_chunks=chunk_layers)
    )
    recorder = Recorder(axes, fuse=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        run_schedule(config, degrees, batches, axes)
        with megatron_shims.recording(recorder):
            chunk = megatron_model.build_chunks(
                request, config, degrees, tied=request.model.tied_embeddings, only=smallest // pipeline
            )[0]
            batch = Batches(request)
            if chunk.pre_process:
                chunk.embedding(*batch.inputs)
