"""Step slowdowns of DistributedDataParallel on eight A100 that Echo published: contention, exposed traffic, or neither.

    python -m scripts.interference_study

Each model is predicted as it runs, without interference, and without communication. The published slowdown is set
against three readings: the step over the same step without communication (contention times exposed traffic), all
kernels of the step over the same alone, and the mean over kernels of the backward, each counted once, of its slowdown
while a bucket is reduced beside it. Batch and precision are not published; rows say what was taken.
docs/interference.md has the table.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_explore.graph import OpClass, Phase, TimedGraph, build_graph
from echo_explore.interference import Pairing, PairTable
from echo_explore.interference.pairing import scaled
from echo_explore.simulate import SimulationOptions, Simulator, WhatIf, default_simulator
from echo_explore.simulate.jobs import build_job
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate, JobOptions, candidate_of
from echo_explore.timeline import ChunkJob, PipelineJob, StageJob, simulate_step
from echo_explore.tracing import CachedTracer, TraceService
from echo_explore.tracing.request import request_of

GPT2 = """schema = 1
name = "gpt2"
architecture = "gpt"
num_layers = 12                  # Hugging Face gpt2 config.json (2019)
hidden_size = 768                # Hugging Face gpt2 config.json (2019)
ffn_hidden_size = 3072           # 4 x hidden_size
num_attention_heads = 12         # Hugging Face gpt2 config.json (2019)
vocab_size = 50257               # Hugging Face gpt2 config.json (2019)
max_sequence_length = 1024       # Hugging Face gpt2 config.json (2019)
normalization = "layernorm"
activation = "gelu"
position_embedding = "learned"
tied_embeddings = true
linear_bias = true
"""
BERT_LARGE = """schema = 1
name = "bert-large"
architecture = "gpt"             # a stack of the same layers; the mask costs nothing in unfused attention
num_layers = 24                  # BERT, arXiv 1810.04805 (2018), section 3
hidden_size = 1024               # arXiv 1810.04805 (2018), section 3
ffn_hidden_size = 4096           # 4 x hidden_size
num_attention_heads = 16         # arXiv 1810.04805 (2018), section 3
vocab_size = 30522               # Hugging Face bert-large-uncased config.json (2018)
max_sequence_length = 512        # Hugging Face bert-large-uncased config.json (2018)
normalization = "layernorm"
activation = "gelu"
position_embedding = "learned"
tied_embeddings = true
linear_bias = true
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of Echo's table 2 [arXiv 2412.12487, 2024]: one DGX A100, DistributedDataParallel.

    Attributes:
        overlapped_fraction: of the compute kernels.
        slowdown: of the step.
    """

    name: str
    model: str
    overlapped_fraction: float
    slowdown: float


ROWS = (
    Published(name="GPT-2", model=GPT2, overlapped_fraction=0.595, slowdown=1.481),
    Published(name="BERT-Large", model=BERT_LARGE, overlapped_fraction=0.592, slowdown=1.391),
)
VISION = Path(__file__).resolve().parent.parent / "examples" / "vision_step.py"
VISION_ROWS = (("VGG19", "vgg19", 1.377), ("ResNet-152", "resnet152", 1.435))
"""Further rows of the table: name, function of the script, slowdown."""
KERNEL_SLOWDOWN = 1.378
"""Mean over the four kernels of the same table under a 25 MB all-reduce: 1.142, 1.508, 1.269 and 1.613."""


def main() -> None:
    """Print one line a model and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 8, 16], help="sequences a GPU")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    args = parser.parse_args()
    print("model, precision, sequences a GPU: step ms; step over no traffic = contention x exposed; all kernels;")
    print("  mean over kernels of the backward beside a bucket; published")
    with tempfile.TemporaryDirectory(prefix="echo-study-") as folder, CachedTracer() as tracer:
        for row in ROWS:
            path = Path(folder) / f"{row.name}.toml"
            path.write_text(row.model, encoding="utf-8")
            for precision in args.precision:
                for batch in args.batch:
                    print(line(tracer, row, path, precision, batch, args.sequence_length), flush=True)
        for name, function, published in VISION_ROWS:
            print(vision_line(tracer, name, function, published), flush=True)
    for row in ROWS:
        needed = 1 + (row.slowdown - 1) / row.overlapped_fraction
        measured = 1 + (KERNEL_SLOWDOWN - 1) * row.overlapped_fraction
        print(
            f"{row.name}: read as contention alone, {row.overlapped_fraction:.1%} of the kernels would have to slow by "
            f"{needed:.2f}; they slow by {KERNEL_SLOWDOWN:.2f}, which makes {measured:.2f} of the step's {row.slowdown}"
        )


