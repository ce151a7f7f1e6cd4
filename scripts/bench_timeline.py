"""How long the timeline takes, against the figures it has to keep. Run by hand: `python scripts/bench_timeline.py`.

The jobs are GPT-3 175B with selective recomputation and sequence parallelism on A100s, traced from Megatron-core and
priced as `predict` prices them, physical interference included. Wall time and CPU time of the fastest of several warm
calls; other jobs on the machine touch the latter less.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal
from unittest.mock import patch

from echo_explore.simulate import WhatIf, default_simulator
from echo_explore.simulate.jobs import build_job
from echo_explore.simulate.pricing import Pricer
from echo_explore.specs import JobOptions, candidate_of
from echo_explore.timeline import InterferenceModel, PipelineJob, StepTimeline, program, simulate_step
from echo_explore.timeline.engine import run_events
from echo_explore.tracing import CachedTracer
from echo_explore.tracing.request import request_of

CLUSTER = "a100-80gb-hdr"
MORE_NODES = ("cluster.max_nodes=16384",)
"""The largest job is larger than any such cluster that was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job as the timeline gets it, and how its kernels and collectives slow each other down."""

    job: PipelineJob
    interference: InterferenceModel

    def run(self, fidelity: Literal["kernel", "block"] = "kernel", *, fold: bool = True) -> StepTimeline:
        """One call of the timeline."""
        return simulate_step(self.job, interference=self.interference, fidelity=fidelity, fold=fold)


@cache
def case(layout: str, *, batch: int, schedule: str = "auto") -> Case:
    """GPT-3 175B in that layout, a sequence a micro-batch."""
    candidate = candidate_of(
        JobOptions(
            model="gpt3-175b",
            cluster=CLUSTER,
            layout=layout,
            global_batch_size=batch,
            micro_batch_size=1,
            recompute="selective",
            schedule=schedule,
            overrides=MORE_NODES,
        )
    )
    with CachedTracer() as tracer:
        simulator = default_simulator(tracer=tracer)
        pairing = simulator.interference.pairing(candidate.cluster.device)
        pricer = Pricer(
            candidate,
            compute=simulator.compute,
            collective=simulator.collective,
            what_if=WhatIf(),
            pairing=pairing,
        )
        job = build_job(candidate, tracer.trace(request_of(candidate)), pricer, WhatIf())
    return Case(job=job, interference=pairing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds of a call."""

    wall_s: float
    cpu_s: float


def best_of(action: Callable[[], object], *, times: int = 20) -> Took:
    """The fastest of several calls, after one that warms up."""
    action()
    wall, cpu = [], []
    for _ in range(times):
        start, used = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return Took(wall_s=min(wall), cpu_s=min(cpu))


def engine_time(what: Case) -> tuple[Took, int]:
    """Of the engine alone on every op of a job, and how many these are."""
    runs: list[tuple[Any, ...]] = []

    def keep(*arguments: Any) -> int:
        runs.append(arguments)
        return run_events(*arguments)

    with patch.object(program, "run_events", keep):
        what.run(fold=False)
    longest = max(runs, key=lambda arguments: arguments[0].shape[0])
    return best_of(lambda: run_events(*longest), times=8), longest[0].shape[0]


def show(name: str, took: Took, asked: str) -> None:
    """One line."""
    print(f"{name:58s} {took.wall_s * 1e3:8.2f} ms wall {took.cpu_s * 1e3:8.2f} ms CPU   asked: {asked}")


def tell(name: str, value: str, asked: str) -> None:
    """One line of something else than time."""
    print(f"{name:58s} {value:>32s}   asked: {asked}")


def main() -> None:
    """Print every figure beside what is asked for."""
    main_case = case("tp=8,pp=8,vpp=3,sp=1", batch=64)
    show("64 GPUs, tp8 pp8 vpp3, 64 micro-batches, folded", best_of(main_case.run), "100 ms")
    whole = main_case.run(fold=False)
    unfolded = best_of(lambda: main_case.run(fold=False), times=4)
    show(f"the same, every op ({whole.num_simulated_ops / 1e6:.2f} M ops)", unfolded, "500 ms")
    engine, num_ops = engine_time(main_case)
    speed = f"{num_ops / engine.wall_s / 1e6:.1f} M/s wall, {num_ops / engine.cpu_s / 1e6:.1f} M/s CPU"
    tell("  op events of the engine", speed, "3 M/s")
    folded_s, block_s = main_case.run().step_time_s, main_case.run("block").step_time_s
    tell("  folded against every op, relative", f"{abs(folded_s / whole.step_time_s - 1):.1e}", "1e-6")
    show("the same, fidelity block", best_of(lambda: main_case.run("block"), times=100), "1 ms")
    tell("  against kernel, relative", f"{abs(block_s / folded_s - 1):.1e}", "1e-2 without overlap")
    large = case("tp=8,pp=16,dp=1024,sp=1", batch=8192)
    show("131,072 GPUs, tp8 pp16 dp1024, batch 8,192", best_of(large.run), "1,000 ms")
    block_s = large.run("block").step_time_s
    tell("  block against kernel, relative", f"{abs(block_s / large.run().step_time_s - 1):.1e}", "-")
    many = replace(main_case, job=replace(main_case.job, num_micro_batches=1024))
    few_s, many_s = best_of(main_case.run).cpu_s, best_of(many.run).cpu_s
    tell("1,024 micro-batches against 64", f"{many_s / few_s:.2f} x CPU", "2 x")
    for schedule, vpp in (("gpipe", 1), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2), ("dualpipe", 2)):
        other = case(f"tp=8,pp=8,vpp={vpp},sp=1", batch=64, schedule=schedule)
        show(f"64 GPUs, {schedule}", best_of(other.run), "-")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    tell("peak memory of this process", f"{peak:.2f} GiB", "1 GiB")


if __name__ == "__main__":
    main()
