"""Where the ranks of each parallelism axis lie: how many share a node, how many nodes a group spans.

Ranks count up in the order tensor, context, data, pipeline (Megatron's `tp-cp-ep-dp-pp`), and rank r runs on device r.
With stage size S = tp * cp * dp, rank r has pipeline stage r // S. Experts are split over tensor ranks too (Megatron's
default, expert tensor parallelism = tp): ep neighbouring tensor groups hold different experts, and cp * dp / ep of them
the same ones.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from echo_explore.core import PlacementError, SpecError
from echo_explore.graph.kinds import Axis
from echo_explore.specs import ClusterSpec, ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A communication group and the groups like it that communicate at the same time.

    Attributes:
        num_ranks: GPUs in the group.
        ranks_per_node: of these in one scale-up domain.
        groups_per_node: groups of this axis with ranks in one domain, which share its network cards.
    """

    num_ranks: int
    ranks_per_node: int
    groups_per_node: int = 1

    @property
    def num_nodes(self) -> int:
        """Scale-up domains that the group spans."""
        return -(-self.num_ranks // self.ranks_per_node)


def group_shape(axis: Axis, layout: ParallelConfig, cluster: ClusterSpec) -> GroupShape:
    """The shape of the groups of an axis.

    Groups that lie unevenly over domains are taken at their worst: as many domains as the most spread group spans, and
    the ranks spread evenly over these.

    Raises:
        SpecError: the axis has no groups (NONE), or data_parallel is not known yet.
        PlacementError: for the axes of experts, ep does not divide cp * dp.
    """
    domain = domain_size(layout, cluster)
    if axis == Axis.MODEL:
        return _model_shape(layout.tensor_parallel, layout.pipeline_parallel, _stage_gpus(layout), domain)
    num_ranks, stride = _axis_grid(axis, layout)
    return _strided_shape(num_ranks, stride, domain, layout.num_gpus)


def pipeline_boundary(layout: ParallelConfig, cluster: ClusterSpec, from_stage: int) -> GroupShape:
    """The shape of the pairs that carry activations from a stage to the next (from the last to the first under
    interleaving): ranks_per_node 2 if every pair lies in one domain, else 1.

    Raises:
        SpecError: there is no such stage, or data_parallel is not known yet.
    """  # noqa: D205
    stages = layout.pipeline_parallel
    if not 0 <= from_stage < stages:
        raise SpecError("from_stage", from_stage, f"must lie in 0..{stages - 1}", "name a pipeline stage")
    to_stage = (from_stage + 1) % stages
    return _pair_shape(_stage_gpus(layout), from_stage, to_stage, domain_size(layout, cluster))


def domain_size(layout: ParallelConfig, cluster: ClusterSpec) -> int:
    """GPUs that the job uses of each scale-up domain it fills.

    A domain of several hosts (an NVL72 rack) is used in equal blocks of hosts where the job allows it, as schedulers
    are told to place such jobs (topology/block and `--segment`, Slurm 23.11 documentation, 2023): the largest block of
    at least half the domain that divides the job; 256 GPUs take 64 of each rack of 72.
    """
    return _block(cluster.node.domain_gpus, cluster.node.num_gpus, layout.num_gpus)


def _block(domain: int, host: int, num_gpus: int) -> int:
    if num_gpus <= domain or host >= domain:
        return domain
    sizes = range(domain - domain % host, max(domain // 2, host) - 1, -host)
    return next((size for size in sizes if num_gpus % size == 0), domain)


def _stage_gpus(layout: ParallelConfig) -> int:
    if layout.data_parallel < 1:
        raise SpecError("layout.dp", layout.data_parallel, "is not known yet", "fill in data_parallel first")
    return layout.tensor_parallel * layout.context_parallel * layout.data_parallel


def _axis_grid(axis: Axis, layout: ParallelConfig) -> tuple[int, int]:
    """Ranks of a group of the axis, and the distance between neighbours in it."""
    stage, tensor, expert = _stage_gpus(layout), layout.tensor_parallel, layout.expert_parallel
    stages, replicas = layout.pipeline_parallel, layout.context_parallel * layout.data_parallel
    if axis in (Axis.EXPERT, Axis.EXPERT_DATA) and replicas % expert:
        raise PlacementError("layout.ep", expert, f"must divide cp*dp = {replicas}", "change ep or dp")
    grids = {
        Axis.TENSOR: (tensor, 1),
        Axis.CONTEXT: (layout.context_parallel, tensor),
        Axis.DATA: (replicas, tensor),
        Axis.EXPERT: (expert, tensor),
        Axis.EXPERT_DATA: (replicas // expert, tensor * expert),
        Axis.PIPELINE: (min(stages, 2), stage),
        Axis.EMBEDDING: (min(stages, 2), stage * (stages - 1)),
    }
    if axis not in grids:
        raise SpecError("axis", axis.name, "has no communication groups", "name a parallelism axis")
    return grids[axis]


@lru_cache(maxsize=4096)
def _strided_shape(num_ranks: int, stride: int, domain: int, num_gpus: int) -> GroupShape:
    """Groups {a + stride * i : i < num_ranks} that tile 0..num_gpus-1.

    A block of num_ranks * stride ranks holds `stride` groups; only where its first rank lies in its domain matters, so
    at most `domain` starts are looked at.
    """
    if num_ranks == 1:
        return GroupShape(num_ranks=1, ranks_per_node=1, groups_per_node=min(domain, num_gpus))
    span = num_ranks * stride
    num_blocks = max(1, num_gpus // span)
    first = np.unique(np.arange(min(num_blocks, domain)) * span % domain)
    starts = np.unique((first[:, None] + np.arange(min(stride, domain))[None, :]) % domain)
    return _worst(starts, np.arange(num_ranks) * stride, domain, num_gpus)


@lru_cache(maxsize=4096)
def _model_shape(tensor: int, stages: int, stage_gpus: int, domain: int) -> GroupShape:
    """Groups {a + t + stage_gpus * p : t < tensor, p < stages} for a in multiples of `tensor`."""
    offsets = (np.arange(stages)[:, None] * stage_gpus + np.arange(tensor)[None, :]).reshape(-1)
    starts = np.unique(np.arange(min(stage_gpus // tensor, domain)) * tensor % domain)
    return _worst(starts, offsets, domain, stages * stage_gpus)


def _worst(starts: np.ndarray, offsets: np.ndarray, domain: int, num_gpus: int) -> GroupShape:
    """The shape of the most spread of the groups {start + offset}."""
    num_ranks = len(offsets)
    domains = np.sort((starts[:, None] + offsets[None, :]) // domain, axis=1)
    span = int(1 + (np.diff(domains, axis=1) > 0).sum(axis=1).max())
    ranks_per_node = -(-num_ranks // span)
    if span > 1:  # the largest count with which num_nodes is at least the span
        ranks_per_node = min(ranks_per_node, -(-num_ranks // (span - 1)) - 1)
    sharing = -(-min(domain, num_gpus) // ranks_per_node)
    return GroupShape(num_ranks=num_ranks, ranks_per_node=ranks_per_node, groups_per_node=sharing)


@lru_cache(maxsize=4096)
def _pair_shape(stage_gpus: int, from_stage: int, to_stage: int, domain: int) -> GroupShape:
    """Pairs (from_stage * stage_gpus + i, to_stage * stage_gpus + i) for i < stage_gpus."""
    if from_stage == to_stage:
        return GroupShape(num_ranks=1, ranks_per_node=1, groups_per_node=min(stage_gpus, domain))
    senders = from_stage * stage_gpus + np.arange(stage_gpus)
    receivers = senders + (to_stage - from_stage) * stage_gpus
    crosses = senders // domain != receivers // domain
    if not crosses.any():
        most = np.unique(senders // domain, return_counts=True)[1].max()
        return GroupShape(num_ranks=2, ranks_per_node=2, groups_per_node=int(most))
    most = np.unique(senders[crosses] // domain, return_counts=True)[1].max()
    return GroupShape(num_ranks=2, ranks_per_node=1, groups_per_node=int(most))
