"""A calibration of a cluster's links from logs of nccl-tests."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from echo_explore.calibration.collective_fit import (
    Samples,
    fit_network,
    fit_scale_up,
    modelled_log_s,
    spread,
    with_span,
)
from echo_explore.calibration.comm_toml import network_table, scale_up_table
from echo_explore.calibration.link_checks import check_bus_bandwidth, check_devices, check_fit
from echo_explore.calibration.nccl_log import LogRow
from echo_explore.comm.choice import Capabilities
from echo_explore.comm.coefficients import DEFAULT, CommCoefficients
from echo_explore.comm.libraries import BASE, library
from echo_explore.comm.paths import ClusterLinks, Floats, cluster_links
from echo_explore.core import SpecError
from echo_explore.graph.kinds import Collective
from echo_explore.specs import ClusterSpec

_KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "send_recv": Collective.SEND,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
}
_NARROW = ("int8", "uint8", "fp8", "f8e4m3", "f8e5m2")
_BANDS_BYTES = (65536.0, 1048576.0, 16777216.0, 268435456.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSize:
    """Measured against fitted, for the rows of one collective, number of GPUs and range of sizes.

    Attributes:
        below_bytes: upper end of the range.
        error: mean absolute relative error of the fitted times; before: of the shipped coefficients.
    """

    collective: str
    num_ranks: int
    num_hosts: int
    below_bytes: float
    num_rows: int
    error: float
    before: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCalibration:
    """What a fit found.

    Attributes:
        text: a calibration file, for --calibration.
        sizes: the fit by size.
        num_skipped: rows of collectives that have no constants of their own.
    """

    text: str
    sizes: tuple[FittedSize, ...]
    num_skipped: int


def calibrate_links(
    rows: Sequence[LogRow],
    cluster: ClusterSpec,
    shipped: CommCoefficients,
    *,
    in_place: bool = False,
    num_starts: int = 3,
    library_name: str = BASE,
    source: str = "nccl-tests",
) -> LinkCalibration:
    """Fit the constants of a cluster's links to measured collectives, starting from the shipped ones.

    Rows inside one scale-up domain give `scale_up.<link>-<device>`, rows over several give `network.<kind>-<arch>`.

    Args:
        rows: from `read_nccl_log`.
        cluster: the machine they were measured on.
        shipped: coefficients to start from, and of what was not measured.
        in_place: take the in-place times instead.
        num_starts: starts of each fit.
        library_name: what the log's library can run.
        source: for the comments of the file.

    Raises:
        SpecError: a log of another GPU, a rank count or bus bandwidth that the cluster can't have, no row that can be
            fitted, a fit that is off by more than `link_checks.MAX_FIT_ERROR`.
    """
    able = library(library_name).able
    links = cluster_links(cluster, shipped)
    check_devices(rows, cluster)
    inside, across, skipped = _samples(rows, cluster, links, in_place=in_place)
    if not inside and not across:
        raise _nothing_to_fit(rows, in_place=in_place)
    check_bus_bandwidth(rows, cluster, links, in_place=in_place)
    fitted, text = links, "schema = 1\n\n[comm]\nschema = 2\n"
    if inside:
        key = f"{cluster.node.link}-{cluster.device.calibration}"
        informed = links.scale_up.key != DEFAULT
        own = fit_scale_up([(s, able) for s in inside], fitted, num_starts=num_starts, informed=informed)
        fitted = replace(fitted, scale_up=own)
        own = replace(own, key=key, sigma_log=_spread(inside, fitted, able))
        fitted = replace(fitted, scale_up=own)
        text += scale_up_table(own, f"{source} on {cluster.name}, {_count(inside)} rows", prefix="comm.")
    if across:
        key = f"{cluster.fabric.kind}-{cluster.device.architecture}"
        found = fit_network(
            [(s, able) for s in across],
            fitted,
            num_starts=num_starts,
            hold_tree=True,
            informed=links.network.key != DEFAULT,
        )
        fitted = replace(fitted, network=found.network)
        sigma = _spread(across, fitted, able)
        kinds = {s.kind for s in across}
        widest = max(sigma) if kinds > {Collective.ALL_REDUCE} else links.network.unmeasured_sigma_log
        network = replace(found.network, key=key, sigma_log=sigma, unmeasured_sigma_log=widest)
        network = with_span(network, across)
        fitted = replace(fitted, network=network)
        text += network_table(network, f"{source} on {cluster.name}, {_count(across)} rows", prefix="comm.")
    sizes = [size for s in (*inside, *across) for size in _by_size(s, cluster, links, fitted, able)]
    check_fit(sum(s.error * s.num_rows for s in sizes) / sum(s.num_rows for s in sizes), cluster)
    return LinkCalibration(text=text, sizes=tuple(sizes), num_skipped=skipped)


def _nothing_to_fit(rows: Sequence[LogRow], *, in_place: bool) -> SpecError:
    value = f"{len(rows)} rows"
    known = [row for row in rows if row.collective in _KINDS]
    if not known:
        return SpecError("log", value, f"none is of {', '.join(_KINDS)}", "measure one of these")
    if all(row.num_ranks < 2 for row in known):
        rule = "all are of one rank, which sends nothing"
        return SpecError("log", value, rule, "build the tests with MPI=1 (else each process runs alone), or give -g")
    which = "in place" if in_place else "out of place"
    rule = f"none has a time {which} of two ranks or more and a size above 0"
    return SpecError("log", value, rule, "measure larger sizes" if not in_place else "leave --in-place out")


def _samples(
    rows: Sequence[LogRow], cluster: ClusterSpec, links: ClusterLinks, *, in_place: bool
) -> tuple[list[Samples], list[Samples], int]:
    grouped: dict[tuple[Collective, bool], list[tuple[float, float, float, bool, float]]] = defaultdict(list)
    skipped = 0
    for row in rows:
        time_s = row.in_place_s if in_place else row.time_s
        if row.collective not in _KINDS or time_s is None or row.num_ranks < 2 or row.size_bytes <= 0:
            skipped += 1
            continue
        if row.num_ranks > row.num_hosts * cluster.node.num_gpus:
            rule = (
                f"{row.num_ranks} ranks on {row.num_hosts} hosts, but {cluster.name} has {cluster.node.num_gpus} GPUs"
            )
            raise SpecError("log", row.collective, f"{rule} a host", "name the cluster that was measured")
        one = row.num_ranks <= links.domain_gpus and (row.num_hosts == 1 or links.domain_hosts > 1)
        per_node = row.num_ranks if one else -(-row.num_ranks // row.num_hosts)
        narrow = row.dtype.startswith(_NARROW)
        ranks = 2 if row.collective == "send_recv" else row.num_ranks
        per_node = (2 if one else 1) if row.collective == "send_recv" else per_node
        grouped[_KINDS[row.collective], one].append((ranks, per_node, row.size_bytes, narrow, time_s))
    found: dict[bool, list[Samples]] = {True: [], False: []}
    for (kind, one), cells in sorted(grouped.items()):
        ranks_of, per, size, narrow_of, times = (np.array(column) for column in zip(*cells, strict=True))
        nothing = np.zeros(len(cells))
        found[one].append(
            Samples(
                kind=kind,
                num_ranks=ranks_of.astype(float),
                ranks_per_node=per.astype(float),
                size=size,
                narrow=narrow_of,
                launch_s=nothing,
                floor_s=nothing,
                time_s=times,
                weight=np.ones(len(cells)),
            )
        )
    return found[True], found[False], skipped


def _count(samples: Sequence[Samples]) -> int:
    return sum(len(s.size) for s in samples)


def _errors(samples: Samples, links: ClusterLinks, able: Capabilities) -> Floats:
    return modelled_log_s(samples, links, 0.0, able) - np.log(samples.time_s)


def _spread(parts: Sequence[Samples], links: ClusterLinks, able: Capabilities) -> tuple[float, float, float]:
    found = np.concatenate([_errors(s, links, able) for s in parts])
    a, b, c = spread(found, np.concatenate([s.size for s in parts]), np.concatenate([s.weight for s in parts]))
    return max(a, 0.02), max(b, 0.02), max(c, 0.02)


def _by_size(
    samples: Samples, cluster: ClusterSpec, shipped: ClusterLinks, fitted: ClusterLinks, able: Capabilities
) -> list[FittedSize]:
    after = np.abs(np.expm1(_errors(samples, fitted, able)))
    before = np.abs(np.expm1(_errors(samples, shipped, able)))
    name = next(text for text, kind in _KINDS.items() if kind == samples.kind)
    found = []
    for n, r in sorted(set(zip(samples.num_ranks.tolist(), samples.ranks_per_node.tolist(), strict=True))):
        least = 0.0
        for most in (*_BANDS_BYTES, np.inf):
            part = (samples.num_ranks == n) & (samples.ranks_per_node == r)
            part &= (samples.size >= least) & (samples.size < most)
            least = most
            if part.any():
                found.append(
                    FittedSize(
                        collective=name,
                        num_ranks=int(n),
                        num_hosts=max(-(-int(n) // int(r)), -(-int(n) // cluster.node.num_gpus)),
                        below_bytes=most,
                        num_rows=int(part.sum()),
                        error=float(after[part].mean()),
                        before=float(before[part].mean()),
                    )
                )
    return found
