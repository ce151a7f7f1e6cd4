"""Study the claims of EFLOPS (HPCA 2020) with the flow engine; prints tables, draws docs/eflops_*.svg with --out DIR.

By hand: python -m scripts.eflops_study [--out docs]. Assumptions and what follows from the figures: docs/eflops.md.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from echo_explore.comm.contention import step_time
from echo_explore.comm.halving_doubling import halving_doubling_time
from echo_explore.comm.patterns import flows_between, ring
from echo_explore.specs import ClusterSpec, load_cluster
from echo_explore.topology import block_seats, cluster_network, device_numbers, mapped_seats
from scripts.svg_plot import line_chart

GRADIENT_BYTES = 4 * 25.557e6
"""ResNet-50 in fp32: 25,557,032 parameters (torchvision model card, 2017)."""
COMPUTE_S = 64 / 350
"""Assumed (2026-11): 64 images a GPU at 350 images/s, V100 in fp32."""
OVERLAP_S = COMPUTE_S * 2 / 3
"""Backward takes two thirds of a step; gradients may be sent beside it."""
STEP_S = 5e-6
"""Assumed (2026-11): start of one exchange."""
SEEDS = range(5)


def hosts() -> tuple[ClusterSpec, ClusterSpec]:
    """The server with shared uplinks, and the one whose GPUs each have a card."""
    return load_cluster("v100-pcie-shared-uplinks"), load_cluster("v100-pcie-own-uplinks")


def server_study() -> list[tuple[str, float, float]]:
    """(pattern, seconds shared, seconds own) of 100 MB a flow, two hosts."""
    patterns = {
        "every GPU to its twin on the other host": flows_between(range(16), [(r + 8) % 16 for r in range(16)], 1e8),
        "ring over all GPUs, host by host": ring(range(16), 1e8),
        "ring that changes host at each GPU": ring([r // 2 + r % 2 * 8 for r in range(16)], 1e8),
        "halving-doubling, first step": flows_between(range(16), [r ^ 8 for r in range(16)], 1e8),
    }
    networks = [cluster_network(cluster, 2) for cluster in hosts()]
    return [
        (name, *(step_time(network, flows, spread="spray") for network in networks))  # type: ignore[misc]
        for name, flows in patterns.items()
    ]


def fabric_study(num_gpus: int) -> dict[str, float]:
    """Seconds of an all-reduce of ResNet-50's gradients by fabric and algorithm; the mean over hash seeds."""
    shared, own = hosts()
    num_hosts = num_gpus // 8
    result = {}
    for name, cluster in (("shared uplinks", shared), ("own uplinks", own)):
        network = cluster_network(cluster, num_hosts)
        flows = ring(np.arange(num_gpus), 2 * (num_gpus - 1) / num_gpus * GRADIENT_BYTES)
        times = [step_time(network, flows, seed=s) + 2 * (num_gpus - 1) * STEP_S for s in SEEDS]
        result[f"ring, {name}, leaf-spine"] = float(np.mean(times))
        times = [
            halving_doubling_time(network, np.arange(num_gpus), GRADIENT_BYTES, seed=s, step_s=STEP_S) for s in SEEDS
        ]
        result[f"halving-doubling, {name}, leaf-spine"] = float(np.mean(times))
    per_switch = 2 ** ((num_gpus.bit_length() - 1) // 2)  # M = N/2 or M = N: cables as fast as cards, or twice
    switches = num_gpus // per_switch
    fabric = own.fabric.model_copy(update={"topology": "bigraph", "nodes_per_leaf": per_switch // 4})
    network = cluster_network(own.model_copy(update={"fabric": fabric}), num_hosts)
    for name, seats in (
        ("unmapped", block_seats(per_switch, switches)),
        ("mapped", mapped_seats(per_switch, switches)),
    ):
        devices = device_numbers(seats, per_switch, switches, cards_per_host=8)
        time = halving_doubling_time(network, devices, GRADIENT_BYTES, step_s=STEP_S)
        result[f"halving-doubling {name}, own uplinks, BiGraph"] = time
    return result


def scaling(all_reduce_s: float) -> float:
    """Share of linear scaling: compute over compute and the communication that backward does not hide."""
    return COMPUTE_S / (COMPUTE_S + max(0.0, all_reduce_s - OVERLAP_S))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args(arguments).out
    if out is not None and not out.is_dir():
        parser.error(f"--out {out}: is not a folder; fix: make it first")
    print("1. inside the server: ms of 100 MB a flow, two hosts")
    for name, shared, own in server_study():
        print(f"  {name:42} shared {shared * 1e3:7.1f}  own {own * 1e3:7.1f}  speed-up {shared / own:5.2f}")
    sizes = [16, 32, 64, 128, 256, 512]
    table = {n: fabric_study(n) for n in sizes}
    print("2. all-reduce of 102 MB, ms")
    for name in table[sizes[0]]:
        print(f"  {name:52}" + "".join(f"{table[n][name] * 1e3:9.1f}" for n in sizes))
    print("3. ResNet-50, % of linear scaling: overlapped with backward; not overlapped")
    for name in table[sizes[0]]:
        hidden = "".join(f"{100 * scaling(table[n][name]):8.1f}" for n in sizes)
        exposed = "".join(f"{100 * COMPUTE_S / (COMPUTE_S + table[n][name]):8.1f}" for n in sizes)
        print(f"  {name:52}{hidden}  |{exposed}")
    if out is not None:
        times = {name: [table[n][name] * 1e3 for n in sizes] for name in table[sizes[0]]}
        share = {name: [100 * COMPUTE_S / (COMPUTE_S + table[n][name]) for n in sizes] for name in table[sizes[0]]}
        (out / "eflops_all_reduce.svg").write_text(line_chart("All-reduce of 102 MB, ms", sizes, times))
        (out / "eflops_scaling.svg").write_text(line_chart("ResNet-50, % of linear, no overlap", sizes, share))


if __name__ == "__main__":
    main()
