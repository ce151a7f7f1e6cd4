"""Time a Clos of 1,024 hosts with eight rails, its routes, and flow-level steps; prints seconds, best of three.

By hand: python scripts/bench_topology.py. Compilation is left out: it happens once for a version of the sources.
"""

import time
from collections.abc import Callable

import numpy as np

from echo_explore.comm.contention import flow_times
from echo_explore.specs import load_cluster
from echo_explore.topology import cluster_network
from echo_explore.topology.routing import route


def best(run: Callable[[], object], *, repeats: int = 3) -> float:
    """Seconds of the fastest of some runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the figures."""
    base = load_cluster("h100-ndr")
    pods = base.fabric.model_copy(update={"leaves_per_pod": 8})
    cluster = base.model_copy(update={"max_nodes": 1024, "fabric": pods})
    rng = np.random.default_rng(1)
    network = cluster_network(cluster, 1024)
    sources, targets = rng.integers(0, network.num_devices, (2, 100_000))
    route(network, [0, 0], [1, 9])  # compiles
    flow_times(network, route(network, [0], [9]), 1.0)
    both = best(lambda: route(cluster_network(cluster, 1024), sources, targets))
    print(f"Clos of 1,024 hosts, 8 rails, three levels, {network.num_links:,} links: ", end="")
    print(f"build and route 100,000 pairs {both:.2f} s")
    permutation = rng.permutation(network.num_devices)
    senders = np.tile(np.arange(network.num_devices), 2)
    receivers = np.concatenate([permutation, rng.permutation(network.num_devices)])
    routes = route(network, senders, receivers)
    equal = best(lambda: flow_times(network, routes, 1e8))
    size = rng.uniform(1e6, 1e8, len(senders))
    unequal = best(lambda: flow_times(network, routes, size))
    print(f"step of {len(senders):,} flows, two random permutations, equal sizes, exact: {equal:.2f} s")
    print(f"the same with random sizes, exact: {unequal:.2f} s")


if __name__ == "__main__":
    main()
