"""Fit the coefficients of collectives to measured times and write them as a calibration file.

Usage: fit_collectives.py --data DIR [--out FILE]

DIR holds kernels/collectives.csv.gz: gpu, fabric, collective, dtype, num_gpus, nodes, size_bytes, latency_us, algo,
source. Only rows with algo = auto count (NCCL's own choice). Each scale-up fabric is fitted to its rows inside one
domain, then each network kind to its rows over several nodes with the scale-up coefficients held. The loss is the soft
absolute error of the log, so that outliers (cold starts, protocol changes) do not pull. Prints the mean absolute error
by fabric and collective; what is written is coefficients only.
"""

import argparse
import csv
import gzip
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from echo_explore.comm import CollectiveRequest, CommCoefficients, HierarchicalModel
from echo_explore.comm.coefficients import DEFAULT, SIZE_BANDS_BYTES, NetworkCoefficients, ScaleUpCoefficients
from echo_explore.graph import Collective
from echo_explore.specs import ClusterSpec, load_cluster
from echo_explore.topology import GroupShape

KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "send_recv": Collective.SEND,
}
INTEGERS = ("int8", "uint8")
"""Types that the switch does not reduce: their all-reduces are left out."""
NET_PROTOCOL_EFFICIENCY = (0.5, 0.92, 1.0)
"""Shares of bandwidth that LL and LL128 leave to data between nodes [NCCL 2.18 src/graph/tuning.cc, 2023]."""
DEFAULT_SIGMA = (0.45, 0.40, 0.30)
"""Spread where nothing was measured: what fabrics differ by among those measured, judged from their coefficients."""
RAIL_EFFICIENCY = 0.9
"""Between 24.3 of 25 GB/s for one pair of GPUs alone on HDR [fwyc0573/moe_mg profiling_comm_sh, 2024] and about 21 of
25 for all rails of a ZeRO-3 job [arXiv 2104.04473, table 2, 2021, as derived from its step times]."""
HEADER = """# Coefficients of collectives by scripts/fit_collectives.py, {date}; meaning: docs/collectives.md.
# Triples are for NCCL's protocols LL, LL128, Simple, pairs for LL, Simple.
# sigma_log: for messages under 256 KiB, under 16 MiB, above.
schema = 1
"""
UNMEASURED_SIGMA = 0.35
"""Spread of all-gather, reduce-scatter, all-to-all and sends between nodes, which no row covers: judged, not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured time, the median over repetitions and library versions."""

    cluster: str
    collective: str
    num_gpus: int
    nodes: int
    size_bytes: float
    time_s: float
    from_xla: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows of one fabric: which cluster file describes it, and which rows those are."""

    cluster: str
    gpu: str
    fabric: str
    only: tuple[str, ...] = ()


SCALE_UP = {
    "nvswitch-ampere": (
        Source(cluster="a100-80gb-hdr", gpu="A100-SXM4-80GB", fabric="NVSwitch NVLink3", only=("aic012",)),
        Source(cluster="a100-40gb-hdr", gpu="A100-SXM4-40GB", fabric="", only=("echo",)),
    ),
    "nvswitch-hopper": (
        Source(
            cluster="h100-ndr", gpu="H100-SXM5-80GB", fabric="NVSwitch NVLink4", only=("aic012", "xla", "dgxc", "aws")
        ),
        Source(cluster="h200-ndr", gpu="H200-SXM", fabric="NVSwitch NVLink4", only=("aic012",)),
    ),
    "nvswitch-blackwell": (
        Source(cluster="b200-ndr", gpu="B200-SXM", fabric="NVSwitch NVLink5", only=("aic012", "xla")),
        Source(cluster="gb200-nvl72", gpu="GB200", fabric="NVL72", only=("aic012", "xla")),
        Source(cluster="gb300-nvl72", gpu="GB300", fabric="NVL72", only=("aic012", "xla")),
    ),
}
NETWORK = {
    "infiniband": (
        Source(cluster="a100-40gb-hdr", gpu="A100-SXM4-40GB", fabric="NDv4", only=("echo",)),
        Source(cluster="h100-ndr", gpu="H100-SXM5-80GB", fabric="8x400G", only=("nccl-tests-issue",)),
    ),
    "efa": (
        Source(cluster="a100-p4de-efa", gpu="A100-SXM4-80GB", fabric="p4de", only=("aws",)),
        Source(cluster="h100-p5-efa", gpu="H100-SXM5-80GB", fabric="EFA (p5", only=("aws",)),
    ),
}
CITATIONS = {
    "nvswitch-ampere": "nccl-tests on A100: aiconfigurator-core 0.12.0 tables (Apache-2.0), NetX-lab/Echo logs (MIT)",
    "nvswitch-hopper": "nccl-tests on H100, H200: aiconfigurator-core 0.12.0, openxla tables, AWS and NVIDIA READMEs",
    "nvswitch-blackwell": "nccl-tests on B200, GB200, GB300: aiconfigurator-core 0.12.0, openxla tables (Apache-2.0)",
    "infiniband": "nccl-tests: NetX-lab/Echo logs, ND A100 v4, 2-16 nodes; NVIDIA/nccl-tests issue 309, 8 H100 nodes",
    "efa": "nccl-tests: AWS awsome-distributed-training README, p4de and p5, 2 nodes",
}


def read_samples(path: Path, sources: Sequence[Source], *, inside: bool) -> list[Sample]:
    """Medians of the rows of these sources inside one domain, or over several nodes."""
    grouped: dict[tuple[str, str, int, int, float, bool], list[float]] = defaultdict(list)
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["algo"] != "auto" or row["collective"] not in KINDS:
                continue
            if row["collective"] == "all_reduce" and row["dtype"] in INTEGERS:
                continue
            source = next((s for s in sources if _matches(s, row)), None)
            if source is None:
                continue
            one_domain = int(row["num_gpus"]) <= load_cluster(source.cluster).node.domain_gpus
            if one_domain != inside or (int(row["num_gpus"]) == 1) or (one_domain and _several_hosts(source, row)):
                continue
            xla = row["source"].startswith("xla")
            key = (
                source.cluster,
                row["collective"],
                int(row["num_gpus"]),
                int(row["nodes"]),
                float(row["size_bytes"]),
                xla,
            )
            grouped[key].append(float(row["latency_us"]) * 1e-6)
    return [
        Sample(
            cluster=c,
            collective=k,
            num_gpus=n,
            nodes=1 if inside else m,
            size_bytes=s,
            time_s=median(times),
            from_xla=x,
        )
        for (c, k, n, m, s, x), times in sorted(grouped.items())
    ]


def _matches(source: Source, row: dict[str, str]) -> bool:
    return (
        row["gpu"] == source.gpu
        and source.fabric in row["fabric"]
        and (not source.only or row["source"].startswith(source.only))
    )


def _several_hosts(source: Source, row: dict[str, str]) -> bool:
    """Rows of several hosts whose cluster has no scale-up links between hosts."""
    node = load_cluster(source.cluster).node
    return int(row["nodes"]) > 1 and node.domain_gpus == node.num_gpus


def residuals(
    coefficients: CommCoefficients, samples: Iterable[Sample], clusters: dict[str, ClusterSpec], xla_s: float
) -> np.ndarray:
    """Log of modelled over measured time of every sample."""
    model = HierarchicalModel(coefficients=coefficients)
    values = []
    for s in samples:
        group = GroupShape(num_ranks=s.num_gpus, ranks_per_node=-(-s.num_gpus // s.nodes))
        request = CollectiveRequest(collective=KINDS[s.collective], message_bytes=s.size_bytes, group=group)
        time_s = model.collective_time(request, clusters[s.cluster]).time_s + (xla_s if s.from_xla else 0.0)
        values.append(math.log(time_s / s.time_s))
    return np.array(values)


def scale_up_from(key: str, x: Sequence[float]) -> ScaleUpCoefficients:
    """Coefficients from logs of parameters."""
    v = [math.exp(value) for value in x]
    return ScaleUpCoefficients(
        key=key,
        base_s=(v[0] * 1e-6, v[1] * 1e-6, v[2] * 1e-6),
        hop_factor=(v[3], v[4], v[5]),
        efficiency=(min(v[6], 1.0), min(v[7], 1.0), min(v[8], 1.0)),
        local_efficiency=v[9],
        tree_efficiency=0.5,
        switch_base_s=v[10] * 1e-6,
        switch_efficiency=min(v[11], 1.0),
        pair_base_s=(v[12] * 1e-6, v[13] * 1e-6),
        pair_message_s=v[14] * 1e-6,
        pair_efficiency=(min(v[15], 1.0), min(v[16], 1.0)),
        sigma_log=DEFAULT_SIGMA,
    )


SCALE_UP_START = (8.0, 12.0, 20.0, 1.5, 2.0, 4.0, 0.3, 0.5, 0.75, 1.5, 20.0, 0.6, 8.0, 15.0, 0.2, 0.2, 0.75)
NETWORK_START = (5.0, 2.0, 3.0, 5.0, 0.7, 0.7)
_FREE_NETWORK = NetworkCoefficients(
    key="free",
    base_s=0.0,
    hop_factor=(1.0, 1.0, 1.0),
    protocol_efficiency=NET_PROTOCOL_EFFICIENCY,
    ring_efficiency=1.0,
    tree_efficiency=1.0,
    pair_efficiency=1.0,
    rail_efficiency=RAIL_EFFICIENCY,
    sigma_log=DEFAULT_SIGMA,
    unmeasured_sigma_log=UNMEASURED_SIGMA,
)


def network_from(key: str, x: Sequence[float]) -> NetworkCoefficients:
    """Coefficients from logs of parameters; sends take the efficiency of rings, as nothing measured them."""
    v = [math.exp(value) for value in x]
    ring = min(v[4], 1.0)
    return replace(
        _FREE_NETWORK,
        key=key,
        base_s=v[0] * 1e-6,
        hop_factor=(v[1], v[2], v[3]),
        ring_efficiency=ring,
        tree_efficiency=min(v[5], 1.0),
        pair_efficiency=ring,
    )


def minimise(function: Callable[[Sequence[float]], object], start: Sequence[float]) -> list[float]:
    """Logs of the parameters with the least soft absolute error of logs, held near the start by a weak prior."""
    origin = np.log(start)

    def with_prior(x: Sequence[float]) -> object:
        return np.concatenate([np.asarray(function(x)), 0.1 * (np.asarray(x) - origin)])

    fit = least_squares(with_prior, origin, loss="soft_l1", f_scale=0.1, diff_step=1e-3, max_nfev=60)
    return [float(value) for value in fit.x]


def spread(errors: np.ndarray, samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Root mean square of the log errors by size band; a band with under 5 rows takes that of all rows."""
    sizes = np.array([s.size_bytes for s in samples])
    bands = (sizes >= SIZE_BANDS_BYTES[0]).astype(int) + (sizes >= SIZE_BANDS_BYTES[1])
    found = []
    for band in range(3):
        part = errors[bands == band] if (bands == band).sum() >= 5 else errors
        found.append(round(float(np.sqrt(np.mean(part**2))), 3))
    return found[0], found[1], found[2]


