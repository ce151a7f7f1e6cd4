"""Models beside NCCL's tuner, taken where they are named: frameworks' own kernels, and plain halving-doubling.

A framework's all-reduce (`--library vllm`) is one-shot, two-shot or in the switch by its own rule of size and ranks
inside a scale-up domain, and NCCL's elsewhere (comm/custom.py). Halving-doubling is what a library without NCCL's
algorithms runs (`--algo halving-doubling`); NCCL never takes it.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from echo_explore.comm.algorithms import SIMPLE, AlgorithmTime
from echo_explore.comm.choice import HALVING_DOUBLING, OWN_KERNELS, OWN_PROTOCOL, Batch, Option
from echo_explore.comm.coefficients import OneShotCosts
from echo_explore.comm.custom import custom_regime, own_kernel_s
from echo_explore.comm.paths import ClusterLinks, Floats, GroupArrays
from echo_explore.comm.routed import routed_share
from echo_explore.comm.schedule import CollectivePlan

_OTHERS_S: Final = 1e6
"""Added to what a framework does not take, so that it stays an option to show and to force."""
_REGIME = {"one-shot": 0, "two-shot": 1, "in-switch": 3}
_NCCL_REGIME = 2
OWN_BLOCKS: Final[Mapping[str, int]] = {"vllm": 36, "sglang": 36, "sglang-renewed": 36, "trtllm": 24}
"""Most thread blocks [vLLM csrc/custom_all_reduce.cuh, kMaxBlocks, 2024, which SGLang took over; TensorRT-LLM
customAllReduceKernels.h, MAX_ALL_REDUCE_BLOCKS, 2024]; SGLang's renewed kernels: judged (2026-12)."""
OWN_THREADS: Final = 512
"""Of a block, each of which moves 16 bytes at a time [the same]."""


def framework_options(
    options: list[Option], batch: Batch, links: ClusterLinks, costs: OneShotCosts, framework: str
) -> list[Option]:
    """NCCL's options of an all-reduce and the framework's kernels; what the framework takes has the least belief."""
    groups = batch.groups
    regime = np.where(groups.crosses, _NCCL_REGIME, custom_regime(groups.num_ranks, batch.size, costs))
    nccl = np.where(regime == _NCCL_REGIME, 0.0, _OTHERS_S)
    result = [
        Option(
            algorithm=o.algorithm,
            protocol=o.protocol,
            time=o.time,
            believed_s=o.believed_s + nccl,
            even_s=o.even_s,
        )
        for o in options
    ]
    for name in OWN_KERNELS:
        if name == "in-switch" and not (links.has_switch_reduction and max(costs.switch_bytes) > 0):
            continue
        able = ~groups.crosses & (groups.num_ranks <= costs.most_ranks)
        believed = np.where(able, np.where(regime == _REGIME[name], 0.0, _OTHERS_S), np.inf)
        time_s = own_kernel_s(name, groups.num_ranks, batch.size, links.scale_up_bytes_per_s, costs)
        time = AlgorithmTime(latency_s=np.zeros_like(time_s), stream_s=time_s)
        result.append(
            Option(
                algorithm=name,
                protocol=OWN_PROTOCOL,
                time=time,
                believed_s=believed,
                sigma_log=costs.sigma_log,
                max_blocks=OWN_BLOCKS[framework],
            )
        )
    return result


def halving_doubling_option(batch: Batch, links: ClusterLinks) -> Option:
    """Plain halving-doubling; exists for powers of two that lie evenly on a power of two of domains."""
    groups = batch.groups
    even = _power_of_two(groups.num_ranks) & _power_of_two(groups.num_nodes)
    even &= groups.num_ranks == groups.num_nodes * groups.ranks_per_node
    time = halving_doubling(groups, links, batch.size)
    believed = np.where(even, time.time_s, np.inf)
    sigma_log = links.network.unmeasured_sigma_log
    return Option(algorithm=HALVING_DOUBLING, protocol="Simple", time=time, believed_s=believed, sigma_log=sigma_log)


