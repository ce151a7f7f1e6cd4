"""How much a kernel and a collective that share a GPU slow each other down, from what each asks for.

Symbols: S SMs, B memory bandwidth; of the kernel t alone, mu its share of B, x its share of the peak, n its blocks, p
the share of an SM's load and store path that its blocks there fill; of the collective k channels, v bytes/s over its
link and a = v / link peak; of a channel u = polling + a copying, the share it takes of its SM's path, q of its issue
slots.

    memory      max(1, mu + h), h = bytes per link byte * v / B: both want more than there is, and share it
    path        n <= S: max(1, p / (1 - u)): every block is resident from the start, and the kernel ends with the
                block that shares its SM with a channel; n > S: the others take over its blocks,
                1 / (1 - k/S (1 - (1 - u) / p))
    arithmetic  1 / (1 - k/S q x)
    exclusive   the blocks run on the S - k SMs left: n <= S: ceil(n / (S - k)) waves, else S / (S - k)
    end         + min(k chunk, queued) / link peak / t: the last writes wait behind the chunks in flight

The largest of the first four, and the last added. A collective that waits for a peer polls: h = 0, a = 0, no chunks. A
copy engine has k = 0: only memory is shared.
"""

from dataclasses import replace

import numpy as np

from echo_explore.interference.coefficients import SharingCoefficients
from echo_explore.interference.loads import Chip, Floats, KernelLoads, Traffic

EVEN_SHARE = 0.5
"""Of an SM's slots goes to each of two that want all: warps are served in turn [CUDA C programming guide, 2024]."""


def kernel_slowdown(kernels: KernelLoads, traffic: Traffic, chip: Chip, sharing: SharingCoefficients) -> Floats:
    """(num_kernels,) factor >= 1 on the time of each kernel while the traffic is on the GPU.

    # Approximation: the rates while it moves and while it waits are averaged over time, not over work (either way).
    """
    moving = _kernel_slowdown_moving(kernels, traffic, chip, sharing)
    if traffic.moving_fraction >= 1:
        return moving
    idle = replace(traffic, link_bytes_per_s=0.0, chunk_bytes=0.0)
    waiting = _kernel_slowdown_moving(kernels, idle, chip, sharing)
    return np.asarray(traffic.moving_fraction * moving + (1 - traffic.moving_fraction) * waiting)


def _kernel_slowdown_moving(kernels: KernelLoads, traffic: Traffic, chip: Chip, sharing: SharingCoefficients) -> Floats:
    k = min(traffic.num_channels, chip.num_sms - 1)
    on_sm = k / chip.num_sms
    memory = kernels.memory_fraction + memory_fraction(traffic, chip, sharing)
    path = kernels.path_fraction(chip.num_sms)
    free = 1.0 - sharing.polling_path_fraction - sharing.copying_path_fraction * traffic.activity
    shared = np.maximum(1.0, path / free) if k else np.ones_like(path)
    resident = kernels.num_blocks <= chip.num_sms
    of_path = np.where(resident, shared, 1.0 / (1.0 - on_sm * (1.0 - 1.0 / shared)))
    of_issue = 1.0 / (1.0 - on_sm * sharing.issue_fraction * kernels.arithmetic_fraction)
    slow = np.maximum.reduce([np.ones_like(path), memory, of_path, of_issue])
    if traffic.exclusive and k:
        left = chip.num_sms - k
        waves = np.maximum(1.0, np.ceil(kernels.num_blocks / left))
        slow = np.maximum(slow, np.where(resident, waves, chip.num_sms / left))
    end_s = 0.0
    if traffic.link_peak_bytes_per_s > 0:
        queued = min(traffic.num_channels * traffic.chunk_bytes, sharing.queued_bytes)
        end_s = queued / traffic.link_peak_bytes_per_s
    known = np.where(kernels.time_s > 0, kernels.time_s, np.inf)
    return np.asarray(slow + end_s / known)


def collective_slowdown(kernels: KernelLoads, traffic: Traffic, chip: Chip, sharing: SharingCoefficients) -> Floats:
    """(num_kernels,) factor >= 1 on the time of the collective while each kernel runs.

    max(1, mu + h, a / (1 - d / 2)): d = max(x, p) is what the kernel asks of the SM that a channel shares with it; if
    both want all of it, each gets half. Limited by a slow card (a small) a channel has time to spare.
    """
    memory = kernels.memory_fraction + memory_fraction(traffic, chip, sharing)
    slow = np.maximum(1.0, memory) if traffic.link_bytes_per_s > 0 else np.ones_like(memory)
    if traffic.num_channels == 0 or traffic.exclusive:
        return np.asarray(slow)
    demand = np.maximum(kernels.arithmetic_fraction, kernels.path_fraction(chip.num_sms))
    return np.asarray(np.maximum(slow, traffic.activity / (1.0 - EVEN_SHARE * demand)))


def memory_fraction(traffic: Traffic, chip: Chip, sharing: SharingCoefficients) -> float:
    """Share of the device memory bandwidth that the traffic takes while it moves."""
    return sharing.memory_bytes_per_link_byte * traffic.link_bytes_per_s / chip.memory_bandwidth_bytes_per_s
