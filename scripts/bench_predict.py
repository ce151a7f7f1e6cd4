"""Time the predictions that the README promises; prints medians. By hand: python scripts/bench_predict.py [--search].

Cold: a new process with an empty state folder and empty compile caches, imports included. Warm: the same again. Call: a
prediction inside a process that has already made one.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from echo_explore.specs import JobOptions, candidate_of

COMMAND = [
    sys.executable, "-m", "echo_explore", "predict", "--model", "gpt3-175b", "--cluster", "h800-ndr",
    "--layout", "tp=8,pp=12", "--global-batch-size", "192", "--micro-batch-size", "1", "--json",
]  # fmt: skip


def timed(run: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def process_seconds(home: Path, *, repeats: int) -> tuple[float, float]:
    """Seconds of the first process with everything cold, and the median of `repeats` warm ones."""
    environment = os.environ | {"ECHO_EXPLORE_HOME": str(home / "state"), "XDG_CACHE_HOME": str(home / "cache")}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> None:
        subprocess.run(COMMAND, check=True, stdout=subprocess.DEVNULL, env=environment)

    return timed(run), statistics.median(timed(run) for _ in range(repeats))


def call_seconds(layout: str, num_gpus: int, *, global_batch_size: int, repeats: int) -> float:
    """Median seconds of a prediction in a process whose tracer and models are warm."""
    from echo_explore.simulate import default_simulator
    from echo_explore.tracing import CachedTracer

    candidate = candidate_of(
        JobOptions(
            model="gpt3-175b",
            cluster="h800-ndr",
            layout=layout,
            num_gpus=num_gpus,
            global_batch_size=global_batch_size,
            micro_batch_size=1,
        )
    )
    with CachedTracer() as tracer:
        simulator = default_simulator(tracer=tracer)
        simulator.predict(candidate)
        return statistics.median(timed(lambda: simulator.predict(candidate)) for _ in range(repeats))


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--search", action="store_true", help="also run the main search twice, first with nothing cached"
    )
    arguments = parser.parse_args()
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="echo-bench-") as folder:
        cold, warm = process_seconds(Path(folder), repeats=3)
        print(f"predict GPT-3 175B h800-ndr tp8 pp12 batch 192, cold process: {cold:.1f} s (asked: 30)")
        print(f"same, warm process, median of 3: {warm:.2f} s (asked: 3)")
    call = call_seconds("tp=8,pp=12", 96, global_batch_size=192, repeats=arguments.repeats)
    print(f"same, warm call, median of {arguments.repeats}: {call:.3f} s (asked: 0.2)")
    one = call_seconds("tp=8,pp=16", 128, global_batch_size=192, repeats=arguments.repeats)
    many = call_seconds("tp=8,pp=16", 128 * 128, global_batch_size=192 * 128, repeats=arguments.repeats)
    print(f"tp8 pp16 dp1 {one:.3f} s, dp128 {many:.3f} s, ratio {many / one:.2f} (asked: within 1.5)")
    if arguments.search:
        search_seconds()


def search_seconds() -> None:
    """Time the main search with traces and caches cold, then another seed with them warm."""
    space = "search_spaces/gpt3_175b_h800.toml"
    with tempfile.TemporaryDirectory(prefix="echo-bench-") as folder:
        environment = os.environ | {"ECHO_EXPLORE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
        for name, seed in (("cold", "0"), ("warm", "1")):
            command = [sys.executable, "-m", "echo_explore", "search", space, "--seed", seed]
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            print(f"search {space}, {name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
