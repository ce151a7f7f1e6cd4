"""Who sends how much to whom: the flows of collectives and of the usual test patterns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.comm.bandwidth import bus_factor
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective

_RINGS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
_CHAINS = (Collective.BROADCAST, Collective.REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """Bytes from device to device.

    Attributes:
        sources: device numbers, shape (num_flows,).
        targets: device numbers.
        num_bytes: of each flow.
    """

    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.float64]

    @property
    def num_flows(self) -> int:
        """Flows, those of no bytes included."""
        return len(self.sources)


def flows_between(sources: npt.ArrayLike, targets: npt.ArrayLike, num_bytes: float) -> Flows:
    """Flows of the same size."""
    start, end = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
    return Flows(sources=start, targets=end, num_bytes=np.full(len(start), float(num_bytes)))


def join_flows(parts: Sequence[Flows]) -> Flows:
    """All flows of all parts, in order."""
    return Flows(
        sources=np.concatenate([p.sources for p in parts]),
        targets=np.concatenate([p.targets for p in parts]),
        num_bytes=np.concatenate([p.num_bytes for p in parts]),
    )


def ring(devices: npt.ArrayLike, num_bytes: float) -> Flows:
    """Each device sends to the next, the last to the first; none for one device."""
    at = np.asarray(devices, np.int64)
    return flows_between(at, np.roll(at, -1), num_bytes) if len(at) > 1 else flows_between([], [], num_bytes)


def chain(devices: npt.ArrayLike, num_bytes: float) -> Flows:
    """Each device but the last sends to the next."""
    at = np.asarray(devices, np.int64)
    return flows_between(at[:-1], at[1:], num_bytes)


def all_to_all(devices: npt.ArrayLike, num_bytes: float) -> Flows:
    """Each device sends `num_bytes` to every other."""
    at = np.asarray(devices, np.int64)
    n = len(at)
    i, step = np.repeat(np.arange(n), max(0, n - 1)), np.tile(np.arange(1, n), n)
    return flows_between(at[i], at[(i + step) % n] if n else at[i], num_bytes)


def incast(senders: npt.ArrayLike, receiver: int, num_bytes: float) -> Flows:
    """Every sender sends to the one receiver."""
    at = np.asarray(senders, np.int64)
    return flows_between(at, np.full(len(at), receiver), num_bytes)


def shift(devices: npt.ArrayLike, by: int, num_bytes: float) -> Flows:
    """Device i of the list sends to device i + by, round the end."""
    at = np.asarray(devices, np.int64)
    return flows_between(at, np.roll(at, -by), num_bytes)


def flows_of(collective: Collective, devices: Sequence[int], message_bytes: float) -> Flows:
    """The flows of a collective over devices, whole: rings, a chain for broadcast and reduce, or pairwise.

    S message bytes, n devices: an edge of a ring carries S * `bus_factor`, one of a chain S, a pair S/n.

    Raises:
        SpecError: a device twice, a negative size, or a collective that is no pattern of flows.
    """
    if len(set(devices)) != len(devices):
        twice = next(d for i, d in enumerate(devices) if d in devices[:i])
        raise SpecError("devices", twice, "is twice in a communicator", "give each rank a device of its own")
    if not 0 <= message_bytes < float("inf"):
        raise SpecError("message_bytes", message_bytes, "must be finite and not negative", "correct it")
    n = max(1, len(devices))
    if collective in _RINGS:
        return ring(devices, message_bytes * bus_factor(collective, n))
    if collective in _CHAINS:
        return chain(devices, message_bytes)
    if collective == Collective.ALL_TO_ALL:
        return all_to_all(devices, message_bytes / n)
    if collective in (Collective.SEND, Collective.RECV):
        return chain(devices[:2], message_bytes)
    raise SpecError("collective", collective.name, "is no pattern of flows", "give a kind that moves data")
