"""Print the memory scores of docs/memory.md: python -m scripts.memory_report --data DIR [--limit N].

Three checks, without any step time:
- DIR/nanotron_sweep.csv: verdicts of fitting and reserved memory of 2,297 layouts, overall and in the band where a
  first-order estimate says 40 to 120 GiB;
- DIR/measured_steps.csv: runs with core = yes that are said not to fit, though they ran, by family;
- verdicts and reserved memory that Echo's authors logged of GPT-13B, 70B and 175B on cards of 79.33 GiB.

With --limit only every k-th row of a table, so that about N rows are left.
"""

import argparse
import csv
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from echo_explore.core import EchoError
from echo_explore.memory import MemoryProfile
from echo_explore.specs import Candidate, ModelSpec, ParallelConfig, TrainingRecipe, load_cluster, load_stack
from echo_explore.specs.candidate import make_candidate
from echo_explore.validation import map_row
from echo_explore.validation.mapping import Declined
from echo_explore.validation.rows import read_rows

GIB = 2.0**30
BAND_GIB = (40.0, 120.0)
ECHO_CARD_GIB = 79.33
ECHO_MODELS = {"GPT-13B": (40, 5120, 32), "GPT-70B": (80, 8192, 64), "GPT-175B": (96, 12288, 96)}
"""Layers, width and heads: Echo (arXiv 2412.12487, 2024), evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoRun:
    """A rank of a stage that Echo's authors ran alone on one GPU: one forward, one backward, one optimizer step.

    Attributes:
        model: of ECHO_MODELS.
        pipeline, tensor, data: layout.
        ran: the first rank of its process, alone on the GPU, did not run out of memory.
        precision: of the log.
        reserved_bytes: of that rank, behind its optimizer step; NaN where none is logged or layers do not divide.
    """

    model: str
    pipeline: int
    tensor: int
    data: int
    ran: bool
    precision: str = "fp32"
    reserved_bytes: float = math.nan


ECHO_RUNS = (
    EchoRun(model="GPT-13B", pipeline=8, tensor=1, data=1, ran=True, reserved_bytes=51_516_538_880),
    EchoRun(model="GPT-70B", pipeline=8, tensor=8, data=1, ran=True, reserved_bytes=32_520_536_064),
    EchoRun(model="GPT-70B", pipeline=6, tensor=8, data=1, ran=True),
    EchoRun(model="GPT-70B", pipeline=12, tensor=4, data=1, ran=True),
    EchoRun(model="GPT-175B", pipeline=12, tensor=8, data=1, ran=True, reserved_bytes=50_092_572_672),
    EchoRun(model="GPT-175B", pipeline=16, tensor=6, data=1, ran=True, reserved_bytes=47_846_522_880),
    EchoRun(model="GPT-70B", pipeline=4, tensor=8, data=2, ran=True, reserved_bytes=62_730_010_624),
    EchoRun(model="GPT-70B", pipeline=8, tensor=4, data=2, ran=True, reserved_bytes=57_814_286_336),
    EchoRun(model="GPT-175B", pipeline=12, tensor=4, data=1, ran=False),
    EchoRun(model="GPT-175B", pipeline=16, tensor=3, data=1, ran=False),
    EchoRun(model="GPT-175B", pipeline=8, tensor=6, data=1, ran=False, precision="fp16"),
)
"""Logs of fwyc0573/Megatron-LM, examples/run_log (MIT, 2024). One process runs rank after rank; where the second of a
stage (rank 17 of pp4 tp8 dp2, rank 9 of pp8 tp4 dp2) ran out of memory, 31 GiB of the ranks before it were still
allocated, by its own lines ("After memory release"), while the like rank before it had run: those two count as run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was measured and what is predicted of a run.

    Attributes:
        ran: it did not run out of memory.
        fits: it is said to fit; None where there is no prediction.
        reserved_gib, predicted_gib: NaN where nothing is stated or predicted.
        hard: it lies in the band.
    """

    ran: bool
    fits: bool | None
    reserved_gib: float = math.nan
    predicted_gib: float = math.nan
    hard: bool = False


def balanced_accuracy(verdicts: Sequence[Verdict]) -> float:
    """Mean of the shares of runs that ran and of those that did not, of which it is said; NaN if either is missing."""
    shares = []
    for ran in (True, False):
        right = [v.fits is ran for v in verdicts if v.ran is ran]
        shares.append(sum(right) / len(right) if right else math.nan)
    return sum(shares) / 2


def scores(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Figures of docs/memory.md; a run without a verdict counts as judged wrongly, without a figure as 100 % off."""
    ran = [v for v in verdicts if v.ran]
    errors = [
        1.0 if math.isnan(v.predicted_gib) else abs(v.predicted_gib / v.reserved_gib - 1)
        for v in ran
        if not math.isnan(v.reserved_gib)
    ]
    return {
        "coverage": sum(v.fits is not None for v in verdicts) / len(verdicts),
        "balanced_accuracy": balanced_accuracy(verdicts),
        "band_balanced_accuracy": balanced_accuracy([v for v in verdicts if v.hard]),
        "wrongly_refused": sum(v.fits is not True for v in ran) / len(ran) if ran else math.nan,
        "reserved_median_abs_error": statistics.median(errors) if errors else math.nan,
    }


Profile = Callable[[Candidate], MemoryProfile]


