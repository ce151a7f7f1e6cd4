"""Traces a small real Megatron model and cuts the second micro-batch, a steady one, into pieces."""

import gc
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from echo_explore.core import TraceError
from echo_explore.core.versions import TRACER_VERSION
from echo_explore.graph import OpRow, Parameter, Piece, Trace, build_graph, tensor_label
from echo_explore.specs.expert_legality import routing_of
from echo_explore.specs.recompute import traced_form
from echo_explore.tracing import megatron_cluster, megatron_config, megatron_model, megatron_shims
from echo_explore.tracing.grouped_experts import GroupedLinear
from echo_explore.tracing.megatron_cluster import Degrees
from echo_explore.tracing.megatron_config import Schedule
from echo_explore.tracing.megatron_schedule import Batches, Span, spans
from echo_explore.tracing.provenance import Mark
from echo_explore.tracing.quantise import quantiser_of
from echo_explore.tracing.recorder import Recorder
from echo_explore.tracing.request import TraceRequest
from echo_explore.tracing.storages import Kept

LAYERS_OF_A_KIND = 2  # the least that shows whether a layer equals its neighbour
NUM_MICRO_BATCHES = 2
AGAIN = "again."
"""What the name of the piece of a layer that runs again where others are kept starts with."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)")


def name_modules(recorder: Recorder, chunk: Any) -> None:
    """Give the recorder the path of every module; layer numbers count over the whole model."""
    layers = chunk.decoder.layers
    first_layer = layers[0].layer_number - 1 if len(layers) else 0
    for path, module in chunk.named_modules():
        match = _LAYER.match(path)
        layer = first_layer + int(match[1]) if match else -1
        generic = _LAYER.sub("decoder.layers.N", path)
        recorder.name_module(module, generic, layer, mark=generic == "decoder.layers.N")


def trace_pieces(request: TraceRequest, versions: dict[str, str]) -> Trace:
    """The pieces of a request.

    Raises:
        TraceError: the tracer or Megatron can't do it, or two layers of one kind differ.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    started = time.perf_counter()
    megatron_model.refuse_unsupported(request)
    names = _names(request)
    kinds = [name.partition(".")[2] for name in names]
    num_again = sum(name.startswith(AGAIN) for name in names)
    run = replace(request, recompute=f"full:block:{num_again}") if num_again else request
    # The smallest cluster that holds the groups: experts lie on tensor- and data-parallel ranks.
    experts = request.expert_parallel * request.expert_tensor_parallel
    degrees = Degrees(
        tensor=request.tensor_parallel,
        context=request.context_parallel,
        data=experts // math.gcd(experts, request.tensor_parallel * request.context_parallel),
        expert=request.expert_parallel,
        expert_tensor=request.expert_tensor_parallel,
        rank=_expert_rank(request) * request.expert_tensor_parallel,
    )
    axes = megatron_cluster.start_cluster(degrees)
    schedule = Schedule(narrow_gradients=request.narrow_gradients)
    config = megatron_config.config_of(run, kinds, degrees, schedule)
    quantiser = quantiser_of(request)
    recorder = Recorder(axes, fuse=request.fusion == "fused", quantiser=quantiser)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Untied: with several stages the last one holds its own copy of a tied matrix, and that is what the head is.
        chunks = megatron_model.build_chunks(request, config, degrees, tied=False)
        models = megatron_model.wrap(chunks, config, schedule)
        inner = models[0].module.module if config.bf16 or config.fp16 else models[0].module
        name_modules(recorder, inner)
        batches = Batches(request)
        found = _run(recorder, models, batches, request)
    change: dict[int, float] = {}
    if quantiser is not None and request.recompute != "full":  # a whole layer that is recomputed keeps its input only
        change = {
            n: size / NUM_MICRO_BATCHES
            for n, size in quantiser.saved_change_bytes.items()
            if n < 0 or not names[n].startswith(AGAIN)
        }
    cutter = _Cutter(recorder, found, inner, names, change)
    return Trace(
        key=request.key(versions),
        request=request.canonical(),
        pieces=cutter.pieces(),
        layer_kinds=request.model.layer_kinds,
        boundary_bytes=_boundary_bytes(request),
        oracles=tuple(recorder.host_syncs),
        facts={
            "versions": versions,
            "tracer_version": TRACER_VERSION,
            "elapsed_s": time.perf_counter() - started,
            "num_layers_compared": len(kinds),
            "workspace_bytes": cutter.workspace_bytes,
            "flop_convention": "executed; matrix products and attention only; flash backward = 2.5 forward",
        },
    )


def _names(request: TraceRequest) -> list[str]:
    """Pieces of the layers that are run: of each kind two; where some run again, first those that do."""
    kinds = [kind for kind in sorted(set(request.model.layer_kinds)) for _ in range(LAYERS_OF_A_KIND)]
    some = traced_form(request.recompute) != request.recompute
    return [f"{AGAIN}{kind}" for kind in kinds if some] + [f"layer.{kind}" for kind in kinds]


