"""Regenerate docs/accuracy.md, its pictures and docs/accuracy_rows.csv: python -m scripts.accuracy_report --data DIR.

Runs `validate steps` on DIR/measured_steps.csv unless predictions are given, and writes what it found: per family, GPU
and scale, what explains the bias of a family, ranking, the worst runs. The rows file holds what a reader needs to check
a figure: id, citation, measured seconds, prediction, interval, verdict.
"""

import argparse
import csv
import datetime
import math
import os
import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from echo_explore.core import write_atomic
from echo_explore.core.versions import MODEL_VERSION
from echo_explore.validation import Outcome, Scores, score
from echo_explore.validation.score import MIN_LAYOUTS, WORKLOAD
from scripts.accuracy_fits import Run, fit_scalars, fitted, leave_one_family_out
from scripts.svg_plot import ratio_chart

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- begin: written by scripts/accuracy_report.py -->", "<!-- end -->"
PARTS = ("compute", "tensor", "context", "expert", "data", "pipeline", "bubble", "host", "optimizer")
"""Parts of a predicted step that exclude each other; recomputation and interference are inside compute."""
NUM_WORST = 25
Row = dict[str, str]


def predictions_of(measured: Path) -> list[Row]:
    """Predictions of every measured step, made now."""
    from echo_explore.simulate import default_simulator
    from echo_explore.tracing import CachedTracer
    from echo_explore.validation import validate_steps

    with tempfile.TemporaryDirectory() as folder, CachedTracer() as tracer:
        out = Path(folder) / "predicted.csv"
        simulator = default_simulator(tracer=tracer, allow_fallback=True)
        validate_steps(measured, out, simulator.predict, progress=lambda text: print(text, file=sys.stderr))
        return read(out)


def read(path: Path) -> list[Row]:
    """Rows of a CSV file."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def _number(row: Row, name: str) -> float | None:
    return float(row[name]) if row.get(name) else None


def runs_of(measured: Sequence[Row], predicted: Mapping[str, Row]) -> list[Run]:
    """What was predicted for each run with core = yes."""
    runs = []
    for row in measured:
        if row.get("core") != "yes":
            continue
        found = predicted[row["id"]]
        outcome = Outcome(
            cells=row,
            measured_s=float(row["step_time_s"]),
            predicted_s=_number(found, "step_time_s"),
            low_s=_number(found, "step_time_low_s"),
            high_s=_number(found, "step_time_high_s"),
            reason=found.get("reason", ""),
        )
        runs.append(Run(outcome=outcome, compute_s=_number(found, "compute_s") or 0.0))
    return runs


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures(headline: Scores, fits: Scores, left_out: Scores) -> str:
    """The scores side by side."""
    rows = []
    for name in headline.__dataclass_fields__:
        if name not in ("families", "declined"):
            values = [getattr(scores, name) for scores in (headline, fits, left_out)]
            rows.append([name, *(f"{v:.4f}" if isinstance(v, float) else str(v) for v in values)])
    return markdown(["figure", "headline", "one scalar a GPU", "the same, its family left out"], rows)


def families(scores: Scores) -> str:
    """Errors by family."""
    rows = []
    for name, family in scores.families.items():
        bias = "" if family.bias is None else f"{family.bias:+.1%}"
        errors = [f"{family.median_abs_error:.1%}", f"{family.mean_abs_error:.1%}"]
        rows.append([name, str(family.num_rows), str(family.num_predicted), *errors, bias])
    return markdown(["family", "runs", "predicted", "median error", "mean error", "bias"], rows)


def by_group(runs: Sequence[Run], name: str, key: Callable[[Run], str]) -> str:
    """Errors of the predicted runs by anything else."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if (error := run.outcome.error) is not None:
            groups[key(run)].append(error)
    rows = []
    for group, errors in sorted(groups.items()):
        median = statistics.median(map(abs, errors))
        rows.append([group, str(len(errors)), f"{median:.1%}", f"{statistics.median(errors):+.1%}"])
    return markdown([name, "predicted", "median error", "bias"], rows)


def scale_of(run: Run) -> str:
    """The number of GPUs, in classes that sort by their text."""
    count, low = int(run.outcome.cells["num_gpus"]), 1
    for edge in (8, 64, 256, 1024):
        if count <= edge:
            return f"{low} to {edge} GPUs".rjust(18)
        low = edge + 1
    return f"{low} GPUs and more".rjust(18)


