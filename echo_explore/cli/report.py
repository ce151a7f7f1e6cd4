"""Predictions as text for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from echo_explore.core import format_bytes, format_seconds
from echo_explore.simulate.graph_step import GraphPrediction
from echo_explore.simulate.prediction import INTERVAL_LEVEL, Prediction, interval
from echo_explore.specs import Candidate

CAUSES = {
    "compute_s": "kernels",
    "optimizer_s": "optimizer",
    "tensor_s": "tensor-parallel transfers",
    "context_s": "context-parallel transfers",
    "expert_s": "expert-parallel transfers",
    "data_s": "data-parallel transfers",
    "pipeline_s": "pipeline transfers",
    "bubble_s": "waiting for other stages",
    "host_s": "host",
}
"""Keys of a breakdown whose values add up to the step time, and what they say."""
PARTS = {
    "recompute_s": "of it recomputation",
    "interference_s": "of it slowed by transfers",
    "straggler_s": "of it slowest of {num_gpus} GPUs",
}
"""Keys of a breakdown that are part of compute_s, and what they say."""


def prediction_text(candidate: Candidate, prediction: Prediction, advice: Sequence[str]) -> str:
    """A prediction in about twenty lines."""
    model, cluster = candidate.model.name, candidate.cluster.name
    step = prediction.step_time_s
    lines = [
        f"{model} on {prediction.num_ranks} x {candidate.cluster.device.name} ({cluster}), {prediction.label}",
        f"  step time   {format_seconds(step)}   ({INTERVAL_LEVEL:.0%} interval "
        f"{format_seconds(prediction.step_time_low_s)} to {format_seconds(prediction.step_time_high_s)})",
        f"  tokens/s    {prediction.tokens_per_s:,.0f}",
        f"  MFU {prediction.mfu:.1%}   causal {prediction.mfu_causal:.1%}   HFU {prediction.hfu:.1%}",
        f"  memory      {format_bytes(prediction.peak_memory_bytes)} of "
        f"{format_bytes(prediction.memory_capacity_bytes)}   {'fits' if prediction.fits else 'DOES NOT FIT'}",
        f"  {prediction.num_micro_batches} micro-batches, {prediction.num_rank_classes} rank classes, "
        f"{prediction.num_simulated_ops:,} simulated ops, fidelity {prediction.fidelity}",
        *_causes(prediction.breakdown, step, prediction.num_ranks),
    ]
    if prediction.explanation is not None:
        lines += explanation_lines(prediction.explanation)
    if advice:
        lines.append("  what would make it fit:")
        lines += [f"    {line}" for line in advice]
    return "\n".join(lines)


def explanation_lines(explanation: Mapping[str, Any]) -> list[str]:
    """The critical path by cause, exposed transfers by axis, slowed kernels, and the waits of every stage."""
    path: Mapping[str, float] = explanation["critical_path_s"]
    whole = sum(path.values())
    lines = ["  critical path (what would have to be faster):"]
    lines += [f"    {name:28s} {format_seconds(s):>10s} {s / whole:6.1%}" for name, s in path.items() if s > 0]
    lines.append("  transfers from and to the critical rank (each counted, time of it exposed):")
    for axis, busy in explanation["busy_s"].items():
        if axis in explanation["exposed_s"] and busy > 0:
            exposed = explanation["exposed_s"][axis]
            lines.append(f"    {axis:28s} {format_seconds(busy):>10s} {format_seconds(exposed):>10s}")
    if behind := explanation["optimizer_transfers_s"]:
        lines.append("  of these in the optimizer phase, all exposed (model: gradient norm):")
        lines += [f"    {axis.replace('_', ' '):28s} {format_seconds(s):>10s}" for axis, s in behind.items()]
    if slowed := explanation["slowed_s"]:
        lines.append("  kernels of the critical rank that transfers slowed (time that they took longer):")
        lines += [f"    {name:28s} {format_seconds(s):>10s} {s / whole:6.1%}" for name, s in slowed.items()]
    lines.append("  waiting for other stages (warm-up, steady, cool-down):")
    width = max(28, *(len(row["label"]) for row in explanation["bubbles"]))
    for row in explanation["bubbles"]:
        parts = " ".join(f"{format_seconds(row[key]):>10s}" for key in ("warm_up_s", "steady_s", "cool_down_s"))
        lines.append(f"    {row['label']:<{width}s} {parts}")
    return lines


def graph_text(device: str, prediction: GraphPrediction) -> str:
    """The prediction of a traced program in about ten lines."""
    step = prediction.step_time_s
    low, high = interval(step, prediction.step_sigma_log)
    return "\n".join(
        [
            f"{prediction.label} on {prediction.num_ranks} x {device} ({prediction.versions['cluster']})",
            f"  step time   {format_seconds(step)}   ({INTERVAL_LEVEL:.0%} interval "
            f"{format_seconds(low)} to {format_seconds(high)})",
            f"  executed    {prediction.flop / step / 1e12:,.1f} TFLOP/s a GPU in products and attention",
            f"  memory      {format_bytes(prediction.peak_memory_bytes)} of "
            f"{format_bytes(prediction.memory_capacity_bytes)}   {'fits' if prediction.fits else 'DOES NOT FIT'}",
            *_causes(prediction.breakdown, step, prediction.num_ranks),
        ]
    )


def _causes(breakdown: Mapping[str, float], step_s: float, num_gpus: int) -> list[str]:
    lines = ["  where the step goes (critical rank):"]
    for key, name in CAUSES.items():
        seconds = breakdown.get(key, 0.0)
        if seconds > 0:
            lines.append(f"    {name:28s} {format_seconds(seconds):>10s} {seconds / step_s:6.1%}")
        if key == "compute_s":
            for part, text in PARTS.items():
                value = breakdown.get(part, 0.0)
                if value > 0:
                    line = text.format(num_gpus=num_gpus)
                    lines.append(f"      {line:26s} {format_seconds(value):>10s} {value / step_s:6.1%}")
    return lines
