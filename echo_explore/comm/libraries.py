"""Communication libraries by name: what each version can run."""

from dataclasses import dataclass

from echo_explore.comm.choice import Capabilities
from echo_explore.core import SpecError

BASE = "nccl-2.27"
"""The library most rows of the fits were measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library as the model sees it."""

    name: str
    able: Capabilities


LIBRARIES: dict[str, Library] = {
    # NVLS with NCCL 2.17, NVLS-tree with 2.18, PAT with 2.23 [NVIDIA NCCL release notes, 2023-2024].
    "nccl-2.12": Library(name="nccl-2.12", able=Capabilities(nvls=False, nvls_tree=False, pat=False)),
    "nccl-2.18": Library(name="nccl-2.18", able=Capabilities(pat=False)),
    "nccl-2.23": Library(name="nccl-2.23", able=Capabilities()),
    "nccl-2.27": Library(name="nccl-2.27", able=Capabilities()),
    "nccl-2.29": Library(name="nccl-2.29", able=Capabilities()),
    # oneCCL: rings over PCIe [oneAPI Collective Communications Library 2021.17 guide, 2025].
    "oneccl": Library(name="oneccl", able=Capabilities(nvls=False, nvls_tree=False, pat=False, pxn=False)),
    # RCCL: rings and trees over Infinity Fabric, no reduction in a switch [ROCm RCCL documentation, 2025]; PXN is off
    # unless NCCL_PXN_DISABLE=0 says otherwise (judged, 2026-12).
    "rccl": Library(name="rccl", able=Capabilities(nvls=False, nvls_tree=False, pat=False, pxn=False)),
}


def library(name: str) -> Library:
    """The library of that name, or the newest one not newer: `nccl-2.26.2` is nccl-2.23.

    Raises:
        SpecError: no such library.
    """
    if name in LIBRARIES:
        return LIBRARIES[name]
    family, _, version = name.partition("-")
    asked = _numbers(version)
    fitting = [
        known
        for known in LIBRARIES
        if known.startswith(f"{family}-") and asked and _numbers(known.partition("-")[2]) <= asked
    ]
    if not fitting:
        raise SpecError("library", name, "is not known", f"use one of {', '.join(LIBRARIES)}")
    return LIBRARIES[max(fitting, key=lambda known: _numbers(known.partition("-")[2]))]


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
