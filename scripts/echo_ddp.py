"""Echo's eight DDP times against predictions: python -m scripts.echo_ddp.

Four models on 128 A100 of 16 hosts, each on two fabrics (arXiv 2412.12487 (2024), table 10). Batch and precision are
not stated. Precision is taken as fp32 with TF32 convolutions, which the paper names for its other runs; the batch a GPU
is that of BATCHES whose prediction is nearest to the time on one fabric. What is predicted with it on the other fabric
is the check: nothing was chosen there.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from echo_explore.simulate import Simulator, default_simulator, predict_trace
from echo_explore.specs import ClusterSpec, load_cluster, load_stack
from echo_explore.specs.overrides import parse_overrides
from echo_explore.tracing import CachedTracer, TraceService

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NUM_GPUS = 128
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class Measured:
    """A model's times in milliseconds, and what Echo predicted of the second."""

    name: str
    script: str
    function: str
    slow_ms: float
    fast_ms: float
    echo_fast_ms: float


TIMES = (
    Measured("BERT-Large", "language_ddp.py", "bert_large", slow_ms=454.0, fast_ms=355.8, echo_fast_ms=376.6),
    Measured("GPT-2", "language_ddp.py", "gpt2", slow_ms=199.5, fast_ms=167.4, echo_fast_ms=176.9),
    Measured("VGG-19", "vision_ddp.py", "vgg19", slow_ms=529.9, fast_ms=485.6, echo_fast_ms=489.2),
    Measured("ResNet-152", "vision_ddp.py", "resnet152", slow_ms=351.1, fast_ms=335.7, echo_fast_ms=354.7),
)
"""On 100 Gbit/s and on 1.6 Tbit/s a host: arXiv 2412.12487 (2024), table 10."""


def fabrics() -> tuple[ClusterSpec, ClusterSpec]:
    """DGX A100 of 40 GB with one 100 Gbit/s card a host, and with eight of 200 Gbit/s."""
    fast = load_cluster("a100-40gb-hdr")
    changes = parse_overrides(("cluster.node.nics=1", "cluster.node.nic_bandwidth=100 Gbit/s"))
    slow = load_cluster("a100-40gb-hdr", changes)
    return slow, fast


def predictor(service: TraceService, simulator: Simulator, model: Measured) -> Callable[[int, ClusterSpec], float]:
    """Predicted milliseconds at a batch on a cluster; one trace a batch."""
    traces = {}
    source = (EXAMPLES / model.script).read_text(encoding="utf-8")

    def predicted(batch: int, cluster: ClusterSpec) -> float:
        if batch not in traces:
            changed = []
            for line in source.splitlines():
                name = line.partition(" = ")[0]
                changed.append(
                    f"{name} = {batch}" if name in ("BATCH", "SEQUENCES")
                    else "PRECISION = torch.float32" if name == "PRECISION" else line
                )  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / model.script
                file.write_text("\n".join(changed) + "\n", encoding="utf-8")
                traces[batch] = service.script_step(file, model.function, world_size=NUM_GPUS, rank=0)
        stack = load_stack("torch-ddp")
        return 1e3 * predict_trace(traces[batch], cluster=cluster, stack=stack, simulator=simulator).step_time_s

    return predicted


def nearest_batch(predicted: Callable[[int], float], wanted_ms: float) -> int:
    """The batch whose time is nearest to the wanted one in the log; times grow with the batch."""
    low, high = 0, len(BATCHES) - 1
    while low < high:
        middle = (low + high) // 2
        if predicted(BATCHES[middle]) < wanted_ms:
            low = middle + 1
        else:
            high = middle
    near = BATCHES[max(0, low - 1) : low + 1]
    return min(near, key=lambda batch: max(predicted(batch) / wanted_ms, wanted_ms / predicted(batch)))


def main() -> None:
    """Print the table, the batch chosen on either fabric."""
    slow, fast = fabrics()
    print("model      | chosen on | batch | 100 Gbit/s: measured, predicted | 1.6 Tbit/s: measured, predicted | Echo's")
    with CachedTracer() as tracer, TraceService() as service:
        simulator = default_simulator(tracer=tracer, allow_fallback=True)
        for model in TIMES:
            predicted = predictor(service, simulator, model)
            for name, cluster, wanted_ms in (("100 Gbit", slow, model.slow_ms), ("1.6 Tbit", fast, model.fast_ms)):
                batch = nearest_batch(lambda b, p=predicted, c=cluster: p(b, c), wanted_ms)  # type: ignore[misc]
                first, second = predicted(batch, slow), predicted(batch, fast)
                print(
                    f"{model.name:10s} | {name:9s} | {batch:5d} | {model.slow_ms:.1f} {first:.1f} "
                    f"({first / model.slow_ms - 1:+.1%}) | {model.fast_ms:.1f} {second:.1f} "
                    f"({second / model.fast_ms - 1:+.1%}) | {model.echo_fast_ms / model.fast_ms - 1:+.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
