"""The rates of one GPU that kernel times depend on, and a catalogue of GPUs by the names that tables use."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from echo_explore.core import MissingCalibration, parse_quantity
from echo_explore.core.names import nearest
from echo_explore.specs import DeviceSpec, load_cluster
from echo_explore.specs.base import read_toml

VECTOR_LANES = 128
"""Single-precision lanes of an SM since Hopper: NVIDIA H100 whitepaper v1.04 (2023), table 3."""
_CATALOGUE = Path(__file__).resolve().parent.parent / "_shipped" / "kernels" / "gpus.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a kernel model needs to know of a GPU.

    Attributes:
        key: name of the device whose measurements apply.
        peak_flop_per_s: dense rates by precision.
        bandwidth_bytes_per_s: of the memory.
        num_sms: streaming multiprocessors or compute units.
        clock_hz: boost clock.
        l2_cache_bytes: capacity of the last cache before memory.
        architecture: generation, in lower case; empty if unknown.
        power_w: power limit; 0 if unknown.
        exponentials_per_clock: of one SM.
    """

    key: str
    peak_flop_per_s: Mapping[str, float]
    bandwidth_bytes_per_s: float
    num_sms: int
    clock_hz: float
    l2_cache_bytes: float
    architecture: str = ""
    power_w: float = 0.0
    exponentials_per_clock: int = 16

    @property
    def exponentials_per_s(self) -> float:
        """Exponentials of the whole GPU a second."""
        return self.exponentials_per_clock * self.num_sms * self.clock_hz

    @property
    def vector_flop_per_s(self) -> float:
        """Single-precision rate beside the matrix units; without a stated one that of 128 lanes an SM."""
        return self.peak_flop_per_s.get("fp32", 2.0 * VECTOR_LANES * self.num_sms * self.clock_hz)

    def peak(self, precision: str) -> float:
        """Dense rate at a precision, in FLOP/s.

        Raises:
            MissingCalibration: the GPU has no such rate.
        """
        rate = self.peak_flop_per_s.get(precision)
        if rate is None:
            have = ", ".join(self.peak_flop_per_s)
            raise MissingCalibration(f"{precision}: {self.key} has no such rate; fix: use one of {have}")
        return rate


def copy_engine(architecture: str) -> str:
    """How kernels of a generation fetch their tiles: `bulk`, `threads`, or empty where no table tells.

    Bulk copies are those of the tensor memory accelerator, since Hopper.

    References:
        NVIDIA H100 whitepaper v1.04 (2023), "Tensor Memory Accelerator".
    """
    if architecture in ("hopper", "blackwell", "blackwell-rtx"):
        return "bulk"
    return "threads" if architecture in ("pascal", "volta", "turing", "ampere", "ada") else ""


def matrix_instructions(architecture: str) -> str:
    """Who issues the matrix products of a generation: `warp`, `warpgroup`, `tensor-memory`, or empty where unknown.

    Attention kernels of one kind are of the same design: FlashAttention-2 runs on warps, 3 on warpgroups, 4 on tensor
    memory; Blackwell cards for workstations have those of warps.

    References:
        NVIDIA, PTX ISA 8.7 (2025), sections on `mma`, `wgmma` (sm_90a) and `tcgen05` (sm_100).
    """
    if architecture in ("volta", "turing", "ampere", "ada", "blackwell-rtx"):
        return "warp"
    return {"hopper": "warpgroup", "blackwell": "tensor-memory"}.get(architecture, "")


def chip_of(device: DeviceSpec, key: str | None = None) -> Chip:
    """The chip of a cluster file's device; `key` overrides whose measurements apply."""
    return Chip(
        key=key or device.calibration,
        peak_flop_per_s=dict(device.peak_flop_per_s),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=device.num_sms,
        clock_hz=device.clock_hz,
        l2_cache_bytes=device.l2_cache_bytes,
        architecture=device.architecture,
        power_w=device.power_w,
        exponentials_per_clock=device.exponentials_per_clock,
    )


def power_share(device: DeviceSpec) -> float:
    """Clock that the device's power limit sustains over that of the measured GPU of its calibration, at most 1.

    (P / P_measured)^(1/3): dynamic power is C V^2 f, and where voltage follows frequency the cube of f. A power that
    nothing of the chip's clock moves (memory, leakage) would make the share smaller still.

    References:
        Rauber et al., Energy measurement, modeling, and prediction for processors with frequency scaling, Journal of
        Supercomputing 70 (2014): dynamic power grows with the cube of the frequency.
    """
    key = chip_names().get(device.calibration.strip().lower())
    measured_w = _chip(key).power_w if key is not None else 0.0
    return min(1.0, (device.power_w / measured_w) ** (1.0 / 3.0)) if measured_w > 0 else 1.0


@cache
def chip_names() -> Mapping[str, str]:
    """The key of every GPU of the catalogue by each of its names in lower case."""
    entries = read_toml(_CATALOGUE)["gpu"]
    return {name.lower(): key for key, entry in entries.items() for name in (key, *entry["names"])}


@cache
def _cards() -> Mapping[tuple[str, str], str]:
    """Name of the card by (source, name in its rows), both in lower case."""
    cards = read_toml(_CATALOGUE)["card"]
    return {(card["source"].lower(), card["named"].lower()): card["measured"] for card in cards}


def card_of(name: str, source: str) -> str:
    """Name of the GPU that ran the rows of a source, which for a few is not the one that they name.

    Args:
        name: as in the table.
        source: as `tables.normal_source` gives it.
    """
    return _cards().get((source.strip().lower(), name.strip().lower()), name)


@cache
def _chip(key: str) -> Chip:
    entry = read_toml(_CATALOGUE)["gpu"][key]
    if "cluster" in entry:
        return chip_of(load_cluster(entry["cluster"]).device, key)
    where = f"gpus.toml: gpu.{key}"

    def quantity(name: str, unit: str) -> float:
        return parse_quantity(entry[name], unit=unit, field=f"{where}.{name}")

    return Chip(
        key=key,
        peak_flop_per_s={
            name: parse_quantity(rate, unit="flop_per_s", field=f"{where}.peak.{name}")
            for name, rate in entry["peak"].items()
        },
        bandwidth_bytes_per_s=quantity("memory_bandwidth", "bytes_per_s"),
        num_sms=int(entry["num_sms"]),
        clock_hz=quantity("clock", "hz"),
        l2_cache_bytes=quantity("l2_cache", "bytes"),
        architecture=entry["architecture"],
    )


def named_chip(name: str) -> Chip:
    """The GPU of that name.

    Raises:
        MissingCalibration: the catalogue has none; names the nearest.
    """
    key = chip_names().get(name.strip().lower())
    if key is None:
        near = ", ".join(nearest(name, chip_names()))
        raise MissingCalibration(
            f"gpu = {name!r}: is not in the catalogue of GPUs; fix: use its full name (near: {near})"
        )
    return _chip(key)