def shares(row: Row) -> dict[str, float]:
    """Share of the predicted step by part."""
    total = float(row["step_time_s"])
    return {part: (_number(row, f"{part}_s") or 0.0) / total for part in PARTS}


def explanation(runs: Sequence[Run], predicted: Mapping[str, Row]) -> str:
    """By family: where the predicted time goes, and the part whose share goes with the error, by rank correlation."""
    rows = []
    for family in sorted({run.family for run in runs}):
        those = [run for run in runs if run.family == family and run.outcome.predicted_s is not None]
        if not those:
            continue
        parts = [shares(predicted[run.outcome.cells["id"]]) for run in those]
        mean = {part: statistics.mean(p[part] for p in parts) for part in PARTS}
        errors = [run.outcome.error or 0.0 for run in those]
        cells = [f"{mean[part]:.0%}" if mean[part] >= 0.005 else "" for part in PARTS]
        rows.append([family, f"{statistics.median(errors):+.1%}", *cells, _moves(errors, parts)])
    return markdown(["family", "bias", *PARTS, "error moves with"], rows)


def _moves(errors: Sequence[float], parts: Sequence[Mapping[str, float]]) -> str:
    """The part whose share has the strongest rank correlation with the error; nothing below 0.5 or 10 runs."""
    if len(errors) < 10:
        return ""
    found = {}
    for part in PARTS:
        values = [p[part] for p in parts]
        if max(values) - min(values) >= 0.02:
            found[part] = statistics.correlation(_ranks(values), _ranks(errors))
    part = max(found, key=lambda p: abs(found[p]), default="")
    return f"{part} ({found[part]:+.2f})" if part and abs(found[part]) >= 0.5 else ""


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def worst(runs: Sequence[Run], predicted: Mapping[str, Row]) -> str:
    """The predicted runs that are furthest off, with their largest parts."""
    off = sorted(
        (run for run in runs if run.outcome.predicted_s is not None),
        key=lambda run: -abs(math.log((run.outcome.predicted_s or 1.0) / run.outcome.measured_s)),
    )
    rows = []
    for run in off[:NUM_WORST]:
        cells = run.outcome.cells
        largest = sorted(shares(predicted[cells["id"]]).items(), key=lambda item: -item[1])[:3]
        layout = f"tp{cells['tp']} pp{cells['pp']} dp{cells['dp']} mb{cells['micro_batch']}"
        seconds = [f"{run.outcome.measured_s:.3g}", f"{run.outcome.predicted_s:.3g}", f"{run.outcome.error:+.0%}"]
        rows.append(
            [cells["id"], f"{cells['gpu']} x {cells['num_gpus']}", layout, *seconds,
             ", ".join(f"{part} {share:.0%}" for part, share in largest)]
        )  # fmt: skip
    return markdown(["run", "GPUs", "layout", "measured, s", "predicted, s", "error", "largest parts"], rows)


