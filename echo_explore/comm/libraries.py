"""Communication libraries by name: what each version can run."""

from dataclasses import dataclass

from echo_explore.comm.choice import Capabilities
from echo_explore.core import SpecError

BASE = "nccl-2.27"
"""The library most rows of the fits were measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library as the model sees it.

    Attributes:
        framework: whose all-reduce kernels run inside a scale-up domain (comm/custom.py); empty: the library's own.
    """

    name: str
    able: Capabilities
    framework: str = ""


LIBRARIES: dict[str, Library] = {
    # PXN came with NCCL 2.12 ["Doubling all2all performance with NCCL 2.12", NVIDIA, 2022].
    "nccl-2.8": Library(name="nccl-2.8", able=Capabilities(nvls=False, nvls_tree=False, pat=False, pxn=False)),
    # NVLS with NCCL 2.17, NVLS-tree with 2.18, PAT with 2.23 [NVIDIA NCCL release notes, 2023-2024].
    "nccl-2.12": Library(name="nccl-2.12", able=Capabilities(nvls=False, nvls_tree=False, pat=False)),
    "nccl-2.18": Library(name="nccl-2.18", able=Capabilities(pat=False)),
    # As 2.18; over EFA that has constants of its own (comm.toml).
    "nccl-2.19": Library(name="nccl-2.19", able=Capabilities(pat=False)),
    "nccl-2.23": Library(name="nccl-2.23", able=Capabilities()),
    "nccl-2.27": Library(name="nccl-2.27", able=Capabilities()),
    "nccl-2.29": Library(name="nccl-2.29", able=Capabilities()),
    # oneCCL: rings over PCIe [oneAPI Collective Communications Library 2021.17 guide, 2025].
    "oneccl": Library(name="oneccl", able=Capabilities(nvls=False, nvls_tree=False, pat=False, pxn=False)),
    # RCCL: rings and trees over Infinity Fabric, no reduction in a switch [ROCm RCCL documentation, 2025]; PXN is off
    # unless NCCL_PXN_DISABLE=0 says otherwise (judged, 2026-12).
    "rccl": Library(name="rccl", able=Capabilities(nvls=False, nvls_tree=False, pat=False, pxn=False)),
    # Inference frameworks: their all-reduce kernels over NCCL. SGLang's were renewed between 0.5.10 and 0.5.14.
    "vllm": Library(name="vllm", able=Capabilities(), framework="vllm"),
    "sglang-0.5.0": Library(name="sglang-0.5.0", able=Capabilities(), framework="sglang"),
    "sglang-0.5.11": Library(name="sglang-0.5.11", able=Capabilities(), framework="sglang-renewed"),
    "trtllm": Library(name="trtllm", able=Capabilities(), framework="trtllm"),
}


def library(name: str) -> Library:
    """The library of that name, or the newest one not newer: `nccl-2.26.2` is nccl-2.23, `vllm-0.19` is vllm.

    Raises:
        SpecError: no such library.
    """
    if name in LIBRARIES:
        return LIBRARIES[name]
    if name.partition("-")[0] in LIBRARIES:
        return LIBRARIES[name.partition("-")[0]]
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


def library_of_version(version: str, architecture: str) -> Library:
    """The library that a stack's `nccl_version` means: RCCL on AMD's GPUs, else NCCL; before 2.8 as 2.8.

    Raises:
        SpecError: the version is no version.
    """
    numbers = _numbers(version)
    if not numbers:
        raise SpecError("stack.nccl_version", version, "must be numbers and points", 'write "2.21"')
    if architecture.startswith("cdna"):
        return LIBRARIES["rccl"]
    return LIBRARIES["nccl-2.8"] if numbers < (2, 8) else library(f"nccl-{version}")


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
