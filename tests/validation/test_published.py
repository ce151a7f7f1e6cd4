"""Published step times, cited in published_steps.csv: the score must not get worse by more than a tenth of itself."""

from pathlib import Path

import pytest

from echo_explore.simulate import default_simulator
from echo_explore.tracing import CachedTracer, TraceService
from echo_explore.validation import validate_steps

pytestmark = pytest.mark.torch
FIGURES = Path(__file__).parent / "published_steps.csv"
MEAN_ERROR = 0.0367  # mean absolute error of the runs at MODEL_VERSION 5, 2026-12-01
ALLOWED = 1.1


def test_published_steps_are_predicted_as_well_as_before(tmp_path: Path, service: TraceService) -> None:
    simulator = default_simulator(tracer=CachedTracer(tmp_path / "traces", service=service), allow_fallback=True)
    scores = validate_steps(FIGURES, tmp_path / "predicted.csv", simulator.predict)
    assert scores.coverage == 1.0, (tmp_path / "predicted.csv").read_text()
    assert scores.pooled_mean is not None
    assert scores.pooled_mean <= ALLOWED * MEAN_ERROR
