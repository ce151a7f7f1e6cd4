"""The Simulator: wires tracer, compute, collective, interference and memory into one prediction."""

from echo_explore.simulate.graph_step import GraphPrediction, graph_timeline, predict_trace
from echo_explore.simulate.ports import CollectiveModel, ComputeModel, Tracer
from echo_explore.simulate.prediction import Prediction
from echo_explore.simulate.presets import DEFAULT_INTERFERENCE, default_simulator
from echo_explore.simulate.simulator import SimulationOptions, Simulator
from echo_explore.simulate.what_if import WhatIf, parse_what_if

__all__ = [
    "DEFAULT_INTERFERENCE",
    "CollectiveModel",
    "ComputeModel",
    "GraphPrediction",
    "Prediction",
    "SimulationOptions",
    "Simulator",
    "Tracer",
    "WhatIf",
    "default_simulator",
    "graph_timeline",
    "parse_what_if",
    "predict_trace",
]
