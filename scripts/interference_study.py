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

from echo_explore.simulate import SimulationOptions, Simulator, WhatIf, default_simulator
from echo_explore.simulate.jobs import build_job
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import Candidate, JobOptions, candidate_of
from echo_explore.tracing import CachedTracer
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
    pairing = simulator.interference.pairing(candidate.cluster.device)
    pricer = Pricer(
        candidate,
        compute=simulator.compute,
        collective=simulator.collective,
        what_if=WhatIf(),
        pairing=pairing,
    )
    trace = simulator.tracer.trace(request_of(candidate))
    chunk = build_job(candidate, trace, pricer, WhatIf()).stages[0].chunks[0]
    bucket = max(chunk.buckets, key=lambda b: b.message_bytes)
    rows = chunk.backward.pair_class[chunk.backward.graph.is_compute]
    return float(pairing.pair_table().compute[rows, bucket.pair_class].mean())


if __name__ == "__main__":
    main()
