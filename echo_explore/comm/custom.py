"""Inference frameworks' own all-reduce kernels: one-shot, two-shot, one in the switch, NCCL above a size.

One-shot: every rank reads the buffers of all others and reduces alone, (n-1) S over its links, one barrier. Two-shot: a
reduce-scatter and an all-gather by direct reads, 2 (n-1)/n S, two barriers. With 2 ranks, below 512 KiB with 4 and
below 256 KiB with 8, one-shot runs [vLLM csrc/custom_all_reduce.cuh, 2024]. Symmetric memory (vLLM, Hopper and later):
the switch reduces and multicasts, S a rank.

t = a_i + (n-2) b_i + v_i(n) S / (W e_i), i = one-shot, two-shot; v = n-1, 2 (n-1)/n; in the switch a_s + S / (W e_s).
Above a size, or where PCIe joins more than two GPUs, NCCL's time. An eager call copies its input first and takes at
least the host's time: max(t + S / (W c), h + (n-2) h').
"""

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from echo_explore.comm.coefficients import OneShotCosts
from echo_explore.comm.paths import Floats
from echo_explore.core import MissingCalibration

FRAMEWORKS = ("vllm", "sglang", "trtllm", "sglang-renewed")
"""Kernels by framework; SGLang's were replaced between 0.5.10 and 0.5.14 (measured tables, 2026-12)."""
MIB = 2.0**20
OWN_BYTES = {"hopper": (64 * MIB, 32 * MIB, MIB / 4), "blackwell": (2 * MIB - 1, 2 * MIB - 1, MIB - 1)}
"""Up to which vLLM's own kernels run where symmetric memory is at hand, by architecture for 2, 4, 8 ranks
[vLLM 0.19 distributed/device_communicators/all_reduce_utils.py, CUSTOM_ALL_REDUCE_MAX_SIZES, 2026]."""
SWITCH_BYTES = {"hopper": (64 * MIB, 32 * MIB, 64 * MIB), "blackwell": (8 * MIB, 32 * MIB, 128 * MIB)}
"""Up to which symmetric memory is used [the same, SYMM_MEM_ALL_REDUCE_MAX_SIZES, 2026]."""
_RENEWED_SGLANG = (0, 5, 11)
_ONE_SHOT_BYTES = {2: np.inf, 4: 512.0 * 1024, 8: 256.0 * 1024}


def framework_of(algorithm: str, library: str) -> str | None:
    """Whose kernels a row names, such as `vllm`, from its algorithm and the library with its version; None: unknown."""
    words = algorithm.lower()
    found = next((name for name in FRAMEWORKS if name in words), None)
    version = re.search(r"sglang\s+(\d+)\.(\d+)\.(\d+)", library.lower())
    if found == "sglang" and version and tuple(int(part) for part in version.groups()) >= _RENEWED_SGLANG:
        return "sglang-renewed"
    return found


def custom_regime(num_ranks: Floats, size: Floats, costs: OneShotCosts) -> npt.NDArray[np.intp]:
    """0 for one-shot, 1 for two-shot, 2 for NCCL, 3 for the switch."""
    seat = np.searchsorted([2.0, 4.0], num_ranks)
    own, switch = np.array(costs.own_bytes)[seat], np.array(costs.switch_bytes)[seat]
    limit = np.zeros_like(size)
    for count in sorted(_ONE_SHOT_BYTES, reverse=True):
        limit = np.where(num_ranks <= count, _ONE_SHOT_BYTES[count], limit)
    beyond = np.where((size <= switch) & (num_ranks <= costs.most_ranks), 3, 2)
    leaves = (size > own) | (num_ranks > costs.most_ranks)
    return np.where(leaves, beyond, np.where(size < limit, 0, 1))


def custom_all_reduce_s(
    num_ranks: Floats,
    size: Floats,
    nccl_s: Floats,
    *,
    link_bytes_per_s: npt.ArrayLike,
    costs: OneShotCosts,
    eager: npt.NDArray[np.bool_],
) -> Floats:
    """Seconds of a framework's all-reduce inside one domain, given those of NCCL: see the formula above."""
    regime, link_bytes_per_s = custom_regime(num_ranks, size, costs), np.asarray(link_bytes_per_s, np.float64)
    one, two, switch_s = (
        own_kernel_s(name, num_ranks, size, link_bytes_per_s, costs) for name in ("one-shot", "two-shot", "in-switch")
    )
    time_s = np.select([regime == 0, regime == 1, regime == 2], [one, two, nccl_s], switch_s)
    host_s = costs.eager_s + (num_ranks - 2) * costs.eager_rank_s
    called_s = np.maximum(time_s + size / (link_bytes_per_s * costs.eager_copy_efficiency), host_s)
    return np.where(eager, called_s, time_s)


def own_kernel_s(
    name: str, num_ranks: Floats, size: Floats, link_bytes_per_s: npt.ArrayLike, costs: OneShotCosts
) -> Floats:
    """Seconds of one kernel, whichever the framework takes: `one-shot`, `two-shot` or `in-switch`."""
    rate = np.asarray(link_bytes_per_s, np.float64)
    if name == "in-switch":
        return np.asarray(costs.switch_launch_s + size / (rate * costs.switch_efficiency))
    i = ("one-shot", "two-shot").index(name)
    volume = num_ranks - 1 if i == 0 else 2 * (num_ranks - 1) / num_ranks
    own_s = costs.launch_s[i] + (num_ranks - 2) * costs.rank_s[i] + volume * size / (rate * costs.efficiency[i])
    return np.asarray(own_s)


def custom_costs(custom: Mapping[str, OneShotCosts], framework: str, fabric: str) -> OneShotCosts:
    """The constants of a framework on a fabric, else those of the framework on fabrics that were not measured.

    Raises:
        MissingCalibration: the file has none.
    """
    found = custom.get(f"{framework}/{fabric}") or custom.get(f"{framework}/default")
    if found is None:
        names = ", ".join(sorted(custom)) or "none"
        raise MissingCalibration(f"custom.{framework}.{fabric}: not in the comm calibration; fix: use one of {names}")
    return found
