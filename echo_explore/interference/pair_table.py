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
        compute: (num_kernel_classes, num_traffic_classes) factor on a kernel of class [k, ...] beside traffic [..., c];
            classes are OpClass and Collective codes (32 each) or those of a pairing.
        collective: of the same shape: factor on that traffic beside that kernel.
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
            if factors.ndim != 2 or factors.shape != self.compute.shape:
                raise ValueError(f"{name} has shape {factors.shape}, not that of a table, {self.compute.shape}")
            if not (np.isfinite(factors).all() and (factors >= 1.0).all()):
                raise ValueError(f"{name} holds a factor below 1 or one that is not finite")
            factors.setflags(write=False)
