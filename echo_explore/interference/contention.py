"""How much a kernel and a collective that share a GPU slow each other down, from what each asks for.

Symbols: S SMs, B memory bandwidth, L that of the L2 cache; of the kernel t alone, mu its share of B, lambda of L, x of
the peak, n its blocks, b how many of them an SM holds, tb = t min(1, S b / n) the time of one; of the collective k
channels, v bytes/s over its link, a = v / link peak, m the share of its time in which it moves, T its time alone.

    memory      max(1, mu + m h), h = bytes per link byte * v / B: both want more than there is, and share it
    L2          max(1, lambda + m h B / L): what goes to memory goes through the L2 cache
    room        kernels bound by arithmetic, and all beside exclusive channels, run on the S - k SMs left:
                n / (b (S - k)), at least 1 and at most S / (S - k); a fixed grid of one block an SM that was resident
                as a whole and no longer is runs in ceil(n / (S - k)) waves
    backlog     + m min(burst / v, (p r k / v - 1) tb) / t for other kernels: the channels hand the link more than it
                takes, and what a block beside one loads or stores waits behind p packets each time. So it gets v / (p
                k), where alone it moves r = mu B / min(S, n). That lasts until the block is through, or until the
                collective pauses for its peer.

The largest of the first three, and the last added. A collective that only polls has m = 0. A copy engine has k = 0:
only memory and the L2 cache are shared.
"""

import numpy as np

from echo_explore.interference.coefficients import SharingCoefficients
from echo_explore.interference.loads import Chip, Floats, KernelLoads, Traffic

EVEN_SHARE = 0.5
"""Of an SM's slots goes to each of two that want all: warps are served in turn [CUDA C programming guide, 2024]."""


def kernel_slowdown(kernels: KernelLoads, traffic: Traffic, chip: Chip, sharing: SharingCoefficients) -> Floats:
    """(num_kernels,) factor >= 1 on the time of each kernel while the traffic is on the GPU.

    # Approximation: shares of time while the collective moves are averaged, not followed (either way).
    """
    used = traffic.moving_fraction * memory_fraction(traffic, chip, sharing)
    slow = np.maximum(1.0, _wanted(kernels, used, chip))
    k = min(traffic.num_channels, chip.num_sms - 1)
    if not k:
        return np.asarray(slow)
    confined = np.full(kernels.time_s.shape, traffic.exclusive) | (kernels.arithmetic_fraction > 0)
    slow = np.where(confined, np.maximum(slow, _on_fewer_sms(kernels, k, chip)), slow)
    return np.asarray(slow + np.where(confined, 0.0, _backlog(kernels, traffic, k, chip, sharing)))


def _wanted(kernels: KernelLoads, used: float, chip: Chip) -> Floats:
    """(num_kernels,) of memory or the L2 cache, whichever is shorter, the share that kernels and traffic want."""
    through_l2 = used * chip.memory_bandwidth_bytes_per_s / chip.l2_bandwidth_bytes_per_s
    return np.asarray(np.maximum(kernels.memory_fraction + used, kernels.l2_fraction + through_l2))


def _on_fewer_sms(kernels: KernelLoads, k: int, chip: Chip) -> Floats:
    left = kernels.blocks_per_sm * (chip.num_sms - k)
    was_resident = kernels.num_blocks <= kernels.blocks_per_sm * chip.num_sms
    cut = np.clip(kernels.num_blocks / left, 1.0, chip.num_sms / (chip.num_sms - k))
    whole = kernels.fixed_grid & was_resident & (kernels.blocks_per_sm < 2)
    return np.asarray(np.where(whole, np.ceil(kernels.num_blocks / left), cut))


def _backlog(kernels: KernelLoads, traffic: Traffic, k: int, chip: Chip, sharing: SharingCoefficients) -> Floats:
    """(num_kernels,) seconds that the last block waits longer, over the time of the kernel."""
    if traffic.link_bytes_per_s <= 0:
        return np.zeros(kernels.time_s.shape)
    demand = kernels.memory_fraction * chip.memory_bandwidth_bytes_per_s / np.minimum(kernels.num_blocks, chip.num_sms)
    stretch = np.maximum(0.0, demand * k * sharing.packets_ahead / traffic.link_bytes_per_s - 1.0)
    known = np.isfinite(kernels.time_s) & (kernels.time_s > 0)
    time_s = np.where(known, kernels.time_s, 1.0)
    block_s = np.where(known, kernels.block_time_s(chip.num_sms), 0.0)
    return np.asarray(traffic.moving_fraction * np.minimum(traffic.burst_s, stretch * block_s) / time_s)


def collective_slowdown(kernels: KernelLoads, traffic: Traffic, chip: Chip, sharing: SharingCoefficients) -> Floats:
    """(num_kernels,) factor >= 1 on the time of the collective while each kernel runs.

    max(1, mu + h, lambda + h B / L, a / (1 - x / 2)) + tb / T: it shares memory and the L2 cache; where warps of
    products want all of an SM's slots, a channel gets half; and its blocks start when the first blocks of the kernel
    have left room, where those fill SMs.
    """
    memory = _wanted(kernels, memory_fraction(traffic, chip, sharing), chip)
    slow = np.maximum(1.0, memory) if traffic.link_bytes_per_s > 0 else np.ones_like(memory)
    if traffic.num_channels == 0:
        return np.asarray(slow)
    if not traffic.exclusive:
        slow = np.maximum(slow, traffic.activity / (1.0 - EVEN_SHARE * kernels.arithmetic_fraction))
    full = (kernels.arithmetic_fraction > 0) & (
        kernels.num_blocks > kernels.blocks_per_sm * (chip.num_sms - traffic.num_channels)
    )
    wait_s = np.where(full & np.isfinite(kernels.time_s), kernels.block_time_s(chip.num_sms), 0.0)
    return np.asarray(slow + wait_s / traffic.time_s)


def memory_fraction(traffic: Traffic, chip: Chip, sharing: SharingCoefficients) -> float:
    """Share of the device memory bandwidth that the traffic takes while it moves."""
    return sharing.memory_bytes_per_link_byte * traffic.link_bytes_per_s / chip.memory_bandwidth_bytes_per_s