def report(title: str, errors: np.ndarray, samples: Sequence[Sample]) -> None:
    """Print mean and median absolute error by cluster and collective."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for error, s in zip(errors, samples, strict=True):
        groups[s.cluster, s.collective].append(abs(math.expm1(error)))
    print(f"{title}: {len(samples)} points, mean absolute error {np.mean(np.abs(np.expm1(errors))):.1%}")
    for (cluster, kind), values in sorted(groups.items()):
        print(
            f"  {cluster:15s} {kind:15s} {len(values):5d} mean {np.mean(values):6.1%} median {np.median(values):6.1%}"
        )


def fit_scale_up(path: Path) -> tuple[dict[str, ScaleUpCoefficients], dict[str, int]]:
    """Coefficients and number of points by fabric."""
    found, counts = {}, {}
    for key, sources in SCALE_UP.items():
        samples = read_samples(path, sources, inside=True)
        clusters = {s.cluster: load_cluster(s.cluster) for s in sources}

        def errors(x: Sequence[float], key: str = key, samples: list[Sample] = samples, clusters=clusters) -> object:  # type: ignore[no-untyped-def]
            coefficients = CommCoefficients(scale_up={DEFAULT: scale_up_from(key, x)}, network={DEFAULT: _FREE_NETWORK})
            return residuals(coefficients, samples, clusters, math.exp(x[17]) * 1e-6)

        x = minimise(errors, (*SCALE_UP_START, 15.0))
        final = np.asarray(errors(x))
        report(f"{key} (XLA launch {math.exp(x[17]):.1f} us)", final, samples)
        found[key] = replace(scale_up_from(key, x), sigma_log=spread(final, samples))
        counts[key] = len(samples)
    return found, counts


def fit_network(
    path: Path, scale_up: dict[str, ScaleUpCoefficients]
) -> tuple[dict[str, NetworkCoefficients], dict[str, int], float]:
    """Coefficients and number of points by network kind, and the efficiency of chains in trees, common to all."""
    data = {key: read_samples(path, sources, inside=False) for key, sources in NETWORK.items()}
    clusters = {s.cluster: load_cluster(s.cluster) for sources in NETWORK.values() for s in sources}

    def errors(x: Sequence[float]) -> object:
        tree = min(math.exp(x[-1]), 1.0)
        fabrics = {k: replace(v, tree_efficiency=tree) for k, v in scale_up.items()}
        networks = {key: network_from(key, x[6 * i : 6 * i + 6]) for i, key in enumerate(data)}
        coefficients = CommCoefficients(scale_up=fabrics, network=networks)
        return np.concatenate([residuals(coefficients, samples, clusters, 0.0) for samples in data.values()])

    x = minimise(errors, (*(NETWORK_START * len(data)), 0.5))
    every = np.asarray(errors(x))
    found, counts, start = {}, {}, 0
    for i, (key, samples) in enumerate(data.items()):
        part = every[start : start + len(samples)]
        start += len(samples)
        report(key, part, samples)
        found[key] = replace(network_from(key, x[6 * i : 6 * i + 6]), sigma_log=spread(part, samples))
        counts[key] = len(samples)
    return found, counts, min(math.exp(x[-1]), 1.0)


def _us(value_s: float) -> str:
    return f'"{value_s * 1e6:.3g} us"'


def _list(values: Iterable[float]) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values) + "]"


def _scale_up_table(c: ScaleUpCoefficients, comment: str) -> str:
    return f"""
