"""Print the seconds and memory of tracing GPT-175B with Megatron-core, each case in a process of its own.

    python scripts/bench_trace.py [--repeat 3]

Cases: one layer and twelve layers of a middle stage (tp 8, sequence parallelism, one micro-batch), whole iteration;
the pieces from which every rank of 16,384 GPUs is composed; 96 layers unfolded. Imports are not counted. `cpu s` is
what the process itself computed, which a busy machine does not stretch.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

CASES = {
    "1 layer, iteration": (1, 0.4),
    "12 layers, iteration": (12, 2.5),
    "12 layers, iteration and build": (12, 4.5),
    "any rank of 16,384, folded": (0, 3.0),
    "96 layers, iteration": (96, None),
}
"""Layers that are run (0: pieces), and the seconds asked for on two idle cores."""


def measure(case: str) -> dict[str, float]:
    """Seconds, rows and most resident memory of one case, in this process."""
    from echo_explore.specs import load_model
    from echo_explore.tracing import TraceRequest, megatron_pieces, megatron_rank, runtime
    from echo_explore.tracing.rank_request import RankRequest
    from echo_explore.tracing.versions import framework_versions

    runtime.prepare()
    num_layers, _ = CASES[case]
    model = load_model("gpt3-175b")
    trace = TraceRequest(
        model=model if num_layers in (0, 96) else model.model_copy(update={"num_layers": 8 * num_layers}),
        tensor_parallel=8, sequence_parallel=True, micro_batch_size=1, sequence_length=2048, precision="bf16",
        attention="flash", recompute="none", fusion="fused", gradient_accumulation_fusion=True, dropout=False,
    )  # fmt: skip
    started, started_cpu = time.perf_counter(), time.process_time()
    if num_layers == 0:
        pieces = megatron_pieces.trace_pieces(trace, framework_versions())
        rows = sum(p.forward.num_ops + p.backward.num_ops for p in pieces.pieces.values())
    else:
        stages = 1 if num_layers == 96 else 8
        request = RankRequest(
            trace=trace, rank=8 * 2 * (stages // 2), pipeline_parallel=stages, virtual_pipeline=1, data_parallel=2,
            num_micro_batches=1, chunk_layers=(num_layers,) * stages, distributed_optimizer=True,
            overlap_grad_reduce=True, overlap_param_gather=True, overlap_p2p=True, bucket_elements=40_000_000,
        )  # fmt: skip
        with megatron_rank.prepared_rank(request) as rank:
            if not case.endswith("build"):
                started, started_cpu = time.perf_counter(), time.process_time()
            rows = rank.run().graph.num_ops
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "cpu_s": cpu_s, "rows": rows, "resident_mb": peak_mb}


def main() -> None:
    """Print a row a case: the fastest of several processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--case", choices=sorted(CASES), help="measure here, print JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    print("| case | asked s | s | cpu s | rows | resident MB |\n|---|---|---|---|---|---|")
    for case, (_, asked) in CASES.items():
        found = [
            json.loads(
                subprocess.run(
                    [sys.executable, __file__, "--case", case], check=True, capture_output=True, text=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(options.repeat)
        ]
        best = min(found, key=lambda f: f["seconds"])
        times = f"{asked or ''} | {best['seconds']:.2f} | {best['cpu_s']:.2f}"
        print(f"| {case} | {times} | {best['rows']:,} | {best['resident_mb']:.0f} |")


if __name__ == "__main__":
    main()
