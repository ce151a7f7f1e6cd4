"""Which rank has which place on the parallelism axes, and which GPU a rank runs on.

An order names the axes from the fastest to the slowest: in `tp-cp-ep-dp-pp`, Megatron's default, tensor neighbours are
neighbouring ranks and pipeline stages lie farthest apart. For the groups of experts, expert-tensor parallelism, ep and
what then remains of a stage take the places of tp, ep and dp in the same order, and cp has none: experts lie on
tensor-parallel ranks too (megatron-core 0.16.1, parallel_state.py, 2026).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.core import PlacementError, SpecError
from echo_explore.graph.kinds import Axis
from echo_explore.specs import ParallelConfig

Ranks = npt.NDArray[np.int64]
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
_NAMES = ("tp", "cp", "ep", "dp", "pp")
_AXES_OF: dict[Axis, tuple[str, ...]] = {
    Axis.TENSOR: ("tp",),
    Axis.CONTEXT: ("cp",),
    Axis.DATA: ("cp", "dp"),
    Axis.PIPELINE: ("pp",),
    Axis.EMBEDDING: ("pp",),
    Axis.MODEL: ("tp", "pp"),
    Axis.EXPERT: ("ep",),
    Axis.EXPERT_DATA: ("dp",),
    Axis.EXPERT_TENSOR: ("tp",),
    Axis.EXPERT_MODEL: ("tp", "ep"),
}
EXPERT_AXES = (Axis.EXPERT, Axis.EXPERT_DATA, Axis.EXPERT_TENSOR, Axis.EXPERT_MODEL)
"""Axes whose groups hold experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The order of axes, and the GPU of each rank.

    Attributes:
        order: the axes tp, cp, ep, dp, pp, each once, from the fastest to the slowest, joined by `-`.
        device_of_rank: GPU of each rank, counted host by host through the cluster; empty: rank r on GPU r of those that
            the job gets.
    """

    order: str = DEFAULT_ORDER
    device_of_rank: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if sorted(self.order.split("-")) != sorted(_NAMES):
            raise SpecError(
                "placement.order", self.order, "must name tp, cp, ep, dp, pp once each", f'write "{DEFAULT_ORDER}"'
            )
        seen: dict[int, int] = {}
        for rank, device in enumerate(self.device_of_rank):
            if device < 0:
                raise SpecError("placement.device_of_rank", device, f"rank {rank} needs a GPU", "count from 0")
            if device in seen:
                raise SpecError(
                    "placement.device_of_rank",
                    device,
                    f"ranks {seen[device]} and {rank} are both mapped to it",
                    "give every rank a GPU of its own",
                )
            seen[device] = rank

    @property
    def is_default(self) -> bool:
        """Megatron's order on GPUs in turn."""
        return self.order == DEFAULT_ORDER and not self.device_of_rank

    def devices(self, layout: ParallelConfig, *, max_gpus: int) -> Ranks:
        """GPU of each rank of a job, shape (num_gpus,).

        Raises:
            PlacementError: the map is of another number of ranks, or names a GPU that the cluster has not.
        """
        if not self.device_of_rank:
            return np.arange(layout.num_gpus)
        if len(self.device_of_rank) != layout.num_gpus:
            raise PlacementError(
                "placement.device_of_rank",
                f"({len(self.device_of_rank)} ranks)",
                f"the layout has {layout.num_gpus}",
                "map every rank once",
            )
        devices = np.array(self.device_of_rank)
        if devices.max() >= max_gpus:
            raise PlacementError(
                "placement.device_of_rank",
                int(devices.max()),
                f"the cluster has GPUs 0..{max_gpus - 1}",
                "correct the map",
            )
        return devices


DEFAULT_PLACEMENT = Placement()


def placement_from_pairs(pairs: Iterable[tuple[int, int]], *, order: str = DEFAULT_ORDER) -> Placement:
    """The placement of a list of (rank, GPU).

    Raises:
        SpecError: a rank is mapped twice or left out, or a GPU is used twice.
    """
    found: dict[int, int] = {}
    for rank, device in pairs:
        if rank in found:
            raise SpecError(
                "placement.device_of_rank",
                rank,
                f"the rank is mapped twice, to GPU {found[rank]} and to {device}",
                "map every rank once",
            )
        found[rank] = device
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise SpecError("placement.device_of_rank", missing[0], "the rank is not mapped", "map ranks 0, 1, 2, ...")
    return Placement(order=order, device_of_rank=tuple(found[rank] for rank in range(len(found))))


def axis_groups(axis: Axis, layout: ParallelConfig, order: str = DEFAULT_ORDER) -> Ranks:
    """Ranks of all groups of an axis, one group a row, shape (num_groups, num_ranks).

    EMBEDDING pairs the first and last stage; PIPELINE has whole pipelines.

    Raises:
        SpecError: the axis has no groups, or data_parallel is not known yet.
        PlacementError: etp * ep does not divide tp * cp * dp, or the order does not fit experts and pipelines together.
    """
    if axis not in _AXES_OF:
        raise SpecError("axis", axis.name, "has no communication groups", "name a parallelism axis")
    if layout.data_parallel < 1:
        raise SpecError("layout.dp", layout.data_parallel, "is not known yet", "fill in data_parallel first")
    stage, experts = layout.num_gpus // layout.pipeline_parallel, layout.expert_gpus
    is_expert = axis in EXPERT_AXES
    if is_expert and stage % experts:
        rule = f"etp*ep = {experts} must divide tp*cp*dp = {stage}"
        raise PlacementError("layout.ep", layout.expert_parallel, rule, "change ep or dp")
    _check_experts(layout, order)
    sizes = {
        "tp": layout.expert_tensor_ranks if is_expert else layout.tensor_parallel,
        "cp": 1 if is_expert else layout.context_parallel,
        "ep": layout.expert_parallel if is_expert else 1,
        "dp": stage // experts if is_expert else layout.data_parallel,
        "pp": layout.pipeline_parallel,
    }
    names = order.split("-")[::-1]  # slowest first, as numpy counts
    grid = np.arange(layout.num_gpus).reshape([sizes[name] for name in names])
    chosen = [i for i, name in enumerate(names) if name in _AXES_OF[axis]]
    rest = [i for i in range(len(names)) if i not in chosen]
    groups = grid.transpose(rest + chosen).reshape(-1, int(np.prod([grid.shape[i] for i in chosen])))
    if axis == Axis.EMBEDDING and layout.pipeline_parallel > 1:
        return groups[:, [0, -1]]
    return groups


def _check_experts(layout: ParallelConfig, order: str) -> None:
    """What megatron-core 0.16.1 accepts (parallel_state.py, initialize_model_parallel)."""
    same = layout.expert_parallel == layout.context_parallel
    if layout.expert_parallel == 1 or order.endswith("pp") or layout.pipeline_parallel == 1 or same:
        return
    raise PlacementError(
        "placement.order",
        order,
        "with experts the pipeline must come last, or ep equal cp, so that both have the same pipelines",
        "end it with pp",
    )
