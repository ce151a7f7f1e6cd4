"""Time what a layer costs the host: the real framework on the CPU, with tensors so small that kernels take nothing.

By hand: python scripts/bench_host.py. A CUDA kernel is launched in 2 to 5 us; a CPU kernel of a few hundred elements
takes as long, so the thread's time of a layer stands for interpreter, modules, dispatcher, autograd and launches. It is
divided by the operators that the host dispatches for the same layer (`ExecutionGraph.host_calls`), which gives
`StackProfile.host_call_s` (forward and recomputation) and `host_backward_call_s`. Collectives run on a group that sends
nothing: what NCCL itself costs the host is left out. Figures: docs/stacks.md.

With --slices: what one slice of a collective over a list costs, its view as DeepSpeed's ZeRO-3 of 2021 makes it
(runtime/zero/partition_parameters.py, `_allgather_param`) and its copy out of the gathered array as PyTorch makes it
(`SliceSpec`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from echo_explore.graph import Phase
from echo_explore.specs import ModelSpec
from echo_explore.tracing import TraceService
from echo_explore.tracing.request import TraceRequest

NUM_LAYERS = 4
CASES = (
    ("megatron", "gpt", "eager", "unfused", "none", 1),
    ("megatron", "gpt", "eager", "unfused", "full", 1),
    ("megatron", "gpt", "eager", "unfused", "full", 8),
    ("megatron", "gpt", "fused", "unfused", "full", 1),
    ("megatron", "gpt", "fused", "unfused", "full", 8),
    ("megatron", "gpt", "fused", "flash", "none", 1),
    ("megatron", "llama", "fused", "flash", "none", 1),
    ("megatron", "llama", "fused", "flash", "none", 8),
    ("fsdp2", "llama", "eager", "flash", "none", 1),
    ("fsdp2", "gpt", "eager", "flash", "none", 1),
    ("fsdp2", "gpt", "eager", "unfused", "none", 1),
)
"""Framework, architecture, fusion, attention, recompute, tensor_parallel."""


def request_of(framework: str, architecture: str, fusion: str, attention: str, recompute: str, tensor: int) -> Any:
    """A layer of 8 heads of width 2 a rank and 16 tokens."""
    llama, hidden = architecture == "llama", 16 * tensor
    model = ModelSpec.model_validate(
        {
            "name": "tiny", "architecture": architecture, "num_layers": NUM_LAYERS, "hidden_size": hidden,
            "ffn_hidden_size": 4 * hidden, "num_attention_heads": 8 * tensor, "num_key_value_heads": 8 * tensor,
            "vocab_size": 128 * tensor, "max_sequence_length": 16, "tied_embeddings": False, "linear_bias": not llama,
            "normalization": "rmsnorm" if llama else "layernorm", "activation": "swiglu" if llama else "gelu",
            "position_embedding": "rope" if llama else "learned",
        }
    )  # fmt: skip
    return TraceRequest(
        model=model, framework=framework, tensor_parallel=tensor, sequence_parallel=tensor > 1 and llama,
        micro_batch_size=1, sequence_length=16, precision="bf16", attention=attention,  # type: ignore[arg-type]
        recompute=recompute, fusion=fusion, gradient_accumulation_fusion=False, dropout=False,  # type: ignore[arg-type]
    )  # fmt: skip


def on_the_cpu() -> None:
    """Make this process run traced programs for real: everything that asks for CUDA gets the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    from echo_explore.tracing import expert_ops, fake_cluster, fake_device, fused_ops, megatron_shims

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    module: Any = torch.nn.Module
    tensor: Any = torch.Tensor
    cuda: Any = torch.cuda
    apply = module._apply
    fake_device.install()
    module._apply = apply
    cuda.current_device = lambda: torch.device("cpu")
    tensor.cuda = module.cuda = lambda self, *_, **__: self
    fake_cluster.install()
    megatron_shims.before_import()
    for name, implementation in (fused_ops._IMPLEMENTATIONS | expert_ops.IMPLEMENTATIONS).items():
        fused_ops._libraries[0].impl(name, implementation, "CPU")
    megatron_shims.after_import()
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    OnCpu().__enter__()  # type: ignore[no-untyped-call]


def leave_cpu_mode() -> None:
    """Stop watching function calls, which costs time of its own; for what creates no tensors by device."""
    from torch.overrides import _pop_mode

    _pop_mode()  # type: ignore[no-untyped-call]


