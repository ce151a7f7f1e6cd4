"""Where the ranks of each parallelism axis lie: how many share a node, how many nodes a group spans.

Ranks count up in the order tensor, context, data, pipeline (Megatron's `tp-cp-ep-dp-pp`), and rank r runs on device r.
With stage size S = tp * cp * dp, rank r has pipeline stage r // S. Experts are split over tensor ranks too (Megatron's
default, expert tensor parallelism = tp): ep neighbouring tensor groups hold different experts, and cp * dp / ep of them
the same ones. Another order of axes, or a GPU of one's own choice for every rank, is a `Placement`.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from echo_explore.core import PlacementError, SpecError
from echo_explore.graph.kinds import Axis
from echo_explore.specs import ClusterSpec, ParallelConfig, Placement
from echo_explore.specs.placement import DEFAULT_PLACEMENT
from echo_explore.topology.rank_order import EXPERT_AXES, Ranks, axis_groups, devices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A communication group and the groups like it that communicate at the same time.

    Attributes:
        num_ranks: GPUs in the group.
        ranks_per_node: of these in one scale-up domain.
        groups_per_node: groups of this axis with ranks in one domain, which share its network cards.
        node_stride: domains from one that a group uses to the next; 1: neighbours.
    """

    num_ranks: int
    ranks_per_node: int
    groups_per_node: int = 1
    node_stride: int = 1

    @property
    def num_nodes(self) -> int:
        """Scale-up domains that the group spans."""
        return -(-self.num_ranks // self.ranks_per_node)


def group_shape(
    axis: Axis, layout: ParallelConfig, cluster: ClusterSpec, placement: Placement = DEFAULT_PLACEMENT
) -> GroupShape:
    """The shape of the groups of an axis.

    Groups that lie unevenly over domains are taken at their worst: as many domains as the most spread group spans, and
    the ranks spread evenly over these.

    Raises:
        SpecError: the axis has no groups (NONE), or data_parallel is not known yet.
        PlacementError: for the axes of experts, etp * ep does not divide tp * cp * dp; the placement does not fit the
            layout or the cluster.
    """
    if not placement.is_default:
        return _placed_shape(axis, layout, cluster, placement)
    domain = domain_size(layout, cluster)
    if axis == Axis.MODEL:
        return _model_shape(layout.tensor_parallel, layout.pipeline_parallel, _stage_gpus(layout), domain)
    if axis == Axis.EMBEDDING:
        return _embedding_shape(layout.pipeline_parallel, _stage_gpus(layout), domain)
    num_ranks, stride = _axis_grid(axis, layout)
    return _strided_shape(num_ranks, stride, domain, layout.num_gpus)


def mirrored_shape(
    axis: Axis, layout: ParallelConfig, cluster: ClusterSpec, placement: Placement = DEFAULT_PLACEMENT
) -> GroupShape:
    """The shape of the groups of an axis, each together with that of the mirror image of its stage, s of p - 1 - s.

    What holds the same parameters where two copies of a model run through one pipeline in opposite directions.

    Raises:
        SpecError, PlacementError: see `group_shape`; an odd number of stages.
    """
    if layout.pipeline_parallel % 2:
        raise SpecError("pipeline_parallel", layout.pipeline_parallel, "must be even to be mirrored", "use even stages")
    pipelines = axis_groups(Axis.PIPELINE, layout, placement.order)
    mirror = np.empty(layout.num_gpus, dtype=np.int64)
    mirror[pipelines] = pipelines[:, ::-1]
    groups = axis_groups(axis, layout, placement.order)
    groups = np.concatenate([groups, mirror[groups]], axis=1)
    devices = devices_of(placement, layout, max_gpus=cluster.max_gpus)
    domains = devices // _placed_domain(layout, cluster, placement)
    return _spread_shape(domains[groups], int(np.bincount(domains).max()))


def pipeline_boundary(
    layout: ParallelConfig, cluster: ClusterSpec, from_stage: int, placement: Placement = DEFAULT_PLACEMENT
) -> GroupShape:
    """The shape of the pairs that carry activations from a stage to the next (from the last to the first under
    interleaving): ranks_per_node 2 if every pair lies in one domain, else 1.

    Raises:
        SpecError: there is no such stage, or data_parallel is not known yet.
        PlacementError: the placement does not fit the layout or the cluster.
    """  # noqa: D205
    stages = layout.pipeline_parallel
    if not 0 <= from_stage < stages:
        raise SpecError("from_stage", from_stage, f"must lie in 0..{stages - 1}", "name a pipeline stage")
    to_stage = (from_stage + 1) % stages
    if placement.is_default or stages == 1:
        return _pair_shape(_stage_gpus(layout), from_stage, to_stage, domain_size(layout, cluster))
    pipelines = devices_of(placement, layout, max_gpus=cluster.max_gpus)[
        axis_groups(Axis.PIPELINE, layout, placement.order)
    ]
    domain = _placed_domain(layout, cluster, placement)
    return _crossing_shape(pipelines[:, from_stage] // domain, pipelines[:, to_stage] // domain)


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
    stage, tensor, stages = _stage_gpus(layout), layout.tensor_parallel, layout.pipeline_parallel
    split, experts = layout.expert_tensor_ranks, layout.expert_gpus
    if axis in EXPERT_AXES and stage % experts:
        rule = f"etp*ep = {experts} must divide tp*cp*dp = {stage}"
        raise PlacementError("layout.ep", layout.expert_parallel, rule, "change ep or dp")
    grids = {
        Axis.TENSOR: (tensor, 1),
        Axis.CONTEXT: (layout.context_parallel, tensor),
        Axis.DATA: (stage // tensor, tensor),
        Axis.EXPERT: (layout.expert_parallel, split),
        Axis.EXPERT_TENSOR: (split, 1),
        Axis.EXPERT_MODEL: (experts, 1),
        Axis.EXPERT_DATA: (stage // experts, experts),
        Axis.PIPELINE: (min(stages, 2), stage),
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


@lru_cache(maxsize=4096)
def _embedding_shape(stages: int, stage_gpus: int, domain: int) -> GroupShape:
    """Pairs {a, a + (stages - 1) * stage_gpus} for a < stage_gpus; other stages have none."""
    if stages == 1:
        return GroupShape(num_ranks=1, ranks_per_node=1, groups_per_node=min(domain, stage_gpus))
    far = (stages - 1) * stage_gpus
    starts = np.arange(min(stage_gpus, domain))
    in_pair = np.concatenate([starts, far + starts]) // domain
    most = domain if stage_gpus >= domain else int(np.unique(in_pair, return_counts=True)[1].max())
    return _worst(starts, np.array([0, far]), domain, most)


def _worst(starts: np.ndarray, offsets: np.ndarray, domain: int, num_gpus: int) -> GroupShape:
    """The shape of the most spread of the groups {start + offset}; `num_gpus` have such a group."""
    return _spread_shape((starts[:, None] + offsets[None, :]) // domain, min(domain, num_gpus))


def _spread_shape(domains: np.ndarray, most: int) -> GroupShape:
    """The shape of the most spread of groups whose ranks lie in `domains`, one group a row.

    `most` is the largest number of ranks of such groups in one domain.
    """
    num_ranks = domains.shape[1]
    span = int(1 + (np.diff(np.sort(domains, axis=1), axis=1) > 0).sum(axis=1).max())
    ranks_per_node = -(-num_ranks // span)
    if span > 1:  # the largest count with which num_nodes is at least the span
        ranks_per_node = min(ranks_per_node, -(-num_ranks // (span - 1)) - 1)
    ends = np.sort(domains, axis=1)[:, [0, -1]]
    stride = round(int((ends[:, 1] - ends[:, 0]).max()) / (span - 1)) if span > 1 else 1
    return GroupShape(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        groups_per_node=-(-most // ranks_per_node),
        node_stride=max(1, stride),
    )


def _placed_domain(layout: ParallelConfig, cluster: ClusterSpec, placement: Placement) -> int:
    """GPUs of a domain: with a map those of the cluster, since the map names them; else as many as the job uses."""
    return cluster.node.domain_gpus if placement.device_of_rank else domain_size(layout, cluster)


def _placed_shape(axis: Axis, layout: ParallelConfig, cluster: ClusterSpec, placement: Placement) -> GroupShape:
    """The shape under any placement, from the groups themselves."""
    groups: Ranks = axis_groups(axis, layout, placement.order)
    if axis == Axis.PIPELINE:
        groups = groups[:, :2]
    domains = devices_of(placement, layout, max_gpus=cluster.max_gpus)[groups] // _placed_domain(
        layout, cluster, placement
    )
    most = int(np.unique(domains, return_counts=True)[1].max())
    return _spread_shape(domains, most)


@lru_cache(maxsize=4096)
def _pair_shape(stage_gpus: int, from_stage: int, to_stage: int, domain: int) -> GroupShape:
    """Pairs (from_stage * stage_gpus + i, to_stage * stage_gpus + i) for i < stage_gpus."""
    if from_stage == to_stage:
        return GroupShape(num_ranks=1, ranks_per_node=1, groups_per_node=min(stage_gpus, domain))
    senders = from_stage * stage_gpus + np.arange(stage_gpus)
    receivers = senders + (to_stage - from_stage) * stage_gpus
    return _crossing_shape(senders // domain, receivers // domain)


def _crossing_shape(senders: np.ndarray, receivers: np.ndarray) -> GroupShape:
    """The shape of pairs from their domains."""
    crosses = senders != receivers
    if not crosses.any():
        most = np.unique(senders, return_counts=True)[1].max()
        return GroupShape(num_ranks=2, ranks_per_node=2, groups_per_node=int(most))
    most = np.unique(senders[crosses], return_counts=True)[1].max()
    stride = int(np.abs(senders - receivers).max())
    return GroupShape(num_ranks=2, ranks_per_node=1, groups_per_node=int(most), node_stride=stride)
