"""The parts that the commands use: shipped calibrations, or a user's file over them."""

from pathlib import Path
from typing import Any

from echo_explore.comm import HierarchicalModel
from echo_explore.comm.coefficient_file import has_comm_tables, has_compute_tables
from echo_explore.compute import RooflineModel
from echo_explore.core.hashing import file_hash
from echo_explore.core.home import find_data_file
from echo_explore.interference import INTERFERENCE_MODELS
from echo_explore.simulate.ports import Tracer
from echo_explore.simulate.simulator import Simulator

DEFAULT_INTERFERENCE = "constant"


def default_simulator(
    *,
    tracer: Tracer,
    interference: str = DEFAULT_INTERFERENCE,
    calibration: Path | None = None,
    allow_fallback: bool = False,
) -> Simulator:
    """A Simulator of the shipped models.

    Args:
        tracer: gives traces; usually a CachedTracer.
        interference: name in INTERFERENCE_MODELS.
        calibration: a calibration file whose coefficients replace the shipped ones.
        allow_fallback: price a device that the calibration does not name from its specification alone.
    """
    comm_only = calibration is not None and has_comm_tables(calibration) and not has_compute_tables(calibration)
    if calibration and not comm_only:
        compute = RooflineModel.from_file(calibration, allow_fallback=allow_fallback)
    else:
        compute = RooflineModel.shipped(allow_fallback=allow_fallback)
    collective = HierarchicalModel.from_file(calibration) if calibration else HierarchicalModel.shipped()
    return Simulator(
        tracer=tracer,
        compute=compute,
        collective=collective,
        interference=INTERFERENCE_MODELS[interference](),
        calibration=calibration_facts(calibration),
        allow_fallback=allow_fallback,
    )


def calibration_facts(calibration: Path | None) -> dict[str, Any]:
    """Names and hashes of the calibration files in use."""
    facts: dict[str, Any] = {}
    for name in ("compute", "comm"):
        path = find_data_file("calibrations", name)
        if path is not None:
            facts[name] = file_hash(path)
    if calibration is not None:
        facts["user"] = {"file": calibration.name, "hash": file_hash(calibration)}
    return facts
