"""Shortcuts that several tests of the simulator share."""

from typing import Any

from echo_explore.simulate import Simulator, default_simulator
from echo_explore.specs import Candidate, JobOptions, candidate_of
from echo_explore.testing.traces import HandmadeTracer


def simulator(**options: Any) -> Simulator:
    """The shipped models over handmade traces."""
    return default_simulator(tracer=HandmadeTracer(), **options)


def candidate(**job: Any) -> Candidate:
    """GPT-3 22B on A100s unless said otherwise."""
    defaults = {"model": "gpt-22b", "cluster": "a100-80gb-hdr", "layout": "tp=8,pp=4"}
    sizes = {"global_batch_size": 16, "micro_batch_size": 1}
    return candidate_of(JobOptions(**(defaults | sizes | job)))