# {comment}
[scale_up.{c.key}]
base = [{", ".join(_us(v) for v in c.base_s)}]
hop_factor = {_list(c.hop_factor)}
efficiency = {_list(c.efficiency)}
local_efficiency = {c.local_efficiency:.3g}
tree_efficiency = {c.tree_efficiency:.3g}
switch_base = {_us(c.switch_base_s)}
switch_efficiency = {c.switch_efficiency:.3g}
pair_base = [{", ".join(_us(v) for v in c.pair_base_s)}]
pair_message = {_us(c.pair_message_s)}
pair_efficiency = {_list(c.pair_efficiency)}
sigma_log = {_list(c.sigma_log)}
"""


def _network_table(c: NetworkCoefficients, comment: str) -> str:
    return f"""
# {comment}
[network.{c.key}]
base = {_us(c.base_s)}
hop_factor = {_list(c.hop_factor)}
protocol_efficiency = {_list(c.protocol_efficiency)}  # NCCL 2.18 src/graph/tuning.cc (2023)
ring_efficiency = {c.ring_efficiency:.3g}
tree_efficiency = {c.tree_efficiency:.3g}
pair_efficiency = {c.pair_efficiency:.3g}  # as ring_efficiency: not measured
rail_efficiency = {c.rail_efficiency:.3g}  # judged between two published figures: docs/collectives.md
sigma_log = {_list(c.sigma_log)}
unmeasured_sigma_log = {c.unmeasured_sigma_log:.3g}  # judged, not fitted
"""


def _mean(values: Iterable[float]) -> float:
    return math.exp(float(np.mean(np.log(list(values)))))


def default_scale_up(found: dict[str, ScaleUpCoefficients]) -> ScaleUpCoefficients:
    """Geometric means over the measured fabrics."""
    all_of = list(found.values())

    def triple(name: str) -> tuple[float, float, float]:
        a, b, c = (_mean(getattr(f, name)[i] for f in all_of) for i in range(3))
        return a, b, c

    def pair(name: str) -> tuple[float, float]:
        a, b = (_mean(getattr(f, name)[i] for f in all_of) for i in range(2))
        return a, b

    single = ("local_efficiency", "tree_efficiency", "switch_base_s", "switch_efficiency", "pair_message_s")
    return replace(
        all_of[0],
        key=DEFAULT,
        sigma_log=DEFAULT_SIGMA,
        base_s=triple("base_s"),
        hop_factor=triple("hop_factor"),
        efficiency=triple("efficiency"),
        pair_base_s=pair("pair_base_s"),
        pair_efficiency=pair("pair_efficiency"),
        **{name: _mean(getattr(f, name) for f in all_of) for name in single},
    )


def main() -> None:
    """Fit, report, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds kernels/collectives.csv.gz")
    parser.add_argument("--out", type=Path, help="calibration file to write; without it only the errors are printed")
    parser.add_argument("--date", default="2026-11-30", help="date of the fit, for the file's comments")
    args = parser.parse_args()
    path = args.data / "kernels" / "collectives.csv.gz"
    scale_up, points = fit_scale_up(path)
    network, net_points, tree = fit_network(path, scale_up)
    scale_up = {key: replace(value, tree_efficiency=tree) for key, value in scale_up.items()}
    if args.out is None:
        return
    text = HEADER.format(date=args.date)
    for key, value in scale_up.items():
        text += _scale_up_table(value, f"{CITATIONS[key]}; {points[key]} points, {args.date}")
    text += _scale_up_table(
        default_scale_up(scale_up),
        "Fabrics that were not measured: geometric means of the above, wider spread (judged)",
    )
    for key, net in network.items():
        text += _network_table(net, f"{CITATIONS[key]}; {net_points[key]} points, {args.date}")
    other = replace(network["infiniband"], key=DEFAULT, sigma_log=DEFAULT_SIGMA, unmeasured_sigma_log=0.5)
    text += _network_table(other, "Networks that were not measured: as InfiniBand, wider spread (judged)")
    args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
