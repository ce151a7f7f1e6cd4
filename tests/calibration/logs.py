"""Texts as nccl-tests prints them."""

from collections.abc import Callable, Sequence

HEADER = """#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""

END = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 41.7\n#\n"

SIZES = [2.0**exponent for exponent in range(10, 31)]


def ranks_text(hosts: int, per_host: int, *, group: bool = True) -> str:
    """The list of ranks, of NCCL (with groups) or RCCL."""
    lines = []
    for rank in range(hosts * per_host):
        middle = " Group  0" if group else ""
        host, device = rank // per_host, rank % per_host
        lines.append(
            f"#  Rank {rank:2d}{middle} Pid {1000 + rank} on   node{host} device {device:2d} [0x{device:02x}] NVIDIA"
        )
    return "# Using devices\n" + "\n".join(lines) + "\n#\n"


def log_text(
    time_us: Callable[[float], float],
    *,
    test: str = "all_reduce_perf",
    hosts: int = 1,
    per_host: int = 8,
    dtype: str = "float",
    sizes: Sequence[float] = SIZES,
    between: str = "",
) -> str:
    """A whole log."""
    rows: list[str] = []
    for size in sizes:
        t = time_us(size)
        cells = f"{t:8.2f} {size / t / 1e3:7.2f} {size / t / 1e3:7.2f}      0"
        rows.append(f"{size:12.0f} {size / 4:13.0f} {dtype:>9s} {'sum':>7s} {-1:7d} {cells} {cells}")
    return (
        f"mpirun -np {hosts * per_host} ./build/{test} -b 1K -e 1G -f 2 -g 1\n"
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1\n"
        + ranks_text(hosts, per_host)
        + HEADER
        + f"\n{between}".join(rows)
        + "\n"
        + END
    )
