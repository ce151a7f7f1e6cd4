"""Whether a log of collectives can be of a cluster: names of its GPUs, bus bandwidth, error of the fit."""

import re
from collections.abc import Sequence

from echo_explore.calibration.nccl_log import LogRow
from echo_explore.comm.paths import ClusterLinks
from echo_explore.core import SpecError
from echo_explore.specs import ClusterSpec

MAX_FIT_ERROR = 0.5
"""Mean error of a fit above which it is refused: the shipped fits are at 0.05 to 0.2, judged (2026-12)."""
_LINE_OVER_PAYLOAD = 26.5625 / 25
"""Raw rate over payload of an NVLink [nvidia-smi nvlink --status, H100, 2026]: no honest busbw lies above it."""
_VENDORS = {"NVIDIA", "AMD", "INSTINCT", "TESLA", "RADEON", "GRAPHICS", "DEVICE"}
_MODEL = re.compile(r"(?<![A-Z0-9])(?:MI\d{3}[A-Z]?|[A-Z]{1,2}\d{2,3}[A-Z]?)(?![A-Z0-9])")
_FORMS = ("PCIE", "NVL", "SXM")
_SWITCHED = ("all_reduce", "all_gather", "reduce_scatter")


def check_devices(rows: Sequence[LogRow], cluster: ClusterSpec) -> None:
    """Refuse rows whose log names another GPU than the cluster's; names without a model (`NVIDIA`, `gfx942`) pass.

    Raises:
        SpecError: names the log's GPU and the cluster's.
    """
    own = cluster.device.name
    for name in sorted({name for row in rows for name in row.devices}):
        if _is_other(name.upper(), own.upper()):
            rule = f"is not the GPU of {cluster.name} ({own})"
            raise SpecError("log", name, rule, "give --cluster the machine that was measured")


def _is_other(named: str, own: str) -> bool:
    wanted = _MODEL.search(own)
    said = set(re.findall(r"[\w-]+", named)) - _VENDORS
    if wanted is None or all(re.fullmatch(r"GFX\w+", word) for word in said):
        return False
    if wanted[0] not in _MODEL.findall(named):
        return True
    forms = [next((form for form in _FORMS if form in text), None) for text in (named, own)]
    return None not in forms and forms[0] != forms[1]


def check_bus_bandwidth(rows: Sequence[LogRow], cluster: ClusterSpec, links: ClusterLinks, *, in_place: bool) -> None:
    """Refuse rows that move more than the cluster's links can carry, reduction in switches counted.

    Raises:
        SpecError: names the row, its bus bandwidth and the most that the links carry.
    """
    for row in rows:
        time_s = row.in_place_s if in_place else row.time_s
        if time_s is None or row.num_ranks < 2:
            continue
        busbw = row.size_bytes * _bus_factor(row) / time_s
        most = _most_bytes_per_s(row, links) * _LINE_OVER_PAYLOAD
        if busbw > most:
            value = f"{busbw / 1e9:.0f} GB/s"
            where = f"{row.collective} of {row.size_bytes:.0f} bytes on {row.num_ranks} GPUs, {row.num_hosts} hosts"
            rule = f"{where}: the links of {cluster.name} carry at most {most / 1e9:.0f} GB/s of it"
            raise SpecError("bus bandwidth", value, rule, "give --cluster the machine that was measured")


def _bus_factor(row: LogRow) -> float:
    """Bus bandwidth over size / time [nccl-tests doc/PERFORMANCE.md, 2024]."""
    n = row.num_ranks
    if row.collective == "all_reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if row.collective in ("all_gather", "reduce_scatter", "alltoall") else 1.0


def _most_bytes_per_s(row: LogRow, links: ClusterLinks) -> float:
    """The bus bandwidth at which the links are full: what must leave a GPU, or a host, at least.

    A switch that reduces takes each byte once instead of twice. Over M domains 2 (M - 1)/M S must leave each, however
    the hosts reduce inside; an all-to-all sends (n - r)/n S of each of r ranks.
    """
    n = row.num_ranks
    if n <= links.domain_gpus and (row.num_hosts == 1 or links.domain_hosts > 1):
        reduces = links.has_switch_reduction and row.collective == "all_reduce"
        return links.scale_up_bytes_per_s * (2 * (n - 1) / n if reduces else 1.0)
    cards = links.network_bytes_per_s * links.domain_hosts
    domains = max(2.0, row.num_hosts / links.domain_hosts)
    if row.collective == "alltoall":
        per_domain = n / domains
        return cards * (n - 1) / (per_domain * (n - per_domain))
    if row.collective not in _SWITCHED:
        return cards
    reduced = 2.0 if links.has_network_reduction and row.collective == "all_reduce" else 1.0
    return cards * reduced * (n - 1) / n * domains / (domains - 1)


def check_fit(mean_error: float, cluster: ClusterSpec) -> None:
    """Refuse a fit whose mean error is above MAX_FIT_ERROR.

    Raises:
        SpecError: names the error and the limit.
    """
    if mean_error > MAX_FIT_ERROR:
        rule = (
            f"is above {MAX_FIT_ERROR:.0%}: these times are not those of collectives over the links of {cluster.name}"
        )
        fix = "give --cluster the machine that was measured, or correct the bandwidths of its file"
        raise SpecError("error of the fit", f"{mean_error:.0%}", rule, fix)
