"""Made-up tables of measured runs."""

import csv
from collections.abc import Sequence
from pathlib import Path

CELLS = {
    "id": "run-0", "framework": "megatron-core", "model_name": "GPT-7B", "num_layers": "32", "hidden_size": "4096",
    "num_heads": "32", "vocab_size": "50257", "seq_len": "2048", "gpu": "A100-80GB-SXM", "num_gpus": "8", "tp": "2",
    "pp": "2", "micro_batch": "1", "global_batch": "16", "precision": "bf16", "step_time_s": "1.5",
}  # fmt: skip
"""A run in the fewest columns."""


def write_table(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    """A table of runs that differ from `CELLS` in the given cells; ids are numbered."""
    full = [CELLS | {"id": f"run-{number}"} | row for number, row in enumerate(rows)]
    names = list(dict.fromkeys(name for row in full for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(full)
    return path
