"""Bandwidth over size by algorithm: what `echo-explore comm` prints and plots."""

from dataclasses import dataclass

from echo_explore.comm.bandwidth import algorithm_bandwidth, bus_bandwidth
from echo_explore.comm.model import HierarchicalModel, rests_on_measurements
from echo_explore.comm.request import CollectiveRequest
from echo_explore.comm.schedule import CollectivePlan
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective, DType
from echo_explore.specs import ClusterSpec
from echo_explore.topology import GroupShape

_PAIRS = (Collective.SEND, Collective.RECV)
_MOST_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One size.

    Attributes:
        chosen: algorithm and protocol that the tuner takes.
        time_s: of the chosen one.
        sigma_log: how sure that is.
        is_measured: the fit saw this collective, size and group between nodes; true inside one domain.
        times_s: by algorithm and protocol, of all that exist.
        plan: channels, chunks, SMs of the chosen one.
    """

    message_bytes: float
    chosen: str
    time_s: float
    sigma_log: float
    is_measured: bool
    algorithm_bandwidth_bytes_per_s: float
    bus_bandwidth_bytes_per_s: float
    times_s: dict[str, float]
    plan: CollectivePlan


def group_on(cluster: ClusterSpec, num_ranks: int, ranks_per_node: int | None = None) -> GroupShape:
    """A group alone on a cluster: as many ranks in each scale-up domain as fit, unless given.

    Raises:
        SpecError: fewer than 1 rank, more than the cluster has, or more in a domain than it holds.
    """
    domain = cluster.node.domain_gpus
    if not 1 <= num_ranks <= cluster.max_gpus:
        raise SpecError("ranks", num_ranks, f"{cluster.name} has 1..{cluster.max_gpus} GPUs", "change it")
    if ranks_per_node is None:
        nodes = -(-num_ranks // domain)
        ranks_per_node = -(-num_ranks // nodes)
    if not 1 <= ranks_per_node <= min(domain, num_ranks):
        rule = f"must lie in 1..{min(domain, num_ranks)}, the GPUs of a scale-up domain or the ranks"
        raise SpecError("ranks_per_node", ranks_per_node, rule, "change it")
    return GroupShape(num_ranks=num_ranks, ranks_per_node=ranks_per_node)


def sizes_between(low_bytes: float, high_bytes: float, per_octave: int = 1) -> tuple[float, ...]:
    """Sizes from low to high, doubling.

    Raises:
        SpecError: not 0 < low <= high, or too many points.
    """
    if not 0 < low_bytes <= high_bytes:
        raise SpecError("bytes", f"{low_bytes:g}:{high_bytes:g}", "needs 0 < first <= last", "write 1KiB:4GiB")
    sizes = [float(low_bytes)]
    while sizes[-1] * 2 ** (1 / per_octave) <= high_bytes * (1 + 1e-9) and len(sizes) <= _MOST_POINTS:
        sizes.append(low_bytes * 2 ** (len(sizes) / per_octave))
    if len(sizes) > _MOST_POINTS:
        raise SpecError(
            "bytes", f"{low_bytes:g}:{high_bytes:g}", f"gives over {_MOST_POINTS} sizes", "narrow the range"
        )
    return tuple(sizes)


def collective_curve(
    model: HierarchicalModel,
    cluster: ClusterSpec,
    collective: Collective,
    group: GroupShape,
    sizes_bytes: tuple[float, ...],
    dtype: DType = DType.NONE,
) -> tuple[CurvePoint, ...]:
    """The price of a collective at each size, by algorithm.

    Raises:
        SpecError: a group of one rank, a send between more than two, an algorithm that does not exist here.
        PlacementError: the group spans nodes that have no network card.
        MissingCalibration: the calibration has neither this fabric nor a default.
    """
    if group.num_ranks < 2:
        raise SpecError("ranks", group.num_ranks, "a collective needs two ranks at least", "give more")
    if collective in _PAIRS and group.num_ranks != 2:
        raise SpecError("ranks", group.num_ranks, "a send has two ranks", "give --ranks 2")
    points = []
    for size in sizes_bytes:
        request = CollectiveRequest(collective=collective, message_bytes=size, group=group, dtype=dtype)
        price = model.collective_time(request, cluster)
        points.append(
            CurvePoint(
                message_bytes=size,
                chosen=model.chosen_algorithm(request, cluster),
                time_s=price.time_s,
                sigma_log=price.sigma_log,
                is_measured=rests_on_measurements(request, model.links_of(cluster)),
                algorithm_bandwidth_bytes_per_s=algorithm_bandwidth(size, price.time_s),
                bus_bandwidth_bytes_per_s=bus_bandwidth(collective, size, price.time_s, group.num_ranks),
                times_s=model.algorithm_times(request, cluster),
                plan=model.plan(request, cluster),
            )
        )
    return tuple(points)
