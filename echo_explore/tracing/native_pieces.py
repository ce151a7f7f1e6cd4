"""Traces a small model in plain PyTorch and cuts its second micro-batch into pieces.

Pieces hold computation and tensor-parallel collectives. What FSDP2 gathers and reduces, and DDP's buckets, follow from
the parameters of the pieces (`simulate/sharded_job.py`); whole ranks under the real `fully_shard` are the check.
"""

import contextlib
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from echo_explore.core import TraceError
from echo_explore.core.versions import TRACER_VERSION
from echo_explore.graph import Axis, Phase, Trace
from echo_explore.specs.recompute import traced_form
from echo_explore.tracing import fake_cluster, megatron_shims, native_parallel
from echo_explore.tracing.megatron_config import DTYPES
from echo_explore.tracing.megatron_pieces import AGAIN, LAYERS_OF_A_KIND, NUM_MICRO_BATCHES, _Cutter
from echo_explore.tracing.megatron_schedule import Span
from echo_explore.tracing.native_model import Transformer, rotary_angles
from echo_explore.tracing.quantise import quantiser_of
from echo_explore.tracing.recorder import Recorder
from echo_explore.tracing.request import TraceRequest, unsupported

_LAYER = re.compile(r"decoder\.layers\.(\d+)(?:\.block)?")
_PART = re.compile(r"(linear_(?:qkv|fc1))\.\d+")


def refuse_unsupported(request: TraceRequest) -> None:
    """Raise for what is not traced in plain PyTorch.

    Raises:
        TraceError: names the field, what is not supported, and a way out.
    """
    model = request.model
    if reason := unsupported(request):
        raise TraceError(reason)
    refusals = (
        (model.moe is not None, "model.moe", "mixtures of experts are traced for megatron only"),
        (
            0 < model.attention_window < request.sequence_length or model.attention_sink,
            "model.attention_window",
            "sliding windows and sinks are traced for megatron only",
        ),
        (model.mla is not None, "model.mla", "multi-latent attention is traced for megatron only"),
        (model.multi_token_prediction_layers > 0, "model.multi_token_prediction_layers", "they are not traced yet"),
        (request.context_parallel > 1, "layout.cp", "context parallelism is not traced for plain PyTorch yet"),
        (
            request.tensor_parallel > 1 and not request.sequence_parallel, "layout.sp",
            "tensor parallelism of plain PyTorch is traced with sequence parallelism only; use sp=1",
        ),
        (
            request.tensor_parallel > 1 and model.position_embedding == "learned", "layout.tp",
            "learned positions are not traced under tensor parallelism of plain PyTorch; use tp=1",
        ),
        (
            request.attention == "flash" and request.precision == "fp32", "attention",
            "flash attention kernels take bf16 and fp16 only; use unfused with fp32",
        ),
        (
            request.framework == "ddp" and request.recompute == "selective", "recompute",
            "selective is traced for fsdp2 only; use none or full",
        ),
    )  # fmt: skip
    for wrong, field_name, reason in refusals:
        if wrong:
            raise TraceError(f"{field_name}: {reason}")


def name_modules(recorder: Recorder, model: Transformer) -> None:
    """Give the recorder the path of every module, without the wrapper of checkpoints and with products by one name."""
    for path, module in model.named_modules():
        match = _LAYER.match(path)
        layer = int(match[1]) if match else -1
        generic = _PART.sub(r"\1", _LAYER.sub("decoder.layers.N", path))
        is_layer = path == f"decoder.layers.{layer}"
        recorder.name_module(module, generic, layer, mark=is_layer)


