"""What a kernel and a collective ask of a GPU: memory, the L2 cache, room on SMs, and the path from SMs to memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

EXPERT_CHANNELS = 20
"""SMs that a fused dispatch or combine of experts takes [DeepSeek-V3, arXiv 2412.19437, section 3.2.2, 2024]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelLoads:
    """What kernels ask for when they run alone; columns of shape (num_kernels,).

    Attributes:
        time_s: alone; infinite where it is not known.
        memory_fraction: of the device memory bandwidth.
        l2_fraction: of the bandwidth of the L2 cache.
        arithmetic_fraction: of the peak arithmetic rate; 0 for kernels that do next to none. Above 0 a block
            fills the registers of its SM so far that none fits beside a channel.
        num_blocks: thread blocks of the grid.
        blocks_per_sm: blocks of it that fit on an SM, 1 or more.
        fixed_grid: the grid stays as it is when SMs are taken, rather than being cut to what is left.
    """

    time_s: Floats
    memory_fraction: Floats
    l2_fraction: Floats
    arithmetic_fraction: Floats
    num_blocks: Floats
    blocks_per_sm: Floats
    fixed_grid: Bools

    def __post_init__(self) -> None:
        """Check shapes and ranges."""
        for name in ("memory_fraction", "l2_fraction", "arithmetic_fraction", "num_blocks", "blocks_per_sm"):
            values = getattr(self, name)
            if values.shape != self.time_s.shape:
                raise ValueError(f"{name} has shape {values.shape}, not {self.time_s.shape}")
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"{name} holds a value that is negative or not finite")
        if self.fixed_grid.shape != self.time_s.shape:
            raise ValueError(f"fixed_grid has shape {self.fixed_grid.shape}, not {self.time_s.shape}")
        if any((share > 1).any() for share in (self.memory_fraction, self.l2_fraction, self.arithmetic_fraction)):
            raise ValueError("a share above 1")
        if (self.num_blocks < 1).any() or (self.blocks_per_sm < 1).any():
            raise ValueError("a kernel without a block")

    def block_time_s(self, num_sms: int) -> Floats:
        """(num_kernels,) seconds of one block: of the kernel, over the waves that its blocks run in."""
        return np.asarray(self.time_s * np.minimum(1.0, num_sms * self.blocks_per_sm / self.num_blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A collective or transfer as the GPU it runs on feels it.

    Attributes:
        num_channels: thread blocks that move it, each on an SM of its own; 0 for a copy engine, which takes no SM.
        link_bytes_per_s: that it sends over the link (or card) of this GPU while it moves.
        link_peak_bytes_per_s: of that link.
        burst_bytes: that it sends before it has to hear from a peer: its share of the message or its chunks in flight.
        moving_fraction: of the time it is seen on the GPU; the rest it polls for a peer that has not come.
        exclusive: its blocks leave no room for any other on their SMs (DeepEP).
        time_s: alone; infinite where it is not known.
    """

    num_channels: int
    link_bytes_per_s: float
    link_peak_bytes_per_s: float
    burst_bytes: float
    moving_fraction: float = 1.0
    exclusive: bool = False
    time_s: float = float("inf")

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.num_channels < 0 or not 0 <= self.moving_fraction <= 1:
            raise SpecError(
                "traffic", (self.num_channels, self.moving_fraction), "channels >= 0 and a share in 0..1", "correct it"
            )
        for name in ("link_bytes_per_s", "link_peak_bytes_per_s", "burst_bytes"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SpecError(f"traffic.{name}", getattr(self, name), "must be finite and not negative", "correct it")

    @property
    def activity(self) -> float:
        """Rate over that of the link, at most 1: how hard its channels work while they move."""
        if self.link_peak_bytes_per_s <= 0:
            return 0.0
        return min(1.0, self.link_bytes_per_s / self.link_peak_bytes_per_s)

    @property
    def burst_s(self) -> float:
        """Seconds that it sends without a pause."""
        return self.burst_bytes / self.link_bytes_per_s if self.link_bytes_per_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What of the GPU matters here.

    Attributes:
        num_sms: streaming multiprocessors (compute units).
        memory_bandwidth_bytes_per_s: of device memory.
        l2_bandwidth_bytes_per_s: of the L2 cache, to all SMs together.
    """

    num_sms: int
    memory_bandwidth_bytes_per_s: float
    l2_bandwidth_bytes_per_s: float
