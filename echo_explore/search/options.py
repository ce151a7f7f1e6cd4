"""The options of a search, with their defaults."""

from dataclasses import dataclass
from typing import Final

from echo_explore.core import SpecError
from echo_explore.specs import SearchSpace

ENUMERATE_LIMIT: Final = 50_000
"""Legal points up to which `auto` enumerates."""
DEFAULT_TRIALS: Final = 300
"""Trials of a sampler when --trials is not given."""
DEFAULT_WINDOW: Final = {"enumerate": 64}
DEFAULT_SAMPLER_WINDOW: Final = 8
SAMPLER_NAMES: Final = ("auto", "enumerate", "tpe", "nsga2", "qmc", "cmaes", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The options of `echo-explore search`.

    Attributes:
        space: name or file of the search space, or the space itself.
        study: name of the study; default: the space's name and 8 hex digits of what moves its results.
        storage: where the study for the dashboard is kept; default: study.log beside the ledger.
        address: `auto`: the cluster of the Ray job, else a Ray of its own on this machine; `local`: always the latter;
            `none`: this process, without Ray; else the address of a running cluster.
        workers: evaluators; default: one for each CPU.
        trials: trials after which the study ends; default: all points when enumerating, else 300.
        window: trials by which proposals lag behind results; default 64 when enumerating, else 8.
        objective: `step_time`, `cost`, `energy` or several with commas; default: what the space says.
        resume: the study must exist; failed trials are tried again, and it goes on even where they fail again.
        calibration: a calibration file whose coefficients replace the shipped ones.
        interference: `physical`, `constant` or `none`; default: as for predictions.
    """

    space: str | SearchSpace
    study: str | None = None
    storage: str | None = None
    address: str = "auto"
    workers: int | None = None
    trials: int | None = None
    seed: int = 0
    window: int | None = None
    sampler: str = "auto"
    objective: str | None = None
    resume: bool = False
    calibration: str | None = None
    interference: str | None = None

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLER_NAMES:
            raise SpecError("sampler", self.sampler, "is not known", f"use one of {', '.join(SAMPLER_NAMES)}")
        for name in ("workers", "trials", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(name, value, "must be 1 or more", f"give a positive --{name}")
        if not 0 <= self.seed < 2**32:
            raise SpecError("seed", self.seed, "must be from 0 to 4294967295", "give another --seed")
