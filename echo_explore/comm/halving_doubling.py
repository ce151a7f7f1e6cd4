"""Recursive halving and doubling on a network: every step's flows, and their time.

An all-reduce of S bytes over n = 2^k ranks halves k times (reduce-scatter: rank r exchanges S/2, S/4, ..., S/n with
rank r xor n/2, n/4, ..., 1), then doubles k times (all-gather: the same backwards). On a BiGraph with M cards a switch,
N switches and one cable of a card's bandwidth B between two switches, ranks placed by `topology.mapped_seats`:

    t <= 2 log2(n) a + 2 (n-1)/n S/B max(1, 2M/N)

References: Thakur et al., "Optimization of collective communication operations in MPICH" (2005); Dong et al., "EFLOPS"
(HPCA 2020) for the mapping.
"""

import numpy as np
import numpy.typing as npt

from echo_explore.comm.contention import step_time
from echo_explore.comm.patterns import Flows, flows_between
from echo_explore.core import SpecError
from echo_explore.topology.network import Network
from echo_explore.topology.routing import Spread


def halving_doubling_steps(device_of_rank: npt.ArrayLike, message_bytes: float) -> list[Flows]:
    """The flows of each of the 2 log2(n) steps of an all-reduce.

    Raises:
        SpecError: the number of ranks is not a power of two.
    """
    devices = np.asarray(device_of_rank, np.int64)
    n = len(devices)
    if n < 1 or n & (n - 1):
        raise SpecError("device_of_rank", f"({n} ranks)", "halving-doubling needs a power of two", "use a ring")
    ranks = np.arange(n)
    halving, size, distance = [], message_bytes / 2, n // 2
    while distance:
        halving.append(flows_between(devices, devices[ranks ^ distance], size))
        size, distance = size / 2, distance // 2
    return halving + halving[::-1]


def halving_doubling_time(
    network: Network,
    device_of_rank: npt.ArrayLike,
    message_bytes: float,
    *,
    spread: Spread = "hash",
    seed: int = 0,
    step_s: float = 0.0,
) -> float:
    """Seconds of an all-reduce: the sum of its steps, each until its last flow ends, and `step_s` for starting each."""
    steps = halving_doubling_steps(device_of_rank, message_bytes)
    half = steps[: len(steps) // 2]
    return 2 * sum(step_time(network, flows, spread=spread, seed=seed) + step_s for flows in half)


def mapped_bound_s(
    message_bytes: float, cards_per_switch: int, num_switches: int, *, bandwidth_bytes_per_s: float, step_s: float = 0.0
) -> float:
    """The closed form of the module, for a BiGraph with one cable of a card's bandwidth between two switches."""
    n = cards_per_switch * num_switches
    sharing = max(1.0, 2 * cards_per_switch / num_switches)
    moved = 2 * (n - 1) / n * message_bytes / bandwidth_bytes_per_s
    return 2 * (n.bit_length() - 1) * step_s + moved * sharing