def trace_pieces(request: TraceRequest, versions: dict[str, str]) -> Trace:
    """The pieces of a request.

    Raises:
        TraceError: the tracer can't do it, or two layers differ.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    started = time.perf_counter()
    refuse_unsupported(request)
    fake_cluster.start(0, request.tensor_parallel)
    native_parallel.use_group(None)
    axes = {dist.group.WORLD.group_name: Axis.TENSOR}  # type: ignore[union-attr]
    quantiser = quantiser_of(request)
    recorder = Recorder(axes, fuse=request.fusion == "fused", quantiser=quantiser)
    names = ["layer.dense"] * LAYERS_OF_A_KIND
    run = request
    if traced_form(request.recompute) != request.recompute:  # some layers run again, those ahead of the rest
        names = [f"{AGAIN}dense"] * LAYERS_OF_A_KIND + names
        run = replace(request, recompute=f"full:block:{LAYERS_OF_A_KIND}")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(run, len(names))
        name_modules(recorder, model)
        found = _run(recorder, model, run)
    change: dict[int, float] = {}
    if quantiser is not None and request.recompute not in ("selective", "full"):
        sizes = quantiser.saved_change_bytes.items()
        change = {n: size / NUM_MICRO_BATCHES for n, size in sizes if n < 0 or not names[n].startswith(AGAIN)}
    cutter = _Cutter(recorder, found, model, names, change)
    tokens = request.micro_batch_size * request.sequence_length // request.tensor_parallel
    return Trace(
        key=request.key(versions),
        request=request.canonical(),
        pieces=cutter.pieces(),
        layer_kinds=request.model.layer_kinds,
        boundary_bytes=float(tokens * request.model.hidden_size * DTYPES[request.precision].itemsize),
        oracles=tuple(recorder.host_syncs),
        facts={
            "versions": versions,
            "tracer_version": TRACER_VERSION,
            "elapsed_s": time.perf_counter() - started,
            "num_layers_compared": len(names),
            "workspace_bytes": 0.0,
            "flop_convention": "executed; matrix products and attention only; flash backward = 2.5 forward",
        },
    )


def build_model(request: TraceRequest, num_layers: int, *, wide: bool = False) -> Transformer:
    """The model of one rank: FSDP2 computes in the narrow type, DDP keeps fp32 parameters under autocast.

    Args:
        request: the model.
        num_layers: as many.
        wide: parameters in fp32 for FSDP2 too, as it shards them.
    """
    dtype = torch.float32 if wide or request.framework == "ddp" else DTYPES[request.precision]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            model = Transformer(request, num_layers)
    finally:
        torch.set_default_dtype(before)
    for name, parameter in model.named_parameters():
        is_split = request.tensor_parallel > 1 and "norm" not in name
        parameter.tensor_model_parallel = is_split  # type: ignore[attr-defined]
    return model


@contextlib.contextmanager
def autocast(request: TraceRequest) -> Iterator[None]:
    """torch.autocast where the stack uses it."""
    if request.framework == "ddp" and request.precision != "fp32":
        with torch.autocast("cuda", dtype=DTYPES[request.precision]):
            yield
    else:
        yield


def _run(recorder: Recorder, model: Transformer, request: TraceRequest) -> list[Span]:
    tokens = torch.zeros(request.sequence_length, request.micro_batch_size, dtype=torch.int64, device="cuda")
    angles = rotary_angles(request)

    def forward() -> torch.Tensor:
        with autocast(request):
            loss: torch.Tensor = model(tokens, angles)
        return loss

    reduced = list(model.parameters()) if request.framework == "fsdp2" else []
    return run_micro_batches(recorder, forward, reduced)


def run_micro_batches(
    recorder: Recorder, forward: Callable[[], torch.Tensor], reduced: Sequence[torch.Tensor]
) -> list[Span]:
    """Run forward and backward of each micro-batch.

    Args:
        recorder: of the trace.
        forward: of one micro-batch, to its loss.
        reduced: parameters whose gradients are reduced, and so freed, after each backward.

    Returns:
        What rows each forward and backward are.
    """
    found: list[Span] = []

    def span(number: int, *, backward: bool, run: Any) -> Any:
        recorder.flush()
        recorder.phase = Phase.BACKWARD if backward else Phase.FORWARD
        recorder.micro_batch = number
        row, live = len(recorder.rows), recorder.storages.live_bytes
        recorder.since_row = row
        result = run()
        recorder.flush()
        found.append(
            Span(
                backward=backward, micro_batch=number, chunk=0, first_row=row, last_row=len(recorder.rows),
                live_bytes_before=live, kept=recorder.storages.kept_since(row),
            )
        )  # fmt: skip
        return result

    collecting = gc.isenabled()
    gc.disable()  # when cycles are collected must not decide how much memory a trace shows
    try:
        with torch.autograd.set_multithreading_enabled(False), megatron_shims.recording(recorder):
            for number in range(NUM_MICRO_BATCHES):
                loss = span(number, backward=False, run=forward)
                span(number, backward=True, run=loss.backward)
                del loss
                for parameter in reduced:
                    parameter.grad = None
    finally:
        if collecting:
            gc.enable()
    return found
