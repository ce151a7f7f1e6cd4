"""Which parts a user's calibration file replaces."""

from pathlib import Path

import pytest

from echo_explore.comm import HierarchicalModel
from echo_explore.core import SpecError
from echo_explore.core.home import find_data_file
from echo_explore.simulate.presets import default_simulator
from echo_explore.testing.traces import HandmadeTracer


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
