"""How long the timeline takes, against the figures it has to keep. Run by hand: `python scripts/bench_timeline.py`.

The job is GPT-3 175B in shape: tp8, 96 layers of 19 forward and 56 backward rows (as traced with selective
recomputation and sequence parallelism), its times made up; what is measured is the engine, not the prediction.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from echo_explore.graph import Collective, Phase, TimedGraph
from echo_explore.interference import ConstantInterference
from echo_explore.testing.strategies import Item, split_backward, timed_graph
from echo_explore.timeline import (
    ChunkJob,
    GradientBucket,
    ParameterGather,
    PipelineJob,
    StageJob,
    program,
    simulate_step,
)
from echo_explore.timeline.engine import run_events

LAYERS = 96
FORWARD_ROWS, BACKWARD_ROWS = 19, 56
MODEL = ConstantInterference()


def layer(rows: int, *, seed: int) -> list[Item]:
    """Kernels with a synchronous collective every seventh row and an overlapped one every ninth."""
    random = np.random.default_rng(seed)
    items: list[Item] = []
    for number in range(rows):
        seconds = float(random.uniform(20e-6, 400e-6))
        if number % 9 == 4 and number + 2 < rows:
            items.append(("async", seconds))
        elif number % 9 == 6:
            items.append(("wait", 0.0))
        else:
            items.append(("sync", seconds / 4) if number % 7 == 3 else ("gemm", seconds))
    return items


def job(*, pp: int, vpp: int, micro_batches: int, data_parallel: bool, schedule: str = "") -> PipelineJob:
    """The job of so many stages, chunks and micro-batches."""
    per_chunk = LAYERS // (pp * vpp)
    forward: TimedGraph = timed_graph(layer(FORWARD_ROWS, seed=1) * per_chunk)
    backward = timed_graph(layer(BACKWARD_ROWS, seed=2) * per_chunk, phase=Phase.BACKWARD)
    buckets = tuple(
        GradientBucket(
            collective=Collective.REDUCE_SCATTER, message_bytes=1e8, time_s=4e-3, sigma_log=0.1, ready_after=row
        )
        for row in range(BACKWARD_ROWS - 1, backward.graph.num_ops, BACKWARD_ROWS)
    )
    gathers = tuple(
        ParameterGather(message_bytes=1e8, time_s=4e-3, sigma_log=0.1, needed_before=row)
        for row in range(0, forward.graph.num_ops, FORWARD_ROWS)
    )
    leads = [number % 3 != 1 for number in range(backward.graph.num_ops)]
    chunk = ChunkJob(
        forward=forward,
        backward=backward,
        split=split_backward(backward, leads) if schedule else None,
        buckets=buckets if data_parallel else (),
        gathers=gathers if data_parallel else (),
    )
    stage = StageJob(
        label="stage",
        multiplicity=8,
        chunks=(chunk,) * vpp,
        send_forward_s=1e-4,
        send_backward_s=1e-4,
        send_sigma_log=0.1,
        epilogue=timed_graph([("model", 1e-4), ("optimizer", 5e-3)], phase=Phase.OPTIMIZER),
    )
    return PipelineJob(
        stages=(stage,) * pp,
        schedule=schedule or ("interleaved" if vpp > 1 else "1f1b"),
        num_micro_batches=micro_batches,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        overlap_p2p=vpp > 1,
        host_call_s=0.0,
        host_backward_call_s=0.0,
        host_step_s=0.0,
    )


def best_of(action: Callable[[], object], *, times: int = 20) -> float:
    """Seconds of the fastest of several calls, the first of which warms up."""
    action()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def engine_seconds(what: PipelineJob) -> tuple[float, int]:
    """Seconds of the engine alone on every op of a job, and how many these are."""
    runs: list[tuple[Any, ...]] = []

    def keep(*arguments: Any) -> int:
        runs.append(arguments)
        return run_events(*arguments)

    with patch.object(program, "run_events", keep):
        simulate_step(what, interference=MODEL, fidelity="kernel", fold=False)
    longest = max(runs, key=lambda arguments: arguments[0].shape[0])
    return best_of(lambda: run_events(*longest)), longest[0].shape[0]


def main() -> None:
    """Print every figure beside what is asked for."""
    main_job = job(pp=8, vpp=3, micro_batches=64, data_parallel=False)

    def run(what: PipelineJob, fidelity: str = "kernel", *, fold: bool = True) -> float:
        return simulate_step(what, interference=MODEL, fidelity=fidelity, fold=fold).step_time_s  # type: ignore[arg-type]

    def show(name: str, seconds: float, asked: str) -> None:
        print(f"{name:62s} {seconds * 1e3:9.1f} ms   asked: {asked}")

    show("64 GPUs, pp8 vpp3, 64 micro-batches, folded", best_of(lambda: run(main_job)), "100 ms")
    whole = simulate_step(main_job, interference=MODEL, fidelity="kernel", fold=False)
    unfolded_s = best_of(lambda: run(main_job, fold=False), times=2)
    show(f"the same, every op ({whole.num_simulated_ops / 1e6:.2f} M ops)", unfolded_s, "500 ms")
    print(f"{'  op events a second':62s} {whole.num_simulated_ops / unfolded_s / 1e6:9.2f} M    asked: -")
    engine_s, num_ops = engine_seconds(main_job)
    print(f"{'  of the engine alone':62s} {num_ops / engine_s / 1e6:9.2f} M    asked: 3 M")
    error = abs(run(main_job) / whole.step_time_s - 1)
    print(f"{'  folded against every op, relative':62s} {error:9.1e}      asked: 1e-6")
    show("the same, fidelity block", best_of(lambda: run(main_job, "block")), "1 ms")
    large = job(pp=16, vpp=1, micro_batches=8, data_parallel=True)
    show("131,072 GPUs, tp8 pp16 dp1024, batch 8,192", best_of(lambda: run(large)), "1,000 ms")
    few = best_of(lambda: run(replace(main_job, num_micro_batches=64)))
    many = best_of(lambda: run(replace(main_job, num_micro_batches=1024)))
    print(f"{'1,024 micro-batches against 64':62s} {many / few:9.2f} x    asked: 2 x")
    for schedule, vpp in (("gpipe", 1), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)):
        other = job(pp=8, vpp=vpp, micro_batches=64, data_parallel=False, schedule=schedule)
        show(f"64 GPUs, {schedule}", best_of(lambda other=other: run(other)), "-")  # type: ignore[misc]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'peak memory of this process':62s} {peak:9.2f} GiB  asked: 1 GiB")


if __name__ == "__main__":
    main()