def pair_spread(runs: Sequence[Run]) -> str:
    """How far the errors of two layouts of one workload lie apart: what `search.ties.TIE_LOG` is taken from."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for run in runs:
        if run.outcome.predicted_s is not None:
            workload = tuple(run.outcome.cells[name] for name in WORKLOAD)
            groups[workload].append(math.log(run.outcome.predicted_s / run.outcome.measured_s))
    used = [errors for errors in groups.values() if len(errors) >= MIN_LAYOUTS]
    apart = sorted(abs(x - y) for errors in used for i, x in enumerate(errors) for y in errors[:i])
    count = sum(map(len, used))
    if not apart:
        return "No workload has enough layouts to compare."
    return (
        f"Errors of two layouts of one workload lie at most {apart[int(0.8 * len(apart))]:.3f} apart in the log in "
        f"8 of 10 pairs ({len(used)} workloads, {count} runs)."
    )


def declined(scores: Scores) -> str:
    """Why runs are declined."""
    return markdown(["declined", "why"], [[str(count), reason] for reason, count in scores.declined.items()])


def does_not_fit(measured: Sequence[Row], predicted: Mapping[str, Row]) -> str:
    """All measured runs fitted: predictions that one does not are errors."""
    total = [row for row in measured if predicted.get(row["id"], {}).get("fits")]
    wrong: dict[str, int] = defaultdict(int)
    for row in total:
        wrong[row["family"]] += predicted[row["id"]]["fits"] == "False"
    names = ", ".join(f"{name} {count}" for name, count in sorted(wrong.items()) if count)
    return f"{sum(wrong.values())} of {len(total)} predicted runs are said not to fit: {names or 'none'}."


def page(measured: Sequence[Row], predicted: Mapping[str, Row], runs: Sequence[Run]) -> str:
    """The generated part of the page."""
    headline = score([run.outcome for run in runs])
    scalars = fit_scalars(runs)
    fits, left_out = score(fitted(runs, scalars)), score(leave_one_family_out(runs))
    clocks = ", ".join(f"{gpu} {factor:.2f}" for gpu, factor in sorted(scalars.items()) if factor != 1.0)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    blocks = [
        f"MODEL_VERSION {MODEL_VERSION}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d}; {machine}.",
        figures(headline, fits, left_out),
        f"Factors on the time of kernels in the second column (not shipped): {clocks or 'all 1'}.",
        "## By family", families(headline),
        "![predicted over measured, by family](images/accuracy_families.svg)",
        "## By GPU", by_group(runs, "GPU", lambda run: run.gpu),
        "## By scale", by_group(runs, "scale", scale_of),
        "![predicted over measured, by GPUs](images/accuracy_scale.svg)",
        "## Ranking", pair_spread(runs),
        "## What explains the bias",
        "Mean share of the predicted step by part (of communication what is exposed), and the part whose share goes\n"
        "with the error of a run (rank correlation of 0.5 and more).",
        explanation(runs, predicted),
        "## Memory", does_not_fit(measured, predicted),
        "## Declined", declined(headline),
        "## Worst runs", worst(runs, predicted),
    ]  # fmt: skip
    return "\n\n".join(blocks)


def rows_file(runs: Sequence[Run]) -> str:
    """docs/accuracy_rows.csv."""
    lines = ["id,citation,measured_s,predicted_s,low_s,high_s,verdict"]
    for run in runs:
        cells, outcome = run.outcome.cells, run.outcome
        citation = cells["source"].replace('"', "'")
        start = f'{cells["id"]},"{citation}",{cells["step_time_s"]}'
        if outcome.predicted_s is None:
            lines.append(start + ',,,,"declined: ' + outcome.reason.replace('"', "'") + '"')
        else:
            verdict = "inside" if outcome.hit else "above" if outcome.measured_s > (outcome.high_s or 0.0) else "below"
            numbers = (outcome.predicted_s, outcome.low_s or 0.0, outcome.high_s or 0.0)
            lines.append(start + "," + ",".join(f"{n:.6g}" for n in numbers) + f",{verdict}")
    return "\n".join(lines) + "\n"


def pictures(runs: Sequence[Run]) -> dict[str, str]:
    """SVG by file name."""
    done = [run for run in runs if run.outcome.predicted_s is not None]

    def ratio(run: Run) -> float:
        return (run.outcome.predicted_s or 0.0) / run.outcome.measured_s

    names = sorted({run.family for run in done})
    places = {name: [ratio(run) for run in done if run.family == name] for name in names}
    sizes = sorted({int(run.outcome.cells["num_gpus"]) for run in done})
    by_size = {str(size): [ratio(run) for run in done if int(run.outcome.cells["num_gpus"]) == size] for size in sizes}
    return {
        "accuracy_families.svg": ratio_chart("predicted over measured step time, by source", places),
        "accuracy_scale.svg": ratio_chart("predicted over measured step time, by GPUs", by_size),
    }


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with measured_steps.csv")
    parser.add_argument("--predictions", type=Path, help="what `validate steps` wrote; default: predict now")
    arguments = parser.parse_args()
    measured = read(arguments.data / "measured_steps.csv")
    made = (
        read(arguments.predictions) if arguments.predictions else predictions_of(arguments.data / "measured_steps.csv")
    )
    predicted = {row["id"]: row for row in made}
    runs = runs_of(measured, predicted)
    target = DOCS / "accuracy.md"
    before, rest = target.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    write_atomic(target, f"{before}{BEGIN}\n{page(measured, predicted, runs)}\n{END}{after}".encode())
    write_atomic(DOCS / "accuracy_rows.csv", rows_file(runs).encode())
    for name, text in pictures(runs).items():
        write_atomic(DOCS / "images" / name, text.encode())


if __name__ == "__main__":
    main()
