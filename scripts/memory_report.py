"""Print the memory scores of docs/memory.md: python -m scripts.memory_report --data DIR [--limit N].

Three checks, without any step time:
- DIR/nanotron_sweep.csv: verdicts of fitting and reserved memory of 2,297 layouts, overall and in the band where a
  first-order estimate says 40 to 120 GiB;
- DIR/measured_steps.csv: runs with core = yes that are said not to fit, though they ran, by family;
- verdicts that Echo's authors published of GPT-70B and GPT-175B on cards of 79.33 GiB, in fp32 with unfused attention.

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
ECHO_VERDICTS = (
    ("GPT-13B", 8, 1, 1, True), ("GPT-70B", 8, 8, 1, True), ("GPT-70B", 6, 8, 1, True), ("GPT-70B", 12, 4, 1, True),
    ("GPT-175B", 12, 8, 1, True), ("GPT-175B", 16, 6, 1, True),
    ("GPT-70B", 4, 8, 2, False), ("GPT-70B", 8, 4, 2, False), ("GPT-175B", 12, 4, 1, False),
    ("GPT-175B", 16, 3, 1, False), ("GPT-175B", 8, 6, 1, False),
)  # fmt: skip
"""Model, pipeline, tensor, data, and whether it ran: logs of fwyc0573/Megatron-LM, examples/run_log (MIT, 2024)."""


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


def echo_candidate(model: str, pipeline: int, tensor: int, data: int) -> Candidate:
    """A run of Echo's evaluation: sequence 2,048, micro-batch 2, one micro-batch a replica, fp32, nothing sharded."""
    layers, width, heads = ECHO_MODELS[model]
    cluster = load_cluster("a100-80gb-hdr")
    card = {"memory_bytes": ECHO_CARD_GIB * GIB}
    return make_candidate(
        model=ModelSpec(
            name=model, num_layers=layers, hidden_size=width, ffn_hidden_size=4 * width, num_attention_heads=heads,
            vocab_size=50257, max_sequence_length=2048,
        ),
        cluster=cluster.model_copy(update={"device": cluster.device.model_copy(update=card)}),
        layout=ParallelConfig(tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data),
        recipe=TrainingRecipe(
            global_batch_size=2 * data, micro_batch_size=2, sequence_length=2048, precision="fp32",
            attention="unfused", distributed_optimizer=False, overlap_grad_reduce=False,
        ),
        stack=load_stack("megatron-core").model_copy(update={"layer_split_rule": "remainder-first"}),
        num_gpus=tensor * pipeline * data,
    )  # fmt: skip


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
        print("Echo's verdicts | predicted, GiB | said to fit | ran")
        for *layout, ran in ECHO_VERDICTS:
            model, pipeline, tensor, data = layout
            memory = profile(echo_candidate(model, pipeline, tensor, data))  # type: ignore[arg-type]
            said = "yes" if memory.fits else "no"
            name = f"{model} pp{pipeline} tp{tensor} dp{data}"
            print(f"{name:26s} | {memory.peak_bytes / GIB:6.1f} | {said:3s} | {'yes' if ran else 'no'}", flush=True)
        for family, (refused, count) in refused_runs(
            arguments.data / "measured_steps.csv", profile, arguments.limit
        ).items():
            print(f"{family:24s} {refused} of {count} that ran are said not to fit", flush=True)
        for name, value in scores(sweep(arguments.data / "nanotron_sweep.csv", profile, arguments.limit)).items():
            print(f"{name:26s} {value:.4f}")


if __name__ == "__main__":
    main()