def _thinned(rows: list[dict[str, str]], limit: int | None) -> list[dict[str, str]]:
    return rows if limit is None else rows[:: max(1, len(rows) // limit)]


def _predicted(measured: Path, ids: Iterable[str], profile: Profile) -> dict[str, MemoryProfile]:
    """Profiles of the rows that can be mapped, one of each distinct candidate."""
    wanted, found = set(ids), {}
    known: dict[str, MemoryProfile] = {}
    for row in read_rows(measured):
        if row.id not in wanted:
            continue
        candidate = map_row(row)
        if isinstance(candidate, Declined):
            continue
        try:
            if candidate.hash not in known:
                known[candidate.hash] = profile(candidate)
        except EchoError:
            continue
        found[row.id] = known[candidate.hash]
    return found


def sweep(measured: Path, profile: Profile, limit: int | None) -> list[Verdict]:
    """Verdicts of a table with `status`, `mem_reserved_gib` and `first_order_gib`."""
    with measured.open(newline="", encoding="utf-8-sig") as file:
        rows = _thinned(list(csv.DictReader(file)), limit)
    found = _predicted(measured, (row["id"] for row in rows), profile)
    verdicts = []
    for row in rows:
        memory = found.get(row["id"])
        first = float(row["first_order_gib"] or "nan")
        verdicts.append(
            Verdict(
                ran=row["status"] == "success",
                fits=None if memory is None else memory.fits,
                reserved_gib=float(row["mem_reserved_gib"] or "nan"),
                predicted_gib=math.nan if memory is None else memory.reserved_bytes / GIB,
                hard=BAND_GIB[0] <= first <= BAND_GIB[1],
            )
        )
    return verdicts


def refused_runs(measured: Path, profile: Profile, limit: int | None) -> dict[str, tuple[int, int]]:
    """By family of runs that count: said not to fit, and predicted."""
    with measured.open(newline="", encoding="utf-8-sig") as file:
        rows = _thinned([row for row in csv.DictReader(file) if row["core"] == "yes"], limit)
    found = _predicted(measured, (row["id"] for row in rows), profile)
    refused = Counter(row["family"] for row in rows if row["id"] in found and not found[row["id"]].fits)
    total = Counter(row["family"] for row in rows if row["id"] in found)
    return {family: (refused[family], count) for family, count in sorted(total.items())}


def echo_candidate(run: EchoRun) -> Candidate:
    """The job of a run: sequence 2,048, one micro-batch of 2, dropout 0.1, unfused attention, nothing sharded."""
    layers, width, heads = ECHO_MODELS[run.model]
    cluster = load_cluster("a100-80gb-hdr")
    card = {"memory_bytes": ECHO_CARD_GIB * GIB}
    return make_candidate(
        model=ModelSpec(
            name=run.model, num_layers=layers, hidden_size=width, ffn_hidden_size=4 * width, num_attention_heads=heads,
            vocab_size=50257, max_sequence_length=2048,
        ),
        cluster=cluster.model_copy(update={"device": cluster.device.model_copy(update=card)}),
        layout=ParallelConfig(
            tensor_parallel=run.tensor, pipeline_parallel=run.pipeline, data_parallel=run.data
        ),
        recipe=TrainingRecipe(
            global_batch_size=2 * run.data, micro_batch_size=2, sequence_length=2048,
            precision="fp16" if run.precision == "fp16" else "fp32", attention="unfused", dropout=0.1,
            distributed_optimizer=False, overlap_grad_reduce=False,
        ),
        stack=load_stack("megatron-core").model_copy(update={"layer_split_rule": "remainder-first"}),
        num_gpus=run.tensor * run.pipeline * run.data,
    )  # fmt: skip


def echo_line(run: EchoRun, memory: MemoryProfile) -> str:
    """One line of the table: of the job, and of the rank of the first stage that was measured."""
    name = f"{run.model} pp{run.pipeline} tp{run.tensor} dp{run.data}"
    said, ran = ("yes" if verdict else "no" for verdict in (memory.fits, run.ran))
    first = (memory.stages[0].total_bytes - memory.outside_bytes) / GIB
    return (
        f"{name:26s} | {memory.peak_bytes / GIB:6.1f} | {said:3s} | {ran:3s} | {first:6.2f} | "
        f"{run.reserved_bytes / GIB:6.2f}"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured tables")
    parser.add_argument("--limit", type=int, help="about so many rows of each table")
    arguments = parser.parse_args()
    from echo_explore.simulate import default_simulator
    from echo_explore.tracing import CachedTracer

    with CachedTracer() as tracer:
        profile = default_simulator(tracer=tracer, allow_fallback=True).memory_of
        print("Echo's runs | GiB needed | said to fit | ran | GiB reserved, predicted | measured")
        for run in ECHO_RUNS:
            memory = profile(echo_candidate(run))
            print(echo_line(run, memory), flush=True)
        for family, (refused, count) in refused_runs(
            arguments.data / "measured_steps.csv", profile, arguments.limit
        ).items():
            print(f"{family:24s} {refused} of {count} that ran are said not to fit", flush=True)
        for name, value in scores(sweep(arguments.data / "nanotron_sweep.csv", profile, arguments.limit)).items():
            print(f"{name:26s} {value:.4f}")


if __name__ == "__main__":
    main()