def _expert_rank(request: TraceRequest) -> int:
    """The expert-parallel rank that is played; without choice that whose experts get most."""
    if request.expert_rank >= 0:
        return request.expert_rank
    moe = request.model.moe
    return 0 if moe is None else routing_of(moe, request.expert_load).busiest(request.expert_parallel)


def _run(recorder: Recorder, models: list[Any], batches: Batches, request: TraceRequest) -> list[Span]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    collecting = gc.isenabled()
    gc.disable()  # when cycles are collected must not decide how much memory a trace shows
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),  # sequence numbers of autograd are per thread
            spans(recorder, models) as found,
            megatron_shims.recording(recorder),
        ):
            get_forward_backward_func()(
                forward_step_func=batches.step,
                data_iterator=None,
                model=models[0],
                num_microbatches=NUM_MICRO_BATCHES,
                seq_length=request.sequence_length,
                micro_batch_size=request.micro_batch_size,
                forward_only=False,
            )
    finally:
        if collecting:
            gc.enable()
    return found


def _boundary_bytes(request: TraceRequest) -> float:
    tokens = request.micro_batch_size * request.sequence_length // request.context_parallel
    if request.sequence_parallel:
        tokens //= request.tensor_parallel
    return float(tokens * request.model.hidden_size * megatron_config.DTYPES[request.precision].itemsize)


def move_rows(rows: Sequence[OpRow], first: int, last: int) -> list[OpRow]:
    """Rows [first, last) as rows of a graph of their own: references among them are shifted, others dropped."""

    def inside(row: int) -> int:
        return row - first if first <= row < last else -1

    return [
        replace(
            row,
            awaits=inside(row.awaits),
            forward_op=inside(row.forward_op),
            deps=tuple(inside(d) for d in row.deps if first <= d < last),
        )
        for row in rows[first:last]
    ]


def cut_rows(rows: Sequence[OpRow], first: int, last: int) -> list[OpRow]:
    """Rows [first, last) as rows of a piece, which knows neither its layer nor its micro-batch, nor what ran before."""
    cut = [replace(row, layer=min(row.layer, 0), micro_batch=-1, chunk=0) for row in move_rows(rows, first, last)]
    for row in cut[:1]:
        row.host_calls = 1
    numbers = {0: 0}
    for row in cut:  # layers have streams of their own: numbered as they come
        row.stream = numbers.setdefault(row.stream, len(numbers))
    return cut


def _work(rows: list[OpRow]) -> list[OpRow]:
    """The rows without what they do to memory: what a layer frees hangs on what comes before it."""
    return [replace(row, allocated_bytes=0.0, freed_bytes=0.0) for row in rows]


