"""How many collectives a second the model prices: as columns, one by one, and again from memory.

Usage: bench_collectives.py [--count 200000]
"""

import argparse
import time

import numpy as np

from echo_explore.comm import CollectiveRequest, HierarchicalModel
from echo_explore.graph import Collective
from echo_explore.specs import load_cluster
from echo_explore.topology import GroupShape

KINDS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


def main() -> None:
    """Price, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000, help="collectives of each kind")
    args = parser.parse_args()
    model, cluster = HierarchicalModel.shipped(), load_cluster("h100-ndr")
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.uniform(8, 34, args.count))
    nodes = np.exp2(rng.integers(0, 8, args.count))
    for kind in KINDS:
        start = time.perf_counter()
        model.collective_times(kind, sizes, cluster, num_ranks=8 * nodes, ranks_per_node=8)
        print(f"columns, {kind.name:15s} {args.count / (time.perf_counter() - start):12,.0f} a second")
    group = GroupShape(num_ranks=64, ranks_per_node=8)
    requests = [
        CollectiveRequest(collective=Collective.ALL_REDUCE, message_bytes=float(size), group=group)
        for size in sizes[:2000]
    ]
    for name in ("one by one", "from memory"):
        start = time.perf_counter()
        for request in requests:
            model.collective_time(request, cluster)
        print(f"{name}, ALL_REDUCE {len(requests) / (time.perf_counter() - start):12,.0f} a second")


if __name__ == "__main__":
    main()
