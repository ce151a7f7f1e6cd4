"""Algorithm and bus bandwidth as nccl-tests defines them (nccl-tests, doc/PERFORMANCE.md, 2023)."""

from echo_explore.graph.kinds import Collective

_SHARED = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


def algorithm_bandwidth(message_bytes: float, time_s: float) -> float:
    """Bytes per second of the message: S / t; 0 where t is 0."""
    return message_bytes / time_s if time_s > 0 else 0.0


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """Bytes that a rank must send over its link, per byte of message, without in-network reduction.

    2 (n - 1) / n for all-reduce, (n - 1) / n for all-gather, reduce-scatter and all-to-all, 1 for broadcast, reduce
    and send; 0 for one rank.
    """
    if num_ranks == 1:
        return 0.0
    if collective == Collective.ALL_REDUCE:
        return 2.0 * (num_ranks - 1) / num_ranks
    return (num_ranks - 1) / num_ranks if collective in _SHARED else 1.0


def bus_bandwidth(collective: Collective, message_bytes: float, time_s: float, num_ranks: int) -> float:
    """Bytes per second over the link of a rank: S * bus_factor / t."""
    return algorithm_bandwidth(message_bytes, time_s) * bus_factor(collective, num_ranks)
