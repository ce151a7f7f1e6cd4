"""Kernel times and closed forms of the work of a training step."""

from echo_explore.compute.coefficients import Calibration, load_calibration, shipped_calibration
from echo_explore.compute.flop import (
    StepFlop,
    causal_model_flop,
    executed_flop,
    layer_forward_flop,
    logits_forward_flop,
    model_flop,
    step_flop,
)
from echo_explore.compute.model import RooflineModel
from echo_explore.compute.times import KernelTimes

__all__ = [
    "Calibration",
    "KernelTimes",
    "RooflineModel",
    "StepFlop",
    "causal_model_flop",
    "executed_flop",
    "layer_forward_flop",
    "load_calibration",
    "logits_forward_flop",
    "model_flop",
    "shipped_calibration",
    "step_flop",
]
