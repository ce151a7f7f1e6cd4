"""Regenerate docs/accuracy.md and docs/accuracy_rows.csv: python -m scripts.write_accuracy --data DIR.

Runs `validate steps` on DIR/measured_steps.csv unless predictions are given, and writes what it found. The rows file
holds what a reader needs to check a figure: id, citation, measured seconds, prediction.
"""

import argparse
import csv
import datetime
import os
import platform
import sys
import tempfile
from pathlib import Path

from echo_explore.core import write_atomic
from echo_explore.core.versions import MODEL_VERSION
from echo_explore.validation import Outcome, Scores, score

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- begin: written by scripts/write_accuracy.py -->", "<!-- end -->"


def predictions_of(data: Path) -> list[dict[str, str]]:
    """Predictions of every measured step, made now."""
    from echo_explore.simulate import default_simulator
    from echo_explore.tracing import CachedTracer
    from echo_explore.validation import validate_steps

    with tempfile.TemporaryDirectory() as folder, CachedTracer() as tracer:
        out = Path(folder) / "predicted.csv"
        simulator = default_simulator(tracer=tracer, allow_fallback=True)
        measured = data / "measured_steps.csv"
        validate_steps(measured, out, simulator.predict, progress=lambda text: print(text, file=sys.stderr))
        return read(out)


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def outcomes(measured: list[dict[str, str]], predicted: list[dict[str, str]]) -> list[Outcome]:
    """What was predicted for each run with core = yes."""
    by_id = {row["id"]: row for row in predicted}

    def number(row: dict[str, str], name: str) -> float | None:
        return float(row[name]) if row.get(name) else None

    return [
        Outcome(
            cells=row,
            measured_s=float(row["step_time_s"]),
            predicted_s=number(by_id[row["id"]], "step_time_s"),
            low_s=number(by_id[row["id"]], "step_time_low_s"),
            high_s=number(by_id[row["id"]], "step_time_high_s"),
            reason=by_id[row["id"]].get("reason", ""),
        )
        for row in measured
        if row.get("core") == "yes"
    ]


def table(scores: Scores) -> str:
    """The scores as Markdown."""
    lines = [
        f"MODEL_VERSION {MODEL_VERSION}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d}; "
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}.",
        "",
        "| figure | value |",
        "|---|---|",
    ]
    for name in scores.__dataclass_fields__:
        value = getattr(scores, name)
        if name not in ("families", "declined"):
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            lines.append(f"| {name} | {shown} |")
    lines += ["", "| family | runs | predicted | median error | mean error | bias |", "|---|---|---|---|---|---|"]
    for name, family in scores.families.items():
        bias = "" if family.bias is None else f"{family.bias:+.1%}"
        errors = f"{family.median_abs_error:.1%} | {family.mean_abs_error:.1%}"
        lines.append(f"| {name} | {family.num_rows} | {family.num_predicted} | {errors} | {bias} |")
    lines += ["", "| declined | why |", "|---|---|"]
    lines += [f"| {count} | {reason} |" for reason, count in scores.declined.items()]
    return "\n".join(lines)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with measured_steps.csv")
    parser.add_argument("--predictions", type=Path, help="what `validate steps` wrote; default: predict now")
    arguments = parser.parse_args()
    measured = read(arguments.data / "measured_steps.csv")
    predicted = read(arguments.predictions) if arguments.predictions else predictions_of(arguments.data)
    page = DOCS / "accuracy.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    text = f"{before}{BEGIN}\n{table(score(outcomes(measured, predicted)))}\n{END}{after}"
    write_atomic(page, text.encode())
    by_id = {row["id"]: row for row in predicted}
    rows = ["id,citation,measured_s,predicted_s"]
    for row in measured:
        if row.get("core") == "yes" and (seconds := by_id[row["id"]].get("step_time_s")):
            citation = row["source"].replace('"', "'")
            rows.append(f'{row["id"]},"{citation}",{row["step_time_s"]},{float(seconds):.6g}')
    write_atomic(DOCS / "accuracy_rows.csv", ("\n".join(rows) + "\n").encode())


if __name__ == "__main__":
    main()
