"""The parts that the commands use: shipped calibrations, or a user's file over them."""

from pathlib import Path
from typing import Any

from echo_explore.comm import HierarchicalModel
from echo_explore.compute import RooflineModel
from echo_explore.core import SpecError
from echo_explore.core.hashing import file_hash
from echo_explore.core.home import find_data_file
from echo_explore.interference import INTERFERENCE_MODELS, LearnedInterference, PhysicalInterference
from echo_explore.interference.coefficients import user_coefficients, with_residual
from echo_explore.simulate.ports import InterferenceModel, Tracer
from echo_explore.simulate.simulator import Simulator
from echo_explore.specs.base import read_toml

DEFAULT_INTERFERENCE = "physical"


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
    if calibration is not None and _prices_kernels(calibration):
        compute = RooflineModel.from_file(calibration, allow_fallback=allow_fallback)
    else:
        compute = RooflineModel.shipped(allow_fallback=allow_fallback)
    collective = HierarchicalModel.from_file(calibration) if calibration else HierarchicalModel.shipped()
    return Simulator(
        tracer=tracer,
        compute=compute,
        collective=collective,
        interference=_interference(interference, calibration),
        calibration=calibration_facts(calibration, interference),
        allow_fallback=allow_fallback,
    )


def _prices_kernels(calibration: Path) -> bool:
    """Whether the file has tables of kernels, or none of anything else: then the reader says what is wrong."""
    tables = {name for name, value in read_toml(calibration).items() if isinstance(value, dict)}
    return bool(tables - {"comm", "interference"}) or not tables


def _interference(name: str, calibration: Path | None) -> InterferenceModel:
    if name not in INTERFERENCE_MODELS:
        raise SpecError("interference", name, f"must be one of {', '.join(INTERFERENCE_MODELS)}", "name one of them")
    if calibration is not None and name == "physical":
        return PhysicalInterference(coefficients=user_coefficients(calibration))
    if calibration is not None and name == "learned":
        return LearnedInterference(coefficients=with_residual(user_coefficients(calibration)))
    return INTERFERENCE_MODELS[name]()


def calibration_facts(calibration: Path | None, interference: str) -> dict[str, Any]:
    """Names and hashes of the calibration files in use; `interference` names the model of mutual slowdowns."""
    facts: dict[str, Any] = {}
    residual = ("interference_learned",) if interference == "learned" else ()
    for name in ("compute", "comm", "interference", *residual):
        path = find_data_file("calibrations", name)
        if path is not None:
            facts[name] = file_hash(path)
    if calibration is not None:
        facts["user"] = {"file": calibration.name, "hash": file_hash(calibration)}
    return facts