def line(tracer: CachedTracer, row: Published, model: Path, precision: str, batch: int, length: int) -> str:
    """What the model predicts for one row."""
    candidate = candidate_of(
        JobOptions(
            model=str(model),
            cluster="a100-40gb-hdr",
            layout="dp=8",
            num_gpus=8,
            global_batch_size=8 * batch,
            micro_batch_size=batch,
            sequence_length=length,
            precision=precision,
            framework="ddp",
            attention="unfused",
        )
    )
    simulator = default_simulator(tracer=tracer, interference="physical", allow_fallback=True)

    def predicted(**factors: float) -> tuple[float, float]:
        made = simulator.predict(candidate, SimulationOptions(what_if=WhatIf(factors=factors)))
        return made.step_time_s, made.breakdown["compute_s"]

    full, kernels = predicted()
    undisturbed, alone = predicted(interference=0.0)
    silent, _ = predicted(communication=0.0)
    return (
        f"{row.name}, {precision}, {batch}: {full * 1e3:.1f} ms; {full / silent:.3f} = {full / undisturbed:.3f} x "
        f"{undisturbed / silent:.3f}; {kernels / alone:.3f}; {mean_over_kernels(simulator, candidate):.3f}; "
        f"published {row.slowdown}"
    )


def mean_over_kernels(simulator: Simulator, candidate: Candidate) -> float:
    """Mean over the kernels of the backward of their slowdown beside the largest bucket."""
    pairing, pricer = start(simulator, candidate, WhatIf())
    trace = simulator.tracer.trace(request_of(candidate))
    chunk = build_job(candidate, trace, pricer, WhatIf()).stages[0].chunks[0]
    bucket = max(chunk.buckets, key=lambda b: b.message_bytes)
    rows = chunk.backward.pair_class[chunk.backward.graph.is_compute]
    return float(pairing.pair_table().compute[rows, bucket.pair_class].mean())


def start(simulator: Simulator, candidate: Candidate, what_if: WhatIf) -> tuple[Pairing, Pricer]:
    """A new job: its pairing, and the pricer that fills it."""
    pairing = simulator.interference.pairing(candidate.cluster.device)
    pricer = Pricer(
        candidate, compute=simulator.compute, collective=simulator.collective, what_if=what_if, pairing=pairing
    )
    return pairing, pricer


def vision_line(tracer: CachedTracer, name: str, function: str, published: float) -> str:
    """The same for a script of examples/vision_step.py: the whole rank as one graph, the host always ahead."""
    with TraceService() as service:
        graph = service.trace_script(VISION, function, world_size=8, rank=0)
    if not (graph.op_class == OpClass.CONVOLUTION).any():
        return (
            f"{name}: the trace has no class for its convolutions, so their FLOP are not priced; published {published}"
        )
    simulator = default_simulator(tracer=tracer, interference="physical", allow_fallback=True)
    candidate = candidate_of(
        JobOptions(
            model="gpt-22b",  # stands for nothing here: rows are priced by cluster and stack alone
            cluster="a100-40gb-hdr",
            layout="dp=8",
            num_gpus=8,
            global_batch_size=8,
            micro_batch_size=1,
            precision="fp32",
            framework="ddp",
        )
    )
    seconds, kernels, mean = {}, {}, 1.0
    for case, factors, disturbs in (
        ("full", {}, True),
        ("undisturbed", {}, False),
        ("silent", {"communication": 0.0}, False),
    ):
        pairing, pricer = start(simulator, candidate, WhatIf(factors=factors))
        timed, nothing = pricer.price(graph), pricer.price(build_graph(()))
        step = simulate_step(
            whole_graph_job(timed, nothing),
            interference=pairing if disturbs else NoFactors(pairing),
            fidelity="kernel",
        )
        seconds[case], kernels[case] = step.step_time_s, step.breakdown["compute_s"]
        if disturbs:
            largest = max(np.flatnonzero(graph.is_collective), key=lambda row: float(graph.message_bytes[row]))
            rows = graph.is_compute & (graph.phase == Phase.BACKWARD)
            mean = float(pairing.pair_table().compute[timed.pair_class[rows], timed.pair_class[largest]].mean())
    return (
        f"{name}, fp32, 32 images: {seconds['full'] * 1e3:.1f} ms; {seconds['full'] / seconds['silent']:.3f} = "
        f"{seconds['full'] / seconds['undisturbed']:.3f} x {seconds['undisturbed'] / seconds['silent']:.3f}; "
        f"{kernels['full'] / kernels['undisturbed']:.3f}; {mean:.3f}; published {published}"
    )


class NoFactors:
    """A pairing whose kernels and collectives do not disturb each other."""

    def __init__(self, pairing: Pairing) -> None:
        self._pairing = pairing
        self.reference, self.version = pairing.reference, pairing.version

    def pair_table(self) -> PairTable:
        """All 1."""
        return scaled(self._pairing.pair_table(), 0.0)


def whole_graph_job(timed: TimedGraph, nothing: TimedGraph) -> PipelineJob:
    """A step that is one graph on every rank."""
    stage = StageJob(
        label="every rank",
        multiplicity=8,
        chunks=(ChunkJob(forward=timed, backward=nothing),),
        send_forward_s=0.0,
        send_backward_s=0.0,
        send_sigma_log=0.0,
        epilogue=nothing,
    )
    return PipelineJob(
        stages=(stage,),
        schedule="no-pipelining",
        num_micro_batches=1,
        overlap_grad_reduce=True,
        overlap_param_gather=False,
        overlap_p2p=False,
        host_call_s=0.0,
        host_backward_call_s=0.0,
        host_step_s=0.0,
    )


if __name__ == "__main__":
    main()
