"""Step slowdowns of DistributedDataParallel on eight A100 that Echo published: contention, exposed traffic, or neither.

    python -m scripts.interference_study [--precision fp32 bf16] [--batch 2 16 64] [--pcie]

Each model (`examples/language_ddp.py`, `examples/vision_ddp.py`) is traced once a batch and precision and predicted as
it runs, without interference, and without communication. The published slowdown is set against three readings: the step
over the same step without communication (contention times exposed traffic), all kernels of the step over the same
alone, and the mean over kernels that run beside an all-reduce, each counted once, of its slowdown. Batch and precision
are not published; rows say what was taken. docs/interference.md has the table.
"""

import argparse
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_explore.graph import RankTrace
from echo_explore.simulate import SimulationOptions, Simulator, WhatIf, default_simulator, graph_timeline
from echo_explore.simulate.graph_step import GraphTimeline
from echo_explore.specs import ClusterSpec, load_cluster, load_stack
from echo_explore.specs.overrides import parse_overrides
from echo_explore.timeline import Span
from echo_explore.timeline.ops import Stream
from echo_explore.tracing import CachedTracer, TraceService

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
PCIE = ("cluster.node.link=pcie", "cluster.node.link_bandwidth=32 GB/s", "cluster.node.in_network_reduction=false")
"""PCIe 4.0 x16: 16 GT/s on 16 lanes [PCI-SIG, 2017]."""
KERNEL_SLOWDOWN = 1.378
"""Mean over the four kernels of Echo's table 2 under a 25 MB all-reduce: 1.142, 1.508, 1.269 and 1.613."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of Echo's table 2 [arXiv 2412.12487, 2024]: one host of eight A100, DistributedDataParallel.

    Attributes:
        script: example that trains the model.
        function: of the script.
        overlapped_fraction: of the compute kernels.
        slowdown: of the step.
    """

    name: str
    script: str
    function: str
    overlapped_fraction: float
    slowdown: float


ROWS = (
    Published(name="GPT-2", script="language", function="gpt2", overlapped_fraction=0.595, slowdown=1.481),
    Published(name="BERT-Large", script="language", function="bert_large", overlapped_fraction=0.592, slowdown=1.391),
    Published(name="VGG19", script="vision", function="vgg19", overlapped_fraction=0.575, slowdown=1.377),
    Published(name="ResNet-152", script="vision", function="resnet152", overlapped_fraction=0.579, slowdown=1.435),
)


def main() -> None:
    """Print one line a model, batch and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 16, 64], help="sequences or images a GPU")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=sorted(DTYPES))
    parser.add_argument("--pcie", action="store_true", help="join the GPUs by PCIe instead of NVLink")
    args = parser.parse_args()
    cluster = load_cluster("a100-40gb-hdr", parse_overrides(PCIE if args.pcie else ()))
    print(
        "| model | precision, samples a GPU | step ms | over no traffic = contention x exposed | all kernels |", end=""
    )
    print(" kernels beside a bucket, their share | published |")
    with CachedTracer() as tracer, TraceService() as service:
        simulator = default_simulator(tracer=tracer)
        for row in ROWS:
            for precision in args.precision:
                for batch in args.batch:
                    trace = traced(service, row, batch=batch, precision=precision)
                    print(line(simulator, cluster, trace, row, f"{precision}, {batch}"), flush=True)
    for row in ROWS:
        needed = 1 + (row.slowdown - 1) / row.overlapped_fraction
        print(
            f"{row.name}: read as contention alone, {row.overlapped_fraction:.1%} of the kernels would have to slow by "
            f"{needed:.2f}; the table's four slow by {KERNEL_SLOWDOWN:.2f}"
        )


def traced(service: TraceService, row: Published, *, batch: int, precision: str) -> RankTrace:
    """One step of the example with its batch and precision changed, as rank 0 of 8."""
    text = (EXAMPLES / f"{row.script}_ddp.py").read_text(encoding="utf-8")
    text = re.sub(r"^(BATCH|SEQUENCES) = \d+$", rf"\1 = {batch}", text, flags=re.MULTILINE)
    text = re.sub(r"^PRECISION = .*$", f"PRECISION = {DTYPES[precision]}", text, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="echo-study-") as folder:
        path = Path(folder) / "step.py"
        path.write_text(text, encoding="utf-8")
        return service.script_step(path, row.function, world_size=8, rank=0)


def line(simulator: Simulator, cluster: ClusterSpec, trace: RankTrace, row: Published, what: str) -> str:
    """What the model predicts for one row, as a line of a table."""
    stack = load_stack("torch-ddp")

    def run(*, spans: bool = False, **factors: float) -> GraphTimeline:
        options = SimulationOptions(what_if=WhatIf(factors=factors))
        return graph_timeline(
            trace, cluster=cluster, stack=stack, simulator=simulator, options=options, record_spans=spans
        )

    full, undisturbed, silent = run(spans=True), run(interference=0.0), run(communication=0.0)
    steps = [r.step.step_time_s for r in (full, undisturbed, silent)]
    kernels = full.step.breakdown["compute_s"] / undisturbed.step.breakdown["compute_s"]
    mean, share = beside_collectives(full)
    return (
        f"| {row.name} | {what} | {steps[0] * 1e3:.0f} | {steps[0] / steps[2]:.3f} = {steps[0] / steps[1]:.3f} x "
        f"{steps[1] / steps[2]:.3f} | {kernels:.3f} | {mean:.2f}, {share:.0%} | {row.slowdown} |"
    )


def beside_collectives(run: GraphTimeline) -> tuple[float, float]:
    """Mean slowdown of the kernels that run beside a collective, each counted once, and their share of all kernels."""
    graph = run.timed.graph
    alone_s = run.timed.time_s[graph.is_compute & (run.timed.time_s > 0)]
    kernels = [span for span in run.step.spans if span.stream == Stream.COMPUTE]
    assert len(kernels) == len(alone_s), "one span a kernel, in the order of the program"
    start, end = (np.array([getattr(span, name) for span in kernels]) for name in ("start_s", "end_s"))
    beside = np.zeros(len(kernels), np.bool_)
    for other in transfers(run):
        beside |= (start < other.end_s) & (end > other.start_s)
    if not beside.any():
        return 1.0, 0.0
    return float(((end - start) / alone_s)[beside].mean()), float(beside.mean())


def transfers(run: GraphTimeline) -> list[Span]:
    """Spans of collectives over data-parallel ranks."""
    return [span for span in run.step.spans if span.stream == Stream.DATA]


if __name__ == "__main__":
    main()