def layers_of(request: Any) -> tuple[Callable[[], Any], list[Any]]:
    """A function that runs the layers forward, and their parameters."""
    import torch

    tokens = request.sequence_length // (request.tensor_parallel if request.sequence_parallel else 1)
    x = torch.randn(tokens, 1, request.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    if request.framework == "megatron":
        from echo_explore.tracing import megatron_cluster, megatron_config, megatron_model
        from echo_explore.tracing.megatron_schedule import Batches

        degrees = megatron_cluster.Degrees(tensor=request.tensor_parallel)
        megatron_cluster.start_cluster(degrees)
        config = megatron_config.config_of(request, request.model.layer_kinds, degrees, megatron_config.Schedule())
        chunks = megatron_model.build_chunks(request, config, degrees, tied=False)
        model = megatron_model.wrap(chunks, config, megatron_config.Schedule())[0]
        inner = model.module.module
        rotary = inner.rotary_pos_emb(request.sequence_length) if request.model.position_embedding == "rope" else None
        mask = Batches(request)._mask
        return lambda: inner.decoder(x, mask, rotary_pos_emb=rotary), list(model.parameters())
    from echo_explore.tracing import native_model

    transformer = native_model.Transformer(request, NUM_LAYERS).to(torch.bfloat16)
    angles = native_model.rotary_angles(request)

    def forward() -> Any:
        hidden = x
        for layer in transformer.decoder.layers:
            hidden = layer(hidden, angles)
        return hidden

    return forward, list(transformer.parameters())


def layer_seconds(request: Any, *, repeats: int) -> tuple[float, float]:
    """Median thread seconds of one layer, forward and backward."""
    import torch

    on_the_cpu()
    forward, parameters = layers_of(request)
    forwards, backwards = [], []
    for number in range(repeats + 2):
        if number == 1 and request.attention == "flash":
            leave_cpu_mode()
        started = time.thread_time()
        out = forward()
        forwards.append(time.thread_time() - started)
        out = out[0] if isinstance(out, tuple) else out
        grad = torch.ones_like(out)
        started = time.thread_time()
        out.backward(grad)
        backwards.append(time.thread_time() - started)
        for parameter in parameters:
            parameter.grad = None
    return statistics.median(forwards[2:]) / NUM_LAYERS, statistics.median(backwards[2:]) / NUM_LAYERS


def calls(service: TraceService, request: Any) -> tuple[int, int, int]:
    """Operators that the host dispatches for a layer: forward, recomputed, backward."""
    piece = service.trace(request).pieces["layer.dense"]
    again = piece.backward.phase == Phase.RECOMPUTE
    backward = piece.backward.host_calls
    return int(piece.forward.host_calls.sum()), int(backward[again].sum()), int(backward[~again].sum())


def slice_seconds(*, num_ranks: int = 2048, repeats: int = 60) -> tuple[float, float]:
    """Seconds of the view and of the copy of one slice, medians."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    group = distributed.new_group(list(range(num_ranks)))
    width = 64
    flat, gathered = torch.zeros(num_ranks * width), torch.zeros(num_ranks, width)

    def views() -> list[torch.Tensor]:
        slices = []
        for rank in range(num_ranks):
            slices.append(flat.narrow(0, width * rank, width))
            if rank == distributed.get_rank(group=group):
                slices[rank].copy_(gathered[0], non_blocking=True)
        return slices

    def copies(slices: list[torch.Tensor]) -> None:
        for rank in range(num_ranks):
            slices[rank].copy_(gathered[rank], non_blocking=True)

    seconds: list[tuple[float, float]] = []
    for _ in range(repeats):
        start = time.thread_time()
        slices = views()
        middle = time.thread_time()
        copies(slices)
        seconds.append(((middle - start) / num_ranks, (time.thread_time() - middle) / num_ranks))
    distributed.destroy_process_group()
    return statistics.median(view for view, _ in seconds), statistics.median(copy for _, copy in seconds)


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--slices", action="store_true", help="time slices of a collective over a list instead")
    arguments = parser.parse_args()
    if arguments.slices:
        view_s, copy_s = slice_seconds(repeats=arguments.repeats)
        print(f"a slice: view {view_s * 1e6:.1f} us, copy {copy_s * 1e6:.1f} us")
        return
    if arguments.case:
        print(json.dumps(layer_seconds(request_of(*json.loads(arguments.case)), repeats=arguments.repeats)))
        return
    print("framework architecture fusion attention recompute tp | calls f/r/b | us a layer f, b | us a call f, b")
    with TraceService() as service:
        for case in CASES:
            command = [sys.executable, __file__, "--repeats", str(arguments.repeats), "--case", json.dumps(case)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            forward_s, backward_s = json.loads(done.stdout.splitlines()[-1])
            ahead, again, back = calls(service, request_of(*case))
            each = forward_s / ahead
            print(
                *case, f"| {ahead} {again} {back} | {forward_s * 1e6:.0f} {backward_s * 1e6:.0f} |",
                f"{each * 1e6:.1f} {(backward_s - again * each) / back * 1e6:.1f}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
