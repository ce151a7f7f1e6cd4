"""Which parts a user's calibration file replaces."""

from dataclasses import replace
from pathlib import Path

import pytest

from echo_explore.calibration.overlap import write_user_calibration
from echo_explore.comm import HierarchicalModel
from echo_explore.core import SpecError
from echo_explore.core.home import find_data_file
from echo_explore.interference import PhysicalInterference
from echo_explore.interference.coefficients import shipped_coefficients
from echo_explore.simulate import SimulationOptions, parse_what_if
from echo_explore.simulate.presets import default_simulator
from echo_explore.testing.traces import HandmadeTracer
from tests.simulate.support import candidate, simulator


def network_table(rail: float) -> str:
    path = find_data_file("calibrations", "comm")
    assert path is not None
    text = path.read_text()
    start = text.index("[network.default]")
    table = text[start : text.index("\n\n", start)].replace("[network.", "[comm.network.")
    return "schema = 1\n[comm]\nschema = 2\n" + table.replace("rail_efficiency = ", f"rail_efficiency = {rail} # ")


def test_a_file_with_collectives_alone_leaves_kernels_as_shipped(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(network_table(0.25))
    own, shipped = (default_simulator(tracer=HandmadeTracer(), calibration=c) for c in (path, None))
    assert isinstance(own.collective, HierarchicalModel)
    assert own.collective.coefficients.network["default"].rail_efficiency == 0.25
    assert own.compute.reference == shipped.compute.reference
    assert own.calibration["user"]["file"] == "links.toml"


def test_a_file_with_neither_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("schema = 1\n")
    with pytest.raises(SpecError):
        default_simulator(tracer=HandmadeTracer(), calibration=path)


OVERLAPPED = {"layout": "tp=8,pp=4,dp=4", "overrides": ("recipe.overlap_grad_reduce=true",), "global_batch_size": 16}


def test_interference_moves_steps_that_overlap_and_can_be_taken_out() -> None:
    job = candidate(**OVERLAPPED)
    none = simulator(interference="none").predict(job)
    for name in ("physical", "constant"):
        model = simulator(interference=name)
        slowed = model.predict(job)
        assert slowed.step_time_s > none.step_time_s
        assert slowed.breakdown["interference_s"] > 0
        without = model.predict(job, SimulationOptions(what_if=parse_what_if(["interference=none"])))
        assert without.step_time_s == pytest.approx(none.step_time_s, rel=1e-9)


def test_folding_changes_nothing_under_physical_interference() -> None:
    job = candidate(**(OVERLAPPED | {"global_batch_size": 64}))
    model = simulator(interference="physical")
    folded, full = (model.predict(job, SimulationOptions(fold=fold)) for fold in (True, False))
    assert folded.step_time_s == pytest.approx(full.step_time_s, rel=1e-6)


def test_an_unknown_model_of_interference() -> None:
    with pytest.raises(SpecError, match="interference = 'magic': must be one of none, constant, physical, learned"):
        simulator(interference="magic")


def test_a_file_with_interference_alone_leaves_the_rest_as_shipped(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    shipped = shipped_coefficients()
    changed = replace(shipped, sharing=replace(shipped.sharing, packets_ahead=9.0))
    write_user_calibration(path, changed, None)
    own = simulator(interference="physical", calibration=path)
    assert isinstance(own.interference, PhysicalInterference)
    assert own.interference.coefficients.sharing.packets_ahead == 9.0
    assert own.compute.reference == simulator().compute.reference


def test_the_shipped_residual_is_named_where_it_is_used() -> None:
    physical, learned = (simulator(interference=name).calibration for name in ("physical", "learned"))
    assert set(learned) - set(physical) == {"interference_learned"}