class _Cutter:
    """Cuts the last micro-batch at module boundaries."""

    def __init__(
        self, recorder: Recorder, found: list[Span], model: Any, names: Sequence[str],
        saved_change_bytes: dict[int, float],
    ) -> None:  # fmt: skip
        self._rows, self._levels, self._model, self._names = recorder.rows, recorder.storages.levels, model, names
        self._saved_change_bytes = saved_change_bytes
        self._forward, self._backward = found[-2], found[-1]
        if self._forward.backward or not self._backward.backward:
            raise TraceError("schedule: the last two steps are not a forward and its backward; a bug of the tracer")
        self.workspace_bytes = float(self._forward.live_bytes_before)
        span = self._forward
        marks = [m for m in recorder.marks if span.first_row <= m.row <= span.last_row]
        self._bounds = [self._mark(marks, "enter", n) for n in range(len(names))]
        self._bounds.append(self._mark(marks, "leave", len(names) - 1))
        self._backward_first, self._backward_last = self._backward_bounds()
        self._check_equal()

    @staticmethod
    def _mark(marks: list[Mark], what: str, layer: int) -> Mark:
        return next(m for m in marks if m.what == what and m.home.layer == layer)

    def _backward_bounds(self) -> tuple[list[int], list[int]]:
        """For each layer the first row of its backward, and the row behind its last."""
        start = self._backward.first_row
        layers = [row.layer for row in self._rows[start : self._backward.last_row]]
        first, last = [], []
        for layer in range(len(self._names)):
            here = [i for i, n in enumerate(layers) if n == layer]
            if not here or len(here) != here[-1] - here[0] + 1:
                raise TraceError(f"layer {layer}: its backward is not one run of ops, so it can't be cut out")
            first.append(start + here[0])
            last.append(start + here[-1] + 1)
        return first, last

    def _check_equal(self) -> None:
        for layer in range(0, len(self._names), LAYERS_OF_A_KIND):
            for what, rows in (("forward", self._forward_rows), ("backward", self._backward_rows)):
                a, b = (_work(cut_rows(self._rows, *rows(n))) for n in (layer, layer + 1))
                if a != b:
                    pairs = enumerate(zip(a, b, strict=False))
                    at = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
                    raise TraceError(
                        f"layers {layer} and {layer + 1}: their {what} differs from op {at} on; "
                        "one can't stand for the other"
                    )

    def _forward_rows(self, layer: int) -> tuple[int, int]:
        return self._bounds[layer].row, self._bounds[layer + 1].row

    def _backward_rows(self, layer: int) -> tuple[int, int]:
        return self._backward_first[layer], self._backward_last[layer]

    def _levels_between(self, first: int, last: int) -> tuple[int, int]:
        """Live bytes at the start of rows [first, last), and the most inside them."""
        inside = [(before, after) for row, before, after in self._levels if first <= row < last]
        if not inside:
            return 0, 0
        return inside[0][0], max(after for _, after in inside)

    def _piece(
        self, forward: tuple[int, int], backward: tuple[int, int], prefix: Sequence[str], saved: float,
        tensors: tuple[tuple[str, float], ...],
    ) -> Piece:  # fmt: skip
        forward_start, forward_peak = self._levels_between(*forward)
        backward_start, backward_peak = self._levels_between(*backward)
        return Piece(
            forward=build_graph(cut_rows(self._rows, *forward)),
            backward=build_graph(cut_rows(self._rows, *backward)),
            parameters=self._parameters(prefix),
            saved_bytes=saved,
            forward_peak_bytes=float(max(forward_peak - forward_start, 0)),
            backward_peak_bytes=float(max(backward_peak - backward_start, 0)),
            saved_tensors=tensors,
        )

    def _parameters(self, prefixes: Sequence[str]) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(
                **self._extents(path, parameter),
                name=re.sub(r"^decoder\.(layers\.\d+\.)?|^embedding\.", "", path),
                num_elements=parameter.numel(),
                tensor_sharded=bool(getattr(parameter, "tensor_model_parallel", False)),
                sequence_parallel=bool(getattr(parameter, "sequence_parallel", False)),
                expert=not getattr(parameter, "allreduce", True),
                trainable=parameter.requires_grad,
                embedding=bool(getattr(parameter, "is_embedding_or_output_parameter", False)),
            )
            for path, parameter in self._model.named_parameters()
            if path.startswith(tuple(prefixes))
        )

    def _extents(self, path: str, parameter: Any) -> dict[str, Any]:
        """Shape, what of it is split, and how many matrices lie in it.

        Experts share one tensor here, [h, e f] and [e f, h] or [e, in, out]; in Transformer Engine's place of it each
        has its own.
        """
        from megatron.core.transformer.moe.experts import GroupedMLP

        owner, _, name = path.rpartition(".")
        module, shape = self._model.get_submodule(owner), tuple(parameter.shape)
        if isinstance(module, GroupedLinear) and name == "weight":
            count, *each = shape
            return {"shape": tuple(each), "partition_dim": int(owner.endswith("linear_fc1")), "num_matrices": count}
        if isinstance(module, GroupedMLP):
            dim, count = int(name == "weight1"), module.num_local_experts
            one = tuple(size // count if i == dim else size for i, size in enumerate(shape))
            return {"shape": one, "partition_dim": dim, "num_matrices": count}
        return {"shape": shape, "partition_dim": int(getattr(parameter, "partition_dim", -1))}

    def pieces(self) -> dict[str, Piece]:
        """All pieces by name."""
        pieces = {}
        levels = [bound.kept.num_bytes for bound in self._bounds]
        pieces["embedding"] = self._piece(
            (self._forward.first_row, self._bounds[0].row),
            (self._backward_last[0], self._backward.last_row),
            ("embedding.",),
            float(levels[0]),
            self._tensors(self._bounds[0].kept, self._forward.first_row, self._bounds[0].row),
        )
        rest = self._forward.kept.num_bytes - levels[0]
        for layer in range(0, len(self._names), LAYERS_OF_A_KIND):
            # From its beginning to that of the next: what it frees of what was there, such as its input, counts too.
            saved = levels[layer + 1] - levels[layer]
            rest -= LAYERS_OF_A_KIND * saved
            change = self._saved_change_bytes.get(layer, 0.0)
            tensors = self._tensors(self._bounds[layer + 2].kept, *self._forward_rows(layer))
            pieces[self._names[layer]] = self._piece(
                self._forward_rows(layer),
                self._backward_rows(layer),
                (f"decoder.layers.{layer}.",),
                saved + change,
                (*tensors, *((("narrow copies in place of inputs", change),) if change else ())),
            )
        # What is left: at the end of the last layer its temporaries are still referenced, so that moment says less.
        change = self._saved_change_bytes.get(-1, 0.0)
        pieces["head"] = self._piece(
            (self._bounds[-1].row, self._forward.last_row),
            (self._backward.first_row, self._backward_first[-1]),
            ("decoder.final_layernorm.", "output_layer.", "mtp."),
            float(rest) + change,
            self._tensors(self._forward.kept, self._bounds[-1].row, self._forward.last_row),
        )
        return pieces

    def _tensors(self, kept: Kept, first: int, last: int) -> tuple[tuple[str, float], ...]:
        """Module and operator of what rows [first, last) made and is kept, with bytes; the largest first."""
        found: dict[str, float] = {}
        for row, size in kept.made_in(first, last):
            made = self._rows[row]
            name = tensor_label(made.module, made.name)
            found[name] = found.get(name, 0.0) + size
        return tuple(sorted(found.items(), key=lambda item: (-item[1], item[0])))
