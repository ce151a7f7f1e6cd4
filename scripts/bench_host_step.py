"""Time what the end of a step costs the host: python scripts/bench_host_step.py [megatron] [deepspeed] [lightning].

The real optimizers and loops run on the CPU over tensors of a few elements, so that the thread's time is interpreter,
dispatcher and launches. Megatron-core's optimizer is timed from the wait for the gradient norm on (what comes before is
launched while the GPU still works), DeepSpeed's as a whole (it waits for its overflow check first), PyTorch Lightning's
loop around a step of one linear layer. Megatron-core is in the environment; install the others beside it to time them
(`pip install --no-deps`): none is needed to run Echo Explore. Figures: docs/stacks.md.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

CASES = ("megatron", "deepspeed", "lightning")
REPEATS = 40
WARM = 5


def main() -> None:
    """Print a line a case; a process each, since they patch what the others use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=CASES, default=["megatron"])
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for case in arguments.cases:
        if arguments.here:
            {"megatron": megatron, "deepspeed": deepspeed, "lightning": lightning}[case]()
        else:
            subprocess.run([sys.executable, __file__, "--here", case], check=True)


def median_us(run: Callable[[], float]) -> float:
    """Median of what `run` returns in seconds, in microseconds."""
    return statistics.median(run() for _ in range(WARM + REPEATS)) * 1e6


def megatron() -> None:
    """Megatron-core's optimizers with Adam; per parameter, from the difference of two depths."""
    for sharded in (False, True):
        out = subprocess.run(
            [sys.executable, "-c", _MEGATRON.format(sharded=sharded)], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        print(f"megatron, distributed optimizer {sharded}: {out.strip()}", flush=True)


_MEGATRON = "from scripts.bench_host_step import megatron_optimizer; megatron_optimizer(sharded={sharded})"


def megatron_optimizer(*, sharded: bool, num_layers: int = 12) -> None:
    """Microseconds a parameter of one optimizer, after the gradient norm and to clear gradients."""
    import torch

    from scripts import bench_host

    bench_host.NUM_LAYERS = num_layers
    request = bench_host.request_of("megatron", "gpt", "fused", "flash", "none", 1)
    bench_host.on_the_cpu()
    _pretend_cuda()
    from echo_explore.tracing import megatron_cluster, megatron_config, megatron_model, megatron_rank
    from echo_explore.tracing.rank_request import RankRequest

    degrees = megatron_cluster.Degrees(tensor=1)
    megatron_cluster.start_cluster(degrees)
    schedule = megatron_config.Schedule(distributed_optimizer=sharded)
    config = megatron_config.config_of(request, request.model.layer_kinds, degrees, schedule)
    chunks = megatron_model.build_chunks(request, config, degrees, tied=False)
    model: Any = megatron_model.wrap(chunks, config, schedule)[0]
    job = RankRequest(
        trace=request, rank=0, pipeline_parallel=1, virtual_pipeline=1, data_parallel=1, num_micro_batches=1,
        chunk_layers=(num_layers,), distributed_optimizer=sharded, overlap_grad_reduce=False,
        overlap_param_gather=False, overlap_p2p=False, bucket_elements=40_000_000,
    )  # fmt: skip
    optimizer = megatron_rank._optimizer(job, [model], schedule)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.main_grad.normal_()
    bench_host.leave_cpu_mode()
    norm_at: list[float] = []
    item: Any = torch.Tensor.item

    def watched(tensor: Any) -> Any:
        norm_at.append(time.thread_time())
        return item(tensor)

    tensor_type: Any = torch.Tensor
    tensor_type.item = watched

    def run() -> float:
        norm_at.clear()
        optimizer.step()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        return time.thread_time() - norm_at[-1]

    each = median_us(run) / len(parameters)
    print(f"{each:.1f} us a parameter ({len(parameters)} of them)")


def _pretend_cuda() -> None:
    """Megatron asks tensors for CUDA types and makes some on CUDA by name: CPU tensors answer and are made."""
    import torch

    library: Any = torch
    tensor: Any = torch.Tensor
    kind = tensor.type

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")

    def on_cpu(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    tensor.type = named
    for name in ("zeros", "tensor", "empty"):
        setattr(library, name, on_cpu(getattr(library, name)))


def deepspeed() -> None:
    """DeepSpeed's FP16_Optimizer over a fused Adam."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer  # type: ignore[import-not-found,unused-ignore]

    parameters = [torch.nn.Parameter(torch.randn(16, dtype=torch.float16)) for _ in range(149)]
    adam = torch.optim.AdamW([{"params": parameters[:75]}, {"params": parameters[75:]}], fused=True)
    optimizer = FP16_Optimizer(adam, dynamic_loss_scale=True, clip_grad=1.0)

    def run() -> float:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        started = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - started

    print(f"deepspeed FP16_Optimizer: {median_us(run) / len(parameters):.1f} us a parameter", flush=True)


def lightning() -> None:
    """The loop of PyTorch Lightning around a step that does almost nothing, with its progress bar."""
    import pytorch_lightning  # type: ignore[import-not-found,unused-ignore]
    import torch

    torch.set_num_threads(1)
    starts: list[float] = []

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any, index: int) -> Any:
            starts.append(time.thread_time())
            loss = self.layer(batch).sum()
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pytorch_lightning.Trainer(
        max_steps=500, accelerator="cpu", enable_checkpointing=False, logger=False, enable_model_summary=False
    )
    batches: Any = torch.randn(600, 4)
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=1))
    steps = [after - before for before, after in itertools.pairwise(starts)][50:]
    print(f"lightning: {statistics.median(steps) * 1e3:.2f} ms a step", flush=True)


if __name__ == "__main__":
    main()
