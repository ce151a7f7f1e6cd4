"""How much a kernel and a collective slow each other down, for every pair of classes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_CODES = 32
"""Rows and columns: room for every OpClass and every Collective code."""
Factors = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairTable:
    """Factors on the times of a kernel and a collective while both run on one GPU; 1 means no slowdown.

    Attributes:
        compute: (32, 32) factor on a kernel of class [op_class, ...] beside a collective [..., collective].
        collective: (32, 32) factor on the collective [..., collective] beside a kernel of class [op_class, ...].
        reference: where the factors come from.
        version: raised with every change of a factor.
    """

    compute: Factors
    collective: Factors
    reference: str
    version: int

    def __post_init__(self) -> None:
        """Check shapes and factors, and lock the arrays."""
        for name in ("compute", "collective"):
            factors = getattr(self, name)
            if factors.shape != (NUM_CODES, NUM_CODES):
                raise ValueError(f"{name} has shape {factors.shape}, not ({NUM_CODES}, {NUM_CODES})")
            if not (np.isfinite(factors).all() and (factors >= 1.0).all()):
                raise ValueError(f"{name} holds a factor below 1 or one that is not finite")
            factors.setflags(write=False)
