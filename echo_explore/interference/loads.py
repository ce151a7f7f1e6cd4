"""What a kernel and a collective ask of a GPU: shares of memory, of arithmetic and of single SMs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError

Floats = npt.NDArray[np.float64]

WARP_THREADS = 32
"""Threads of a warp [NVIDIA CUDA C programming guide, 2024]."""
PATH_WARPS = 32.0
"""Resident warps whose loads fill an SM's path to L2 if each keeps one in flight: 32 lanes x 4 bytes each, 4 KiB, is
64 bytes a clock over about 64 clocks of occupancy; taken as half the 64 warps that an SM holds [CUDA guide, 2024]."""
MEMORY_BOUND = (0.5, 0.8)
"""Share of the memory bandwidth from which a kernel starts to wait for memory, and where it waits for nothing else:
streaming kernels reach 0.8 to 0.9 [compute.toml, 2026-11-30]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelLoads:
    """What kernels ask for when they run alone; columns of shape (num_kernels,).

    Attributes:
        time_s: alone.
        memory_fraction: of the device memory bandwidth.
        arithmetic_fraction: of the peak arithmetic rate; 0 for kernels that do next to none.
        num_blocks: thread blocks of the grid; large where it is not known.
        threads_per_block: threads.
    """

    time_s: Floats
    memory_fraction: Floats
    arithmetic_fraction: Floats
    num_blocks: Floats
    threads_per_block: Floats

    def __post_init__(self) -> None:
        """Check shapes and ranges."""
        for name in ("memory_fraction", "arithmetic_fraction", "num_blocks", "threads_per_block"):
            values = getattr(self, name)
            if values.shape != self.time_s.shape:
                raise ValueError(f"{name} has shape {values.shape}, not {self.time_s.shape}")
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"{name} holds a value that is negative or not finite")
        if (self.memory_fraction > 1).any() or (self.arithmetic_fraction > 1).any():
            raise ValueError("a share above 1")

    def path_fraction(self, num_sms: int) -> Floats:
        """(num_kernels,) share of the load and store path of an SM that a kernel's blocks on it fill.

        (1 - m) min(1, w / PATH_WARPS), w the warps resident on an SM that has blocks, m how far the kernel waits for
        device memory; 0 where arithmetic bounds the kernel.
        """
        low, high = MEMORY_BOUND
        waits = np.clip((self.memory_fraction - low) / (high - low), 0.0, 1.0)
        per_block = np.ceil(self.threads_per_block / WARP_THREADS)
        warps = per_block * np.maximum(1.0, np.ceil(self.num_blocks / num_sms))
        return np.asarray((1 - waits) * np.minimum(1.0, warps / PATH_WARPS) * (self.arithmetic_fraction == 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A collective or transfer as the GPU it runs on feels it.

    Attributes:
        num_channels: thread blocks that move it, each on an SM of its own; 0 for a copy engine, which takes no SM.
        link_bytes_per_s: that it sends over the link (or card) of this GPU, alone.
        link_peak_bytes_per_s: of that link.
        chunk_bytes: in flight in one channel.
        moving_fraction: of the time it is seen on the GPU; the rest it polls for a peer that has not come.
        exclusive: its blocks leave no room for others on their SMs (DeepEP); NCCL's do.
    """

    num_channels: int
    link_bytes_per_s: float
    link_peak_bytes_per_s: float
    chunk_bytes: float
    moving_fraction: float = 1.0
    exclusive: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.num_channels < 0 or not 0 <= self.moving_fraction <= 1:
            raise SpecError(
                "traffic", (self.num_channels, self.moving_fraction), "channels >= 0 and a share in 0..1", "correct it"
            )
        for name in ("link_bytes_per_s", "link_peak_bytes_per_s", "chunk_bytes"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SpecError(f"traffic.{name}", getattr(self, name), "must be finite and not negative", "correct it")

    @property
    def activity(self) -> float:
        """Rate over that of the link, at most 1: how hard its channels work while they move."""
        if self.link_peak_bytes_per_s <= 0:
            return 0.0
        return min(1.0, self.link_bytes_per_s / self.link_peak_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What of the GPU matters here.

    Attributes:
        num_sms: streaming multiprocessors (compute units).
        memory_bandwidth_bytes_per_s: of device memory.
    """

    num_sms: int
    memory_bandwidth_bytes_per_s: float
