"""Live and peak bytes of traces beside those of torch's own MemTracker (`torch.distributed._tools.mem_tracker`)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
Figures = dict[str, dict[str, float]]


def also(case: str) -> Any:
    """A case that takes seconds and is like another."""
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Figures:
    """Of all cases that are asked for, from one process that both watch."""
    asked = {"plain", "ddp"}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            asked.add(str(item.callspec.params["case"]))
    command = [sys.executable, "-m", "tests.tracing.tracked_memory", *sorted(asked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "case", ["plain", also("bf16"), also("recompute"), also("fsdp2"), "fsdp2 recompute", also("transformers")]
)
def test_peaks_of_scripts(figures: Figures, case: str) -> None:
    """But for the rounding of every storage to 512 bytes."""
    ours, theirs = figures[case]["ours"], figures[case]["theirs"]
    assert 0 <= theirs - ours <= 2e-4 * theirs


def test_the_buckets_of_ddp_count_too(figures: Figures) -> None:
    """MemTracker sees nothing of what the C++ reducer allocates: one fp32 copy of every gradient."""
    buckets = figures["ddp"]["ours"] - figures["plain"]["ours"]
    assert figures["ddp"]["theirs"] == figures["plain"]["theirs"]
    parameters = 2 * 8192 * 512 + 3 * (12 * 512**2 + 13 * 512)
    assert buckets == 4 * parameters


@pytest.mark.parametrize(
    "case", [also("gpt"), "gpt fused", "llama tp2", "llama full", also("llama core_attn"), also("llama layernorm")]
)
def test_peaks_of_megatron_ranks(figures: Figures, case: str) -> None:
    ours, theirs = figures[case]["ours"], figures[case]["theirs"]
    assert 0 <= theirs - ours <= 2e-5 * theirs


@pytest.mark.parametrize(
    "case", [also("gpt"), "llama tp2", "llama full", also("llama core_attn"), also("llama layernorm")]
)
def test_live_bytes_at_every_op(figures: Figures, case: str) -> None:
    """Not only the peak: the sum of live storages after every kernel, but for rounding."""
    assert figures[case]["ops"] > 300
    assert figures[case]["spread"] <= 1e-5 * figures[case]["theirs"]
