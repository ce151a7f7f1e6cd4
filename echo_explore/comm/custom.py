"""Inference frameworks' own all-reduce kernels: one-shot, two-shot, NCCL above a size.

One-shot: every rank reads the buffers of all others and reduces alone, (n-1) S over its links, one barrier. Two-shot: a
reduce-scatter and an all-gather by direct reads, 2 (n-1)/n S, two barriers. With 2 ranks, below 512 KiB with 4 and
below 256 KiB with 8, one-shot runs [vLLM csrc/custom_all_reduce.cuh, 2024].

t = a_i + (n-2) b_i + v_i(n) S / (W e_i), i = one-shot, two-shot; v = n-1, 2 (n-1)/n. Above a size, or where PCIe joins
more than two GPUs, NCCL's time. An eager call copies its input first and takes at least the host's time:
max(t + S / (W c), h + (n-2) h').
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from echo_explore.comm.coefficients import OneShotCosts
from echo_explore.comm.paths import Floats
from echo_explore.core import MissingCalibration

FRAMEWORKS = ("vllm", "sglang", "trtllm")
_ONE_SHOT_BYTES = {2: np.inf, 4: 512.0 * 1024, 8: 256.0 * 1024}


def custom_regime(num_ranks: Floats, size: Floats, costs: OneShotCosts) -> npt.NDArray[np.intp]:
    """0 for one-shot, 1 for two-shot, 2 for NCCL."""
    limit = np.zeros_like(size)
    for count in sorted(_ONE_SHOT_BYTES, reverse=True):
        limit = np.where(num_ranks <= count, _ONE_SHOT_BYTES[count], limit)
    leaves = (size > costs.fallback_bytes) | (num_ranks > costs.most_ranks)
    return np.where(leaves, 2, np.where(size < limit, 0, 1))


def custom_all_reduce_s(
    num_ranks: Floats,
    size: Floats,
    nccl_s: Floats,
    *,
    link_bytes_per_s: float,
    costs: OneShotCosts,
    eager: npt.NDArray[np.bool_],
) -> Floats:
    """Seconds of a framework's all-reduce inside one domain, given those of NCCL: see the formula above."""
    regime = custom_regime(num_ranks, size, costs)
    own = np.minimum(regime, 1)
    launch, rank, efficiency = (np.array(v)[own] for v in (costs.launch_s, costs.rank_s, costs.efficiency))
    volume = np.where(own == 0, num_ranks - 1, 2 * (num_ranks - 1) / num_ranks)
    own_s = launch + (num_ranks - 2) * rank + volume * size / (link_bytes_per_s * efficiency)
    time_s = np.where(regime == 2, nccl_s, own_s)
    host_s = costs.eager_s + (num_ranks - 2) * costs.eager_rank_s
    called_s = np.maximum(time_s + size / (link_bytes_per_s * costs.eager_copy_efficiency), host_s)
    return np.where(eager, called_s, time_s)


def custom_costs(custom: Mapping[str, OneShotCosts], framework: str, fabric: str) -> OneShotCosts:
    """The constants of a framework on a fabric.

    Raises:
        MissingCalibration: the file has none.
    """
    found = custom.get(f"{framework}/{fabric}")
    if found is None:
        names = ", ".join(sorted(custom)) or "none"
        raise MissingCalibration(f"custom.{framework}.{fabric}: not in the comm calibration; fix: use one of {names}")
    return found
