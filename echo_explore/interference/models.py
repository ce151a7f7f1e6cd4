"""Interference models by name: none, a constant for every kernel and collective, physical, and with a residual."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final

import numpy as np

from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective, OpClass
from echo_explore.interference.pair_table import NUM_CODES, Factors, PairTable
from echo_explore.interference.pairing import CodePairing
from echo_explore.interference.physical import LearnedInterference, PhysicalInterference
from echo_explore.specs import DeviceSpec

COMPUTE_SLOWDOWN: Final = 1.17
"""Median of GEMMs beside expert dispatch and combine on H800 [trace, deepseek-ai/profile-data train.json, 2025].
A100 traces give 1.1 to 1.2 [facebookresearch/HolisticTraceAnalysis test data, 2023], DDP on A100 1.00 to 1.04 for GEMMs
but 1.10 over all kernels [NetX-lab/Echo-slowdown merged_features.csv, 2024]."""
COLLECTIVE_SLOWDOWN: Final = 1.15
"""Geometric mean of the medians of all-reduces of 1 MiB and more beside light compute: 1.32 on 8 A100, 1.00 on 2 L40S
[yumibyte/CS244C-Research phase2-contention, 2025]."""


def _ones() -> Factors:
    return np.ones((NUM_CODES, NUM_CODES))


@cache
def _constant(factor: float) -> Factors:
    """`factor` for every kernel class beside everything that moves bytes; 1 where there is no kernel or no traffic."""
    table = _ones()
    kernels = [c for c in OpClass if c != OpClass.NONE]
    traffic = [c for c in Collective if c not in (Collective.NONE, Collective.BARRIER)]
    table[np.ix_(kernels, traffic)] = factor
    table.setflags(write=False)
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class NoInterference:
    """Kernels and collectives run beside each other at full speed."""

    reference: ClassVar[str] = "No interference"
    version: ClassVar[int] = 1

    def pair_table(self) -> PairTable:
        """All factors 1."""
        return PairTable(compute=_ones(), collective=_ones(), reference=self.reference, version=self.version)

    def pairing(self, device: DeviceSpec) -> CodePairing:
        """The same for every GPU."""
        del device
        return CodePairing(table=self.pair_table())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantInterference:
    """One factor on every kernel beside a collective, and one on every collective beside a kernel.

    Approximation: measured factors run from 1.0 (large GEMMs on A100) to 4.8 (weight gradients of norms); one constant
    over-estimates GEMMs there and under-estimates small memory-bound kernels.

    Attributes:
        compute_slowdown: on kernels.
        collective_slowdown: on collectives and transfers.
    """

    reference: ClassVar[str] = (
        "Constant: GEMM under dispatch and combine on H800, deepseek-ai/profile-data (2025); all-reduce side, "
        "yumibyte/CS244C-Research (2025)"
    )
    version: ClassVar[int] = 1
    compute_slowdown: float = COMPUTE_SLOWDOWN
    collective_slowdown: float = COLLECTIVE_SLOWDOWN

    def __post_init__(self) -> None:
        """Refuse a speed-up."""
        for name in ("compute_slowdown", "collective_slowdown"):
            value = getattr(self, name)
            if not (1.0 <= value < math.inf):
                raise SpecError(name, value, "must be 1 or more", "give a slowdown such as 1.17")

    def pair_table(self) -> PairTable:
        """The two factors for every pair of a kernel and a collective that moves bytes."""
        return PairTable(
            compute=_constant(self.compute_slowdown),
            collective=_constant(self.collective_slowdown),
            reference=self.reference,
            version=self.version,
        )

    def pairing(self, device: DeviceSpec) -> CodePairing:
        """The same for every GPU."""
        del device
        return CodePairing(table=self.pair_table())


INTERFERENCE_MODELS: Final[Mapping[str, Callable[[], NoInterference | ConstantInterference | PhysicalInterference]]] = {
    "none": NoInterference,
    "constant": ConstantInterference,
    "physical": PhysicalInterference,
    "learned": LearnedInterference,
}
"""Models by the name that users give."""
