"""Which rank has which place on the parallelism axes, and which GPU a rank runs on.

An order names the axes from the fastest to the slowest: in `tp-cp-ep-dp-pp`, Megatron's default, tensor neighbours are
neighbouring ranks and pipeline stages lie farthest apart. For the groups of experts, expert-tensor parallelism, ep and
what then remains of a stage take the places of tp, ep and dp in the same order, and cp has none: experts lie on
tensor-parallel ranks too (megatron-core 0.16.1, parallel_state.py, 2026).
"""

import numpy as np
import numpy.typing as npt

from echo_explore.core import PlacementError, SpecError
from echo_explore.graph.kinds import Axis
from echo_explore.specs import ParallelConfig, Placement
from echo_explore.specs.placement import DEFAULT_ORDER, check_order

Ranks = npt.NDArray[np.int64]
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


def devices_of(placement: Placement, layout: ParallelConfig, *, max_gpus: int) -> Ranks:
    """GPU of each rank of a job, shape (num_gpus,).

    Raises:
        PlacementError: see `Placement.check_fits`.
    """
    placement.check_fits(layout, max_gpus=max_gpus)
    return np.array(placement.device_of_rank) if placement.device_of_rank else np.arange(layout.num_gpus)


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
    check_order(order, layout)
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
