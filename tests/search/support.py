"""Spaces and shortcuts that several tests of the search share."""

import io
from pathlib import Path
from typing import Any

from echo_explore.search.run import SearchOptions, SearchResult, run_search
from echo_explore.search.space import ResolvedSpace, resolve_space
from echo_explore.specs import load_space
from echo_explore.testing.fakes import FakeFactory, Faults

ROOT = Path(__file__).resolve().parents[2]
MAIN_SPACE = ROOT / "search_spaces/gpt3_175b_h800.toml"

SMALL = """
schema = 1
model = "gpt3-175b"
cluster = "h800-ndr"
[cluster_size]
num_gpus = 96
[recipe]
sequence_length = 2048
global_batch_size = 192
[search]
tensor_parallel = [4, 8]
pipeline_parallel = [6, 12, 24]
virtual_pipeline = [1, 2]
micro_batch_size = [1, 2]
recompute = ["selective", "full"]
sequence_parallel = [true]
"""


def write_space(folder: Path, text: str = SMALL, name: str = "small") -> Path:
    """The space as a file."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def resolved(path: Path) -> ResolvedSpace:
    """The space of a file."""
    return resolve_space(load_space(str(path)))


def fake_search(path: Path, *, faults: Faults | None = None, cache: str = "", **options: Any) -> SearchResult:
    """A search with the fake evaluator, without Ray unless an address is given."""
    factory = FakeFactory(space=resolved(path), faults=faults or Faults(), cache=cache)
    settings = {"address": "none"} | options
    return run_search(SearchOptions(space=str(path), **settings), factory=factory, stream=io.StringIO())


def ledger_lines(result: SearchResult) -> list[str]:
    """The lines of a study's ledger."""
    return (result.folder / "ledger.jsonl").read_text().splitlines()
