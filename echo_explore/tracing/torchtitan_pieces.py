"""Traces torchtitan's Llama 3 under its own tensor parallelism, checkpoints and compiler, and cuts it into pieces.

As for plain PyTorch, pieces hold what a layer computes and exchanges over tensor- and context-parallel ranks; what
FSDP2 gathers and reduces follows from their parameters (`simulate/sharded_graph.py`).
"""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from echo_explore.core import TraceError
from echo_explore.core.versions import TRACER_VERSION
from echo_explore.graph import Axis, Trace
from echo_explore.specs.native_legality import differences_from_llama
from echo_explore.specs.recompute import recomputed_every
from echo_explore.tracing import fake_cluster
from echo_explore.tracing.megatron_config import DTYPES
from echo_explore.tracing.megatron_pieces import AGAIN, LAYERS_OF_A_KIND, _Cutter
from echo_explore.tracing.native_pieces import run_micro_batches
from echo_explore.tracing.native_rank import no_global_shapes
from echo_explore.tracing.recorder import Recorder
from echo_explore.tracing.request import TraceRequest, unsupported
from echo_explore.tracing.script_attention import fused_attention
from echo_explore.tracing.script_meshes import meshes_with_axes
from echo_explore.tracing.torchao_casts import casts_of, narrow_copies
from echo_explore.tracing.torchtitan_import import VERSION, titan
from echo_explore.tracing.torchtitan_model import ROTATIONS, build, parallel_dims, step_of, train_context

_CHECKPOINT = "_checkpoint_wrapped_module."
_LAYER = re.compile(r"layers\.(\d+)")
_NAMES = {
    "tok_embeddings": "embedding.word_embeddings",
    "norm": "decoder.final_layernorm",
    "output": "output_layer",
    "attention_norm": "input_layernorm",
    "attention": "self_attention",
    "ffn_norm": "pre_mlp_layernorm",
    "feed_forward": "mlp",
    "wq": "linear_qkv.0", "wk": "linear_qkv.1", "wv": "linear_qkv.2", "wo": "linear_proj",
    "w1": "linear_fc1.0", "w3": "linear_fc1.1", "w2": "linear_fc2",
    "inner_attention": "core_attention",
}  # fmt: skip
"""torchtitan's names of modules, and those of this package."""


def own_path(path: str) -> str:
    """A path in torchtitan's model as this package names it, with the number of its layer."""
    plain = path.replace(_CHECKPOINT, "").removesuffix(_CHECKPOINT[:-1]).removesuffix(".")
    parts = [_NAMES.get(part, part) for part in plain.split(".")]
    return ".".join(["decoder", *parts]) if parts[0] == "layers" else ".".join(parts)


class _Renamed:
    """The model's parameters as a rank holds them, under the names of this package."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = {own_path(path): module for path, module in model.named_modules()}

    def get_submodule(self, path: str) -> Any:
        """The module of a path of this package."""
        return self._modules[path]

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Path and local part; split ones say so, as Megatron's do."""
        for path, parameter in self._model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.tensor_model_parallel = local.numel() != parameter.numel()
            yield own_path(path), local


def name_modules(recorder: Recorder, model: Any) -> None:
    """Give the recorder the path of every module; products that read the same input have one name."""
    for path, module in model.named_modules():
        if not path:
            continue
        own = own_path(path)
        match = _LAYER.search(own)
        layer = int(match[1]) if match else -1
        generic = re.sub(r"(linear_(?:qkv|fc1))\.\d+", r"\1", _LAYER.sub("layers.N", own))
        is_layer = own == f"decoder.layers.{layer}" and not path.endswith(_CHECKPOINT[:-1])
        recorder.name_module(module, generic, layer, mark=is_layer)


def refuse_unsupported(request: TraceRequest) -> None:
    """Raise for what torchtitan's Llama 3 is not.

    Raises:
        TraceError: names the field, what is not supported, and a way out.
    """
    if reason := unsupported(request):
        raise TraceError(reason)
    for name, wrong in differences_from_llama(request.model, request.sequence_length):
        if wrong:
            raise TraceError(f"model.{name}: is not that of torchtitan's Llama 3; use --framework fsdp2 or megatron")
    if request.context_parallel > 1 and request.context_exchange not in ROTATIONS:
        raise TraceError(f"context_exchange = {request.context_exchange}: PyTorch has it not; use p2p or all_gather")
    if request.recompute not in ("none", "selective", "full") and not recomputed_every(request.recompute):
        rule = "torchtitan runs all layers again, or every N-th"
        raise TraceError(f"recompute = {request.recompute}: {rule}; use none, selective, full or full:every:N")
    if request.precision not in ("fp32", "bf16", "fp16", "fp8"):
        raise TraceError(f"precision = {request.precision}: is not traced for torchtitan; use bf16 or fp8")
    if request.attention == "unfused" or request.dropout:
        raise TraceError("attention: torchtitan runs flash attention without dropout; use --framework fsdp2")


def trace_pieces(request: TraceRequest, versions: dict[str, str]) -> Trace:
    """The pieces of a request.

    Raises:
        TraceError: the tracer can't do it, or two layers differ.
        MissingExtra: torchtitan is not installed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    started = time.perf_counter()
    refuse_unsupported(request)
    titan("models.llama3.infra.parallelize")  # before fake tensors: imports make tables of their own
    world_size = request.tensor_parallel * request.context_parallel
    fake_cluster.start(0, world_size)
    axes: dict[str, Axis] = {}
    quantiser = casts_of(request)
    recorder = Recorder(axes, fuse=request.fusion == "fused", quantiser=quantiser)
    narrow = DTYPES[request.precision]
    layers, run, num_again = ["layer.dense"] * LAYERS_OF_A_KIND, request, None
    if recomputed_every(request.recompute):  # pieces of both kinds, those that run again first
        layers = [f"{AGAIN}dense"] * LAYERS_OF_A_KIND + layers
        run, num_again = replace(request, recompute="full"), LAYERS_OF_A_KIND
    with meshes_with_axes(axes), fused_attention(), no_global_shapes(recorder):
        dims = parallel_dims(request, world_size=world_size)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build(run, dims, num_layers=len(layers), sharded=False, num_again=num_again)
            name_modules(recorder, model)
            with train_context(dims):
                found = run_micro_batches(recorder, step_of(request, dims, model), list(model.parameters()))
    narrow_copies(recorder.rows)
    cutter = _Cutter(recorder, found, _Renamed(model), layers, {})
    tokens = request.micro_batch_size * request.sequence_length // world_size
    return Trace(
        key=request.key(versions),
        request=request.canonical(),
        pieces=cutter.pieces(),
        layer_kinds=request.model.layer_kinds,
        boundary_bytes=float(tokens * request.model.hidden_size * narrow.itemsize),
        oracles=tuple(recorder.host_syncs),
        facts={
            "versions": versions | {"torchtitan": VERSION},
            "tracer_version": TRACER_VERSION,
            "elapsed_s": time.perf_counter() - started,
            "num_layers_compared": len(layers),
            "workspace_bytes": 0.0,
            "flop_convention": "executed; matrix products and attention only; flash backward = 2.5 forward",
        },
    )
