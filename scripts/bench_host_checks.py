"""Time what TORCH_DISTRIBUTED_DEBUG=DETAIL costs a collective: python scripts/bench_host_checks.py [--ranks 2 3 4 8].

Processes gather a few numbers over Gloo on this host, with and without the checks that PyTorch's ProcessGroupWrapper
then makes ahead of every collective, whatever its library. Printed is CPU time of a process (all of its threads) a
collective: with a core a rank that is what it takes, and other work on this host does not count. Figures:
docs/stacks.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

REPEATS = 150
WARM = 30


def main() -> None:
    """Print a line a group size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(collective_seconds(arguments.rank, arguments.ranks[0]))
        return
    for num_ranks in arguments.ranks:
        plain_s, checked_s = (group_seconds(num_ranks, level) for level in ("OFF", "DETAIL"))
        print(
            f"{num_ranks} ranks: {plain_s * 1e6:.0f} us, checked {checked_s * 1e6:.0f} us: "
            f"{(checked_s - plain_s) / num_ranks * 1e6:.0f} us a rank", flush=True,
        )  # fmt: skip


def group_seconds(num_ranks: int, level: str) -> float:
    """CPU seconds of a process a collective at a debug level, the median process."""
    environment = os.environ | {
        "TORCH_DISTRIBUTED_DEBUG": level, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29600 + num_ranks + 100 * (level == "OFF")),
    }  # fmt: skip
    command = [sys.executable, __file__, "--ranks", str(num_ranks), "--rank"]
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    return statistics.median(float(output.splitlines()[-1]) for output in outputs)


def collective_seconds(rank: int, num_ranks: int) -> float:
    """CPU seconds a collective of this process."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    own, gathered = torch.zeros(4), torch.zeros(4 * num_ranks)
    for number in range(WARM + REPEATS):
        if number == WARM:
            started = time.process_time()
        distributed.all_gather_into_tensor(gathered, own)
    seconds = (time.process_time() - started) / REPEATS
    distributed.destroy_process_group()
    return seconds


if __name__ == "__main__":
    main()