def halving_doubling(groups: GroupArrays, links: ClusterLinks, size: Floats) -> AlgorithmTime:
    """An all-reduce that halves log2 n times, far ranks first, and doubles back; n ranks on M domains, r on each.

    t = a + 2 log2(r) h + 2 log2(M) g + 2 sum_i r S / 2^i / (B q s_i) + 2 (r-1)/n S / (W e) + S / (n W l)

    Step i = 1..log2 M exchanges S / 2^i between domains M / 2^i apart: every rank crosses. What is left, S / M, is
    exchanged inside. Steps wait for each other, so that their times add up. s_i is what switches above the leaves
    leave: 1 where the pairs of the step lie under one, 1 / oversubscription where none does. Latencies and
    efficiencies are those of the ring under Simple: nobody measured this algorithm on these fabrics.

    # Approximation: leaves hold a power of two of neighbouring domains (else under-estimates their crossings).

    References: Thakur et al., "Optimization of collective communication operations in MPICH" (2005).
    """
    network, costs = links.network, links.scale_up.all_reduce
    n, nodes, r = groups.num_ranks, groups.num_nodes, groups.ranks_per_node
    far, near = np.ceil(np.log2(nodes)), np.ceil(np.log2(r))
    q = np.where(r == 1, network.rail_efficiency, network.ring_efficiency) * network.protocol_efficiency[SIMPLE]
    rate = groups.network_bytes_per_s * q
    outer = np.zeros_like(size)
    for i in range(1, int(far.max(initial=0.0)) + 1):
        if links.routed is None:
            share = _share_of_step(nodes / 2.0**i * groups.node_stride, links)
        else:
            share = _routed_share_of_step(groups, links, i)
        outer = outer + np.where(i <= far, r * size / 2.0**i / (rate * share), 0.0)
    inner = (r - 1) / n * size / (links.scale_up_bytes_per_s * costs.efficiency[SIMPLE])
    local = size / n / (links.scale_up_bytes_per_s * costs.local_efficiency)
    latency = costs.launch_s[SIMPLE] + 2 * near * costs.hop_factor[SIMPLE] * links.link_latency_s
    across = network.base_s + 2 * far * network.hop_factor[SIMPLE] * links.network_latency_s
    return AlgorithmTime(
        latency_s=latency + np.where(groups.crosses, across, 0.0), stream_s=2 * (outer + inner) + local
    )


def _routed_share_of_step(groups: GroupArrays, links: ClusterLinks, step: int) -> Floats:
    """The same on a routed fabric; 1 for groups that have no such step."""
    columns = zip(
        groups.num_nodes, groups.node_stride, groups.groups_per_node * groups.network_bytes_per_s, strict=True
    )
    share = np.ones_like(groups.num_nodes)
    for i, (nodes, stride, takes) in enumerate(columns):
        if links.routed is not None and nodes >= 2.0**step:
            found = routed_share(links.routed, int(nodes), int(stride), "exchange", int(nodes / 2.0**step))
            share[i] = min(1.0, found.bytes_per_s / takes)
    return share


def _share_of_step(distance: Floats, links: ClusterLinks) -> Floats:
    """Share of the cards that is left to pairs `distance` domains apart."""
    share = np.ones_like(distance)
    below, over = links.leaf_domains, links.oversubscription
    for level, factor in ((1.0, 1.0), (links.pod_leaves, links.core_oversubscription)):
        if level == 0.0:
            continue
        below, over = below * level, over * factor
        share = np.where(distance >= below, np.minimum(share, 1.0 / over), share)
    return share


def _power_of_two(count: Floats) -> npt.NDArray[np.bool_]:
    return np.asarray(np.exp2(np.rint(np.log2(count))) == count)


def own_plan(option: Option, message_bytes: float) -> CollectivePlan:
    """How a framework's kernel runs: thread blocks that each take an SM, and what one of them moves."""
    blocks = max(1, min(option.max_blocks, math.ceil(message_bytes / (16 * OWN_THREADS))))
    chunk = max(1.0, message_bytes / blocks)
    return CollectivePlan(
        algorithm=option.algorithm,
        protocol=OWN_PROTOCOL,
        num_channels=blocks,
        num_threads=OWN_THREADS,
        chunk_bytes=chunk,
        slice_bytes=chunk,
        num_loops=1,
        pipeline_depth=1,
    )
