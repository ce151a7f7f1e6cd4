"""How NCCL cuts a collective: channels, threads, chunks, slices, and how far chunks are pipelined over hops.

NCCL starts with all channels and drops one while message < channels * threads * threshold; each channel then moves its
part in chunks, which a ring passes on slice by slice. A kernel has one thread block a channel, and each takes one SM.

References: NCCL 2.18 src/enqueue.cc (getAlgoInfo, initCollProxyOp), src/include/comm.h (thread thresholds),
src/include/collectives.h (chunk and slice steps), src/init.cc (buffer sizes), 2023.
"""

import math
from dataclasses import dataclass

from echo_explore.core import SpecError

_BUFFER_BYTES = {"LL": 524288.0, "LL128": 4915200.0, "Simple": 4194304.0}
"""Of a channel: 8 lines * 512 threads * 8 steps * 16 B; 120 words * 640 threads * 8 steps * 8 B; NCCL_BUFFSIZE."""
_DATA_FRACTION = {"LL": 0.5, "LL128": 120 / 128, "Simple": 1.0}
_THREADS = {"LL": 512, "LL128": 640, "Simple": 512}
_THRESHOLD_BYTES = {"LL": 8, "LL128": 8, "Simple": 64}
"""Bytes a thread below which a channel is dropped [NCCL 2.18 src/include/comm.h, 2023]."""
_STEPS = 8
_CHANNELS = {"volta": 12, "ampere": 24, "ada": 24, "hopper": 24, "blackwell": 32, "cdna3": 32, "cdna4": 32}
"""Channels on a full host. Volta: six rings twice over [DGX-1V, NCCL 2.18 graph search]; others as logs of such hosts
show them with NCCL_DEBUG=INFO; Blackwell and CDNA are judged (2026-11)."""
_SWITCH_CHANNELS = 16
"""Channels of NVLS on one host [NCCL 2.18 src/transport/nvls.cc, 2023]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """How one collective runs.

    Attributes:
        num_channels: also the SMs that it occupies, one thread block each.
        num_threads: of a thread block.
        chunk_bytes: what a channel works on at a time.
        slice_bytes: what it hands to the next rank at a time.
        num_loops: chunks, one after another, that a channel moves a ring step.
        pipeline_depth: slices of one chunk that travel at once.
    """

    algorithm: str
    protocol: str
    num_channels: int
    num_threads: int
    chunk_bytes: float
    slice_bytes: float
    num_loops: int
    pipeline_depth: int

    @property
    def num_sms(self) -> int:
        """SMs that the kernel holds while it runs."""
        return self.num_channels


def collective_plan(
    algorithm: str, protocol: str, message_bytes: float, *, num_ranks: int, architecture: str, num_nodes: int = 1
) -> CollectivePlan:
    """Channels, threads, chunks and slices of a collective.

    Raises:
        SpecError: an unknown protocol or architecture.
    """
    if protocol not in _THREADS:
        raise SpecError("protocol", protocol, f"must be one of {', '.join(_THREADS)}", "correct the name")
    if architecture not in _CHANNELS:
        raise SpecError("architecture", architecture, f"must be one of {', '.join(_CHANNELS)}", "correct the name")
    most = _SWITCH_CHANNELS if algorithm.startswith("nvls") else _CHANNELS[architecture]
    threshold = _THRESHOLD_BYTES[protocol]
    if algorithm == "ring" and protocol == "LL":
        threshold *= num_ranks
    channels, threads = _narrow(message_bytes, most, _THREADS[protocol], threshold)
    step = _BUFFER_BYTES[protocol] / _STEPS * _DATA_FRACTION[protocol]
    ring = algorithm in ("ring", "pat")
    chunk = step * (_STEPS // 2 if ring and protocol == "Simple" else 1)
    if algorithm.startswith(("tree", "nvls")):
        chunk = _tree_chunk(message_bytes, channels, chunk, depth=max(1, math.ceil(math.log2(max(num_nodes, 2)))))
    slices = 2 if ring and protocol == "Simple" else 1
    share = message_bytes / channels / (num_ranks if ring else 1)
    chunk = max(1.0, min(chunk, share))
    return CollectivePlan(
        algorithm=algorithm,
        protocol=protocol,
        num_channels=channels,
        num_threads=threads,
        chunk_bytes=chunk,
        slice_bytes=chunk / slices,
        num_loops=max(1, math.ceil(share / chunk)),
        pipeline_depth=slices,
    )


def _narrow(message_bytes: float, channels: int, threads: int, threshold: int) -> tuple[int, int]:
    """Fewer channels, then fewer threads, until each thread has its least number of bytes."""
    channels = min(channels, max(1, math.floor(message_bytes / (threads * threshold))))
    if channels == 1:
        while message_bytes < threads * threshold and threads % 128 == 0:
            threads //= 2
    return channels, threads


def _tree_chunk(message_bytes: float, channels: int, chunk: float, *, depth: int) -> float:
    """Smaller chunks for deep trees, so that the pipeline fills [NCCL 2.18 src/enqueue.cc, 2023]."""
    for factor, least in ((8, 131072.0), (4, 65536.0), (1, 32768.0)):
        while message_bytes / (channels * chunk) < depth * factor and chunk > least:
            chunk /= 2
    return chunk
